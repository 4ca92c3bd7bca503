"""A conversation for a chat template, built from APIs that write it as items or blocks instead of messages.

A call belongs to the assistant's message before it, whether that held text or other calls. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import ContextLengthExceeded, InvalidRequest
from router.chat_messages import MAX_CALLS, num_chars
from router.limits import ServingLimits, check_prompt_text


class Conversation:
    """Filled by a body's parser; `messages` gives what `ChatPrompt` takes."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []

    def say(self, role: str, text: str) -> None:
        self._messages.append({"role": role, "content": text})

    def call(self, call_id: str, name: str, arguments: Mapping[str, Any], param: str) -> None:
        """A call that the model made earlier. Raises `InvalidRequest` when one turn has too many."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self.say("assistant", "")
        calls = self._messages[-1].setdefault("tool_calls", [])
        if len(calls) == MAX_CALLS:
            raise InvalidRequest(f"{param}: a turn has more than {MAX_CALLS} calls", param=param)
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}})

    def result(self, call_id: str, text: str) -> None:
        """What the client's function gave."""
        self._messages.append({"role": "tool", "content": text, "tool_call_id": call_id})

    @property
    def last_role(self) -> str:
        return str(self._messages[-1]["role"]) if self._messages else ""

    @property
    def ends_with_calls(self) -> bool:
        """Whether the last message is one of the assistant's with calls, or without anything."""
        last = self._messages[-1] if self._messages else {}
        return last.get("role") == "assistant" and bool(last.get("tool_calls") or not last["content"])

    def messages(self, limits: ServingLimits, param: str) -> tuple[Mapping[str, Any], ...]:
        """Raises `ContextLengthExceeded` for what cannot fit, before anything is tokenised."""
        if not self._messages:
            raise InvalidRequest(f"{param} is empty, must have at least one message", param=param)
        if len(self._messages) > limits.max_model_len:  # each takes a token at least
            raise ContextLengthExceeded(
                f"{param} has {len(self._messages)} messages, more than the model's {limits.max_model_len} tokens",
                param=param,
            )
        check_prompt_text(sum(map(num_chars, self._messages)), limits, param)
        return tuple(self._messages)
