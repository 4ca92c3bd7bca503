"""What the scheduler decided for one step: whose tokens it computes, who came in, who gave way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.sequence import Sequence
from engine.shared_tail import SharedTail


class ScheduledChunk(NamedTuple):
    """Tokens [first_token, first_token + num_tokens) of one sequence, and drafts behind its last one."""

    sequence: Sequence
    first_token: int
    num_tokens: int
    num_drafts: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_tokens + self.num_drafts

    @property
    def is_sampled(self) -> bool:
        """Whether the chunk ends at the sequence's last token, so that the next one is sampled."""
        return self.first_token + self.num_tokens == self.sequence.num_tokens


@dataclass(slots=True)
class StepPlan:
    """One step. `admitted` are among the chunks, `preempted` are not; `tails` are copied, in order, before it runs."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    tails: list[SharedTail] = field(default_factory=list)
