"""What an engine needs of speculative decoding: someone who guesses, and the rule by which guesses are kept.

    scheduler ─ propose ──> drafts behind the last token ─ one step ──> target's tokens ─ verify_match ──> verified

The engine knows no drafter by name and no cost table: that is the speculator's (`decode_worker.speculation`).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cluster.identity import RequestId
from cluster.sampling_params import SamplingParams
from engine.draft import ROOT, Draft
from engine.request import EngineRequest


class NoDraftReason(enum.Enum):
    """Why a decode went without drafts."""

    OFF = "off"  # the request wants none
    END_IS_NEAR = "end_is_near"  # its next token is the last that it may have
    NO_BUDGET = "no_budget"  # decodes and prompts took all tokens of the step
    NO_BLOCKS = "no_blocks"
    DOES_NOT_PAY = "does_not_pay"
    NO_MATCH = "no_match"  # the drafter has no guess


class DraftWish(NamedTuple):
    """One decode of the step at hand that may have drafts."""

    request: EngineRequest
    token_ids: npt.NDArray[np.int32]  # prompt and output so far
    max_drafts: int  # 1 or more


class Speculator(Protocol):
    """Guesses for all requests of one engine. Called from the engine thread, but for `check` and `counters`.

    It sees committed tokens only: a preempted or skipped request needs nothing undone.
    """

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states `sampled` wants, ascending; with none it is never called."""
        ...

    def check(self, params: SamplingParams) -> None:
        """Raises `InvalidRequest` when the request names a drafter that does not run here."""
        ...

    def propose(self, wishes: Sequence[DraftWish], batch_size: int) -> list[Draft]:
        """For each wish tokens that may follow, in a step with so many decodes; a reason is counted where none do."""
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

    def verified(self, request_id: RequestId, draft: Draft, accepted: Sequence[int]) -> None:
        """The target said these of the draft's tokens, by index, one below the other."""
        ...

    def forget(self, request_id: RequestId) -> None:
        """The request has ended; unknown ids change nothing."""
        ...

    def counters(self) -> Mapping[str, float]: ...


class Accepted(NamedTuple):
    """`token_ids`: the drafts that the target says too, one below the other, and its own token after them.

    `rows`: whose tokens these are, of the verified rows: row 0 is the last known token's, row i + 1 draft i's. So the
    KV of the accepted drafts is that of rows[1:].
    """

    token_ids: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        return max(0, len(self.token_ids) - 1)


def verify_match(draft: Draft, target_ids: Sequence[int], failed_rows: Collection[int] = ()) -> Accepted:
    """Walks down the draft along what the target says: what decoding without drafts gives, token for token.

    `target_ids` [1 + drafts]: the target's token after the last known token, and after each draft, each sampled with
    its own position's noise (below drawn guesses by `engine.rejection`, which is equal in law). The walk ends before a
    row in `failed_rows`; it is empty when that is the first one.
    """
    if len(target_ids) != len(draft) + 1:
        raise ValueError(f"{len(draft)} drafts need {len(draft) + 1} target tokens, not {len(target_ids)}")
    edges = zip(draft.parents, draft.token_ids, strict=True)
    children = {edge: index for index, edge in enumerate(edges)}
    token_ids: list[int] = []
    rows: list[int] = []
    node: int | None = ROOT
    while node is not None and node + 1 not in failed_rows:
        token_ids.append(target_ids[node + 1])
        rows.append(node + 1)
        node = children.get((node, token_ids[-1]))
    return Accepted(tuple(token_ids), tuple(rows))
