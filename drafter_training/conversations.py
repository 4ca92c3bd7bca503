"""Conversations that the target holds with itself: what is asked, and its answers with their hidden states.

self-written user turns ┐
our instructions        ┴─> answers (greedy or sampled) ─┬─> kept
                                                         └─ sometimes a follow-up question ─> one more answer
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from cluster.chat_template import ChatTemplate
from cluster.tokenizer import Tokenizer
from drafter_training.instructions import FOLLOW_UPS
from drafter_training.turn_writer import TurnPrompt, TurnWriter, WrittenTurn

USER_TEMPERATURE = 1.0
ANSWER_TEMPERATURE = 0.7
GREEDY_SHARE = 0.6  # of the answers
FOLLOW_UP_SHARE = 0.15
MAX_USER_TOKENS = 80
MIN_USER_CHARS, MAX_USER_CHARS = 12, 400
_MARK = "\u241f"  # stands where the user's text would: splits the template's output there


class ChatFormat:
    """Renders conversations as token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.vocabulary
        if vocabulary.chat_template is None:
            raise ValueError("the model has no chat template: it cannot hold conversations")
        self._tokenizer = tokenizer
        self._template = ChatTemplate(vocabulary.chat_template, vocabulary.special_tokens)

    def encode(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Up to where the assistant's answer begins."""
        return self._encode_text(self._template.render(list(messages), add_generation_prompt=True))

    def user_header(self) -> tuple[int, ...]:
        """Up to where a user's first turn begins."""
        text = self._template.render([{"role": "user", "content": _MARK}], add_generation_prompt=False)
        return self._encode_text(text.partition(_MARK)[0])

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids).strip()

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def write_user_turns(writer: TurnWriter, chat: ChatFormat, count: int, seed: int) -> Iterator[str]:
    """What the target thinks that users ask: whole turns of a reasonable length, no two alike."""
    header = chat.user_header()
    prompts = (TurnPrompt(header, USER_TEMPERATURE, seed + index, MAX_USER_TOKENS) for index in range(count))
    seen: set[str] = set()
    for turn in writer.write(prompts):
        text = chat.decode(turn.token_ids)
        if turn.has_ended and MIN_USER_CHARS <= len(text) <= MAX_USER_CHARS and text not in seen:
            seen.add(text)
            yield text


def hold_conversations(
    writer: TurnWriter, chat: ChatFormat, asked: Iterable[str], seed: int, max_answer_tokens: int
) -> Iterator[WrittenTurn]:
    """The answers to what is asked, and to some follow-up questions, as they end."""
    source = random.Random(seed)  # noqa: S311
    follow_ups: deque[list[dict[str, str]]] = deque()
    messages_of: dict[TurnPrompt, list[dict[str, str]]] = {}

    def prompt_of(messages: list[dict[str, str]]) -> TurnPrompt:
        temperature = 0.0 if source.random() < GREEDY_SHARE else ANSWER_TEMPERATURE
        prompt = TurnPrompt(chat.encode(messages), temperature, source.getrandbits(63), max_answer_tokens)
        messages_of[prompt] = messages
        return prompt

    def prompts() -> Iterator[TurnPrompt]:
        for text in asked:
            yield prompt_of([{"role": "user", "content": text}])
            if follow_ups:
                yield prompt_of(follow_ups.popleft())

    for turn in writer.write(prompts()):
        yield turn
        messages = messages_of.pop(turn.prompt)
        if len(messages) == 1 and turn.has_ended and source.random() < FOLLOW_UP_SHARE:
            answer = {"role": "assistant", "content": chat.decode(turn.token_ids)}
            follow_ups.append([*messages, answer, {"role": "user", "content": source.choice(FOLLOW_UPS)}])
