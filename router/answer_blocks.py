"""An answer as a row of blocks, each a text or a call: how OpenAI's Responses and Anthropic's Messages show one.

    TEXT ── a call begins ──> CALL ── the next call, or text again ──> ...

Each update opens, grows and closes blocks; streaming writers write these steps, whole ones read `blocks` at the end.
Pure; one choice only, as in both APIs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from router.answer import ChoiceUpdate
from router.openai_tools import ToolCallReader
from router.tool_parser import ToolDelta


class Step(enum.Enum):
    OPENED = enum.auto()
    GREW = enum.auto()
    CLOSED = enum.auto()


@dataclass(slots=True)
class Block:
    """Owned by `AnswerBlocks`. `text` is what the model says, or the arguments of its call as JSON text."""

    index: int
    call_id: str = ""
    name: str = ""
    text: str = ""

    @property
    def is_call(self) -> bool:
        return bool(self.name)


@dataclass(frozen=True, slots=True)
class BlockStep:
    """What happened to a block; `text` is what it grew by."""

    step: Step
    block: Block
    text: str = ""


class AnswerBlocks:
    """Owned by one answer's writer. Push every update in order."""

    def __init__(self, tools: ToolCallReader | None) -> None:
        self._tools = tools
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None  # in OpenAI's words
        self.stop_reason: str | int | None = None

    def push(self, update: ChoiceUpdate) -> Iterator[BlockStep]:
        """The steps of one update, in order; the last update closes the last block."""
        is_last = update.finish_reason is not None
        if self._tools is None:
            delta = ToolDelta(update.delta.text)
        else:
            delta = self._tools.read(update.index, update.delta.text, is_last=is_last)
        if delta.content:
            if not self.blocks or self.blocks[-1].is_call:
                yield from self._open(Block(len(self.blocks)))
            yield self._grow(delta.content)
        for part in delta.calls:
            if part.name:
                yield from self._open(Block(len(self.blocks), part.call_id, part.name))
            if part.arguments:
                yield self._grow(part.arguments)
        if is_last:
            reason = update.finish_reason
            self.finish_reason = reason if self._tools is None else self._tools.finish_reason(update.index, reason)
            self.stop_reason = update.stop_reason
            if not self.blocks:  # an answer without text is still an answer
                yield from self._open(Block(0))
            yield BlockStep(Step.CLOSED, self.blocks[-1])

    def _open(self, block: Block) -> Iterator[BlockStep]:
        if self.blocks:
            yield BlockStep(Step.CLOSED, self.blocks[-1])
        self.blocks.append(block)
        yield BlockStep(Step.OPENED, block)

    def _grow(self, text: str) -> BlockStep:
        block = self.blocks[-1]
        block.text += text
        return BlockStep(Step.GREW, block, text)
