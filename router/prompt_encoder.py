"""Bodies to JSON, prompts to token ids: on the event loop when short, else on a few threads.

A long prompt takes tens of milliseconds; other streams must not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from cluster.block_hash import HashScope
from cluster.chat_template import ChatTemplate
from cluster.errors import InvalidRequest
from cluster.identity import BlockHash
from cluster.tokenizer import Tokenizer
from cluster.word_table import WordTable, build_word_table
from router.api_types import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.cache_view import prompt_hashes
from router.field_rules import unsupported_parameter
from router.json_body import parse_json_object
from router.known_segments import KnownSegments
from router.template_options import ENABLE_THINKING
from router.tool_format import messages_as_text

# About 0.3 ms of work: less than handing it to a thread and back costs when the loop is busy.
MAX_INLINE_CHARS = 1_000
# Half a millisecond where words are looked up: a sixth of what a thread would take, and no wait for it.
MAX_LOOKED_UP_CHARS = 16_000
NUM_THREADS = 2
# Reading JSON is that much faster than tokenising, and so is filling in a chat template.
JSON_BYTES_PER_CHAR = 64
WRITTEN_PER_CHAR = 16

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class PromptEncoder:
    """Owned by the router process; `close` ends its threads."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._known = KnownSegments(tokenizer)
        self._words: WordTable | None = None
        self._learning: Future[None] | None = None
        # Its queue is bounded by the number of requests that the router admits.
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prompt-encoder")

    @property
    def is_learning(self) -> bool:
        """Whether requests would share the interpreter with the making of the table: each would take several times as
        long."""
        return self._learning is not None and not self._learning.done()

    def learn_words(self) -> Future[None]:
        """Begins to make the table of the vocabulary's words on a thread; until it is there texts go without."""

        def learn() -> None:
            try:
                self._words = build_word_table(self._tokenizer)
            except Exception:
                _log.exception("no table of the vocabulary's words: texts are tokenised whole")

        self._learning = self._threads.submit(learn)
        return self._learning

    async def encode(self, prompt: Prompt, owner: bytes) -> list[int]:
        """The prompt's token ids; what the owner's earlier conversations share with it is not tokenised again.

        Raises `InvalidRequest` when there are none, or the template refuses.
        """
        token_ids = await self._encode(prompt, owner)
        if not token_ids:
            param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
            raise InvalidRequest(f"{param} is empty: it has no tokens", param=param)
        return token_ids

    async def hash(self, token_ids: list[int], scope: HashScope) -> list[BlockHash]:
        """The names under which the prompt's full blocks are cached."""
        return await self._run(lambda: prompt_hashes(token_ids, scope), num_chars=len(token_ids))

    async def decode(self, token_ids: list[int]) -> str:
        """A sequence's text with its special tokens."""
        return await self._run(
            lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False), num_chars=4 * len(token_ids)
        )

    async def parse(self, body: bytes) -> dict[str, Any]:
        """A body as a JSON object. Raises `InvalidRequest`."""
        return await self._run(lambda: parse_json_object(body), num_chars=len(body) // JSON_BYTES_PER_CHAR)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _encode(self, prompt: Prompt, owner: bytes) -> list[int]:
        if isinstance(prompt, TokenPrompt):
            return list(prompt.token_ids)
        if isinstance(prompt, TextPrompt):
            return await self._run(lambda: self._tokenizer.encode(prompt.text), num_chars=len(prompt.text))
        num_chars = sum(len(message["content"]) for message in prompt.messages)
        num_chars += sum(len(tool.parameters) + len(tool.description) for tool in prompt.tools)
        text = await self._run(
            lambda: self._written(prompt), num_chars=(num_chars + 256 * len(prompt.messages)) // WRITTEN_PER_CHAR
        )
        segments = self._known.split(text, owner)
        if not (missing := segments.missing):
            return self._known.join(segments, ())
        encoded = self._looked_up(missing, segments.num_missing_chars)
        if encoded is None:
            encoded = await self._run(
                lambda: self._tokenizer.encode_each(missing), num_chars=segments.num_missing_chars
            )
        return self._known.join(segments, encoded)

    def _looked_up(self, texts: Sequence[str], num_chars: int) -> list[list[int]] | None:
        """The ids of short texts of common words, here and now; None: not all are."""
        if self._words is None or num_chars > MAX_LOOKED_UP_CHARS:
            return None
        encoded = []
        for text in texts:
            if (ids := self._words.encode(text)) is None:
                return None
            encoded.append(ids)
        return encoded

    def _written(self, prompt: ChatPrompt) -> str:
        """The conversation as the model's template writes it."""
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions", param="messages", code="unsupported_parameter"
            )
        messages = messages_as_text(prompt.messages, prompt.tools, self._template)
        tools = [tool.to_template() for tool in prompt.tools] or None
        switches = {}
        if prompt.enables_thinking is not None:
            if not self._template.mentions(ENABLE_THINKING):
                raise unsupported_parameter(
                    f"chat_template_kwargs.{ENABLE_THINKING}", "this model's chat template has no thinking to switch"
                )
            switches[ENABLE_THINKING] = prompt.enables_thinking
        return self._template.render(
            messages,
            tools=tools,
            switches=switches,
            add_generation_prompt=prompt.has_generation_prompt,
            is_continued=prompt.is_continued,
        )

    async def _run(self, work: Callable[[], Result], *, num_chars: int) -> Result:
        if num_chars <= MAX_INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
