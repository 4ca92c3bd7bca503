"""A model's chat template: a conversation as the text that the model was trained to continue.

The template is a jinja2 program out of the model's files, so it runs in a sandbox with limits, and is tried once when
it is loaded: a hostile or broken one stops the start, not a request. Requests never bring a template.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError

from cluster.errors import InvalidRequest, StartupError
from cluster.template_sandbox import TemplateLimitExceeded, TemplateSandbox

RENDER_TIMEOUT_S = 1.0
# A template writes the conversation once, and around each message little; tools may be written as indented JSON.
MAX_OUTPUT_FACTOR = 4
MIN_OUTPUT_CHARS = 256 * 1024
# Behind a message that shall be continued, with a space that shows whether the template trims. Characters for private
# use; what a client's text has of them stands before it.
_MARK = "\ue0f7\ue0f2"

_TRIAL_CONVERSATION = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]


def template_of_file(path: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """The template that an operator gives instead of the model's own. Raises `StartupError` naming the file."""
    try:
        source = path.expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise StartupError(f"chat template {path} cannot be read: {reason}", param="chat_template_file") from None
    return ChatTemplate(source, special_tokens, file=path)


class RefusedConversation(TemplateError):
    """The template called `raise_exception`: it cannot write this conversation."""


class ChatTemplate:
    """Renders conversations. Safe to use from several threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
        file: Path | None = None,
    ) -> None:
        """`file`: where the source is from, when that is not the model's files.

        Raises `StartupError` when the template does not compile, or fails or breaks a limit on a small chat.
        """
        self._sandbox = TemplateSandbox(clock)
        self._special_tokens = dict(special_tokens)
        self._source = source
        self._sandbox.globals["raise_exception"] = _refuse
        self._sandbox.globals["strftime_now"] = lambda layout: now().strftime(layout)
        try:
            self._template = self._sandbox.from_string(source)
            self._try_once()
        except Exception as error:  # whatever a foreign program may raise
            reason = f"fails: {type(error).__name__}: {error}"
            if file is not None:
                raise StartupError(f"chat template {file} {reason}", param="chat_template_file") from None
            raise StartupError(
                f"the model's chat template {reason}: use another model file, or give one with --chat-template-file",
                param="model",
            ) from None

    def mentions(self, name: str) -> bool:
        """Whether the template's text has this in it: `tools`, say, for one that writes them."""
        return name in self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        switches: Mapping[str, bool] | None = None,
        is_continued: bool = False,
    ) -> str:
        """The prompt's text. `switches`: variables of the template's own, never what a request names freely.

        `is_continued`: it ends where the last message's own text does, for who goes on with it.
        Raises `InvalidRequest` for a conversation that the template refuses or cannot write.
        """
        if is_continued:
            messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{_MARK} "}]
        try:
            text = self._render(messages, tools, add_generation_prompt, switches or {})
        except RefusedConversation as error:
            raise InvalidRequest(f"the model's chat template refuses: {error}", param="messages") from None
        except TemplateLimitExceeded as error:
            raise InvalidRequest(str(error), param="messages") from None
        except Exception as error:  # the template is foreign code: its faults are about this conversation
            raise InvalidRequest(
                f"the model's chat template cannot write these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from None

        return _up_to_mark(text) if is_continued else text

    def _try_once(self) -> None:
        try:
            self._render(_TRIAL_CONVERSATION, None, True, {})
        except RefusedConversation:
            return  # a template that wants a system message, say, is a working one

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        is_prompt: bool,
        switches: Mapping[str, bool],
    ) -> str:
        num_chars = sum(len(str(value)) for message in messages for value in message.values())
        values: dict[str, Any] = {
            **switches,
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": is_prompt,
        }
        max_chars = MIN_OUTPUT_CHARS + MAX_OUTPUT_FACTOR * (num_chars + len(str(tools or "")))
        return self._sandbox.render(self._template, values, max_chars=max_chars, timeout_s=RENDER_TIMEOUT_S)


def _up_to_mark(text: str) -> str:
    """What stands before the mark; without the spaces before it where the template trims messages."""
    before, mark, behind = text.rpartition(_MARK)
    if not mark:
        raise InvalidRequest(
            "the model's chat template does not write the last message as it is: it cannot be continued",
            param="continue_final_message",
        )
    return before if behind.startswith(" ") else before.rstrip()


def _refuse(message: str) -> NoReturn:
    raise RefusedConversation(message)
