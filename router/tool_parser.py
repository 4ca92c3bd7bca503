"""Tool calls out of a model's text while it is written: what is content, which call begins, its arguments by pieces.

    CONTENT ── the opening mark ──> HEAD ── name and key of the arguments ──> ARGUMENTS ── their last brace ──> TAIL
       ^                             │ no call after all: it was content                                       │
       └─────────────────────────────┴────────────────── the closing mark ─────────────────────────────────────┘

Text is only ever read as JSON, never run. What is no call of an offered function stays content, as the model wrote it.
Pure: text in, deltas out.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from router.tool_format import ToolFormat

_HEAD = re.compile(
    r'\s{0,64}\{\s{0,64}(?:"type"\s{0,64}:\s{0,64}"function"\s{0,64},\s{0,64})?'
    r'"name"\s{0,64}:\s{0,64}"([^"\\]{1,64})"\s{0,64},\s{0,64}"(?:arguments|parameters)"\s{0,64}:\s{0,64}(?=\{)'
)


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of one call: `name` and `call_id` with its first part only."""

    index: int
    arguments: str = ""
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """What a piece of text came to."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.calls)


class _State(enum.Enum):
    CONTENT = enum.auto()
    HEAD = enum.auto()
    ARGUMENTS = enum.auto()
    TAIL = enum.auto()


class JsonEnd:
    """Finds where a JSON object ends, however it is cut into pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def feed(self, text: str, start: int = 0) -> int | None:
        """The index after the object's last brace; None while it goes on."""
        for index in range(start, len(text)):
            character = text[index]
            if self._is_in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._is_in_string = False
            elif character == '"':
                self._is_in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None


class ToolCallParser:
    """Owned by one choice of one answer: `push` text as it comes, `finish` at its end."""

    def __init__(self, form: ToolFormat, names: Collection[str], new_call_id: Callable[[], str]) -> None:
        self._form = form
        self._opening = form.opening.strip()
        self._closing = form.closing.strip()
        self._names = frozenset(names)
        self._new_call_id = new_call_id
        self._state = _State.CONTENT if self._opening else _State.HEAD
        self._pending = ""
        self._num_scanned = 0  # of the pending text, by `_end`
        self._end = JsonEnd()
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self.num_calls = 0

    def push(self, text: str) -> ToolDelta:
        self._pending += text
        while self._step():
            pass
        return self._take()

    def finish(self) -> ToolDelta:
        """What was held back is content, unless a call had begun: that one stays as far as it came."""
        if self._state is _State.CONTENT and not self._is_blank_after_calls(self._pending):
            self._content.append(self._pending)
        elif self._state is _State.HEAD:
            self._content.append(self._opening + self._pending)
        self._pending = ""
        return self._take()

    def _take(self) -> ToolDelta:
        delta = ToolDelta("".join(self._content), tuple(self._calls))
        self._content.clear()
        self._calls.clear()
        return delta

    def _step(self) -> bool:
        """Whether there was progress that may lead to more."""
        match self._state:
            case _State.CONTENT:
                return self._read_content()
            case _State.HEAD:
                return self._read_head()
            case _State.ARGUMENTS:
                return self._read_arguments()
            case _State.TAIL:
                return self._read_tail()

    def _read_content(self) -> bool:
        if not self._opening:  # the text began with something else: no calls any more
            self._content.append(self._pending)
            self._pending = ""
            return False
        before, mark, after = self._pending.partition(self._opening)
        if mark:
            self._content.append(before.rstrip() if self._is_blank_after_calls(before) else before)
            self._enter(_State.HEAD, after)
            return True
        num_held = _overlap(self._pending, self._opening)
        visible = self._pending[: len(self._pending) - num_held]
        if self._is_blank_after_calls(visible):
            return False  # white space between calls, or before the end
        self._content.append(visible)
        self._pending = self._pending[len(visible) :]
        return False

    def _is_blank_after_calls(self, text: str) -> bool:
        return self.num_calls > 0 and not text.strip()

    def _read_head(self) -> bool:
        head = _HEAD.match(self._pending)
        if head is not None:
            if head[1] not in self._names:
                return self._give_up()
            self._begin(head[1])
            self._enter(_State.ARGUMENTS, self._pending[head.end() :])
            return True
        start = self._pending.lstrip()
        if not start:
            return False
        if not start.startswith("{"):
            return self._give_up()
        end = self._end.feed(self._pending, self._num_scanned)
        self._num_scanned = len(self._pending)
        if end is not None:
            return self._read_whole_call(end)
        return False

    def _read_whole_call(self, end: int) -> bool:
        """An object in another order, or with its arguments as a string."""
        call = _parsed_call(self._pending[:end])
        if call is None or call[0] not in self._names:
            return self._give_up()
        self._begin(call[0])
        self._calls.append(CallDelta(self.num_calls - 1, call[1]))
        self._enter(_State.TAIL, self._pending[end:])
        return True

    def _read_arguments(self) -> bool:
        end = self._end.feed(self._pending)
        piece = self._pending if end is None else self._pending[:end]
        if piece:
            self._calls.append(CallDelta(self.num_calls - 1, piece))
        if end is None:
            self._pending = ""
            return False
        self._enter(_State.TAIL, self._pending[end:])
        return True

    def _read_tail(self) -> bool:
        """Past the call's last brace and closing mark; what is neither is not the client's to see."""
        rest = self._pending.lstrip(" \n\t\r;}")
        if not rest or (self._closing.startswith(rest) and rest != self._closing):
            return False  # nothing but white space and perhaps the beginning of the mark
        if not self._opening and rest.startswith("{"):
            self._enter(_State.HEAD, rest)
        else:
            self._enter(_State.CONTENT, rest.removeprefix(self._closing))
        return True

    def _begin(self, name: str) -> None:
        self._calls.append(CallDelta(self.num_calls, call_id=self._new_call_id(), name=name))
        self.num_calls += 1

    def _give_up(self) -> bool:
        """It was content after all."""
        self._content.append(self._opening)
        self._enter(_State.CONTENT, self._pending)
        return True

    def _enter(self, state: _State, pending: str) -> None:
        self._state, self._pending = state, pending
        self._end, self._num_scanned = JsonEnd(), 0


def _parsed_call(text: str) -> tuple[str, str] | None:
    """Name and arguments as JSON text; None for what is no call."""
    try:
        value = json.loads(text)
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, RecursionError, AttributeError):
        return None
    name = value.get("name")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def _overlap(text: str, mark: str) -> int:
    """How many of the last characters may be the beginning of the mark."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
