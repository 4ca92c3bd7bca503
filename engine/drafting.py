"""What an engine needs of speculative decoding: someone who guesses, and the rule by which guesses are kept.

    scheduler ─ propose ──> drafts behind the last token ─ one step ──> target's tokens ─ accepted_run ──> verified

The engine knows no drafter by name and no cost table: that is the speculator's (`decode_worker.speculation`).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cluster.identity import RequestId
from cluster.sampling_params import SamplingParams
from engine.request import EngineRequest


class NoDraftReason(enum.Enum):
    """Why a decode went without drafts."""

    OFF = "off"  # the request wants none
    END_IS_NEAR = "end_is_near"  # its next token is the last that it may have
    NO_BUDGET = "no_budget"  # decodes and prompts took all tokens of the step
    NO_BLOCKS = "no_blocks"
    DOES_NOT_PAY = "does_not_pay"
    NO_MATCH = "no_match"  # the drafter has no guess


class Speculator(Protocol):
    """Guesses for all requests of one engine, as chains. Called from the engine thread, but for `check` and `counters`.

    It sees committed tokens only: a preempted or skipped request needs nothing undone.
    """

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states `sampled` wants, ascending; with none it is never called."""
        ...

    def check(self, params: SamplingParams) -> None:
        """Raises `InvalidRequest` when the request names a drafter that does not run here."""
        ...

    def propose(
        self, request: EngineRequest, token_ids: npt.NDArray[np.int32], max_drafts: int, batch_size: int
    ) -> tuple[int, ...]:
        """At most `max_drafts` (1 or more) tokens that may follow `token_ids`, in a step with so many decodes."""
        ...

    def sampled(
        self, request: EngineRequest, position: int, token_ids: Sequence[int], taps: npt.NDArray[np.float32]
    ) -> None:
        """The model said `token_ids` at `position` and behind. `taps` [tokens, tap layers, hidden]: the hidden states
        that chose them; the array is the engine's and changes with its next step."""
        ...

    def no_draft(self, reason: NoDraftReason) -> None:
        """Counts a decode that the scheduler left without drafts."""
        ...

    def verified(self, request_id: RequestId, num_proposed: int, num_accepted: int) -> None: ...

    def forget(self, request_id: RequestId) -> None:
        """The request has ended; unknown ids change nothing."""
        ...

    def counters(self) -> Mapping[str, float]: ...


def accepted_run(drafts: Sequence[int], target_ids: Sequence[int], failed_rows: Collection[int]) -> Sequence[int]:
    """The drafts that the target says too and its own token after them: what decoding without drafts gives.

    `target_ids` [1 + drafts]: the target's token after the last known token, and after each draft. The run ends before
    a row in `failed_rows`; it is empty when that is the first one.
    """
    for row, target_id in enumerate(target_ids):
        if row in failed_rows:
            return target_ids[:row]
        if row == len(drafts) or drafts[row] != target_id:
            return target_ids[: row + 1]
    raise ValueError(f"{len(drafts)} drafts need {len(drafts) + 1} target tokens, not {len(target_ids)}")
