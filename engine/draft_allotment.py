"""Drafts behind a step's decodes, out of the tokens and blocks that nobody else of the step took.

They preempt nobody, and leave a block for every running sequence. Who guesses, and whether that pays, is the
speculator's.
"""

from __future__ import annotations

from engine.block_pool import BlockPool
from engine.drafting import DraftWish, NoDraftReason, Speculator
from engine.request import EngineLimits
from engine.sequence import Sequence
from engine.step_plan import StepPlan


class DraftAllotment:
    """Used by the scheduler."""

    def __init__(self, speculator: Speculator, pool: BlockPool, limits: EngineLimits) -> None:
        self._speculator = speculator
        self._pool = pool
        self._limits = limits

    def add_drafts(self, plan: StepPlan, num_decodes: int, budget: int, num_running: int) -> None:
        """Guesses behind the decodes, which are the plan's first chunks, in their order as far as the budget goes."""
        wishes, places = self._wishes(plan, num_decodes, budget)
        if not wishes:
            return
        for index, proposed in zip(places, self._speculator.propose(wishes, num_decodes), strict=True):
            if not proposed:
                continue
            chunk = plan.chunks[index]
            sequence = chunk.sequence
            num_slots = self._num_slots(sequence, min(budget, len(proposed)), num_running)
            draft = proposed.first(min(budget, num_slots))
            if not draft:
                self._speculator.no_draft(NoDraftReason.NO_BLOCKS if budget else NoDraftReason.NO_BUDGET)
                continue
            sequence.put_draft(draft)
            plan.chunks[index] = chunk._replace(num_drafts=len(draft))
            budget -= len(draft)

    def _wishes(self, plan: StepPlan, num_decodes: int, budget: int) -> tuple[list[DraftWish], list[int]]:
        """The decodes that may have drafts, and their places in the plan."""
        wishes: list[DraftWish] = []
        places: list[int] = []
        for index, chunk in enumerate(plan.chunks[:num_decodes]):
            sequence = chunk.sequence
            if not sequence.may_have_drafts:
                continue
            room = sequence.max_kv_tokens - sequence.num_tokens
            if room <= 0 or budget <= len(wishes):
                self._speculator.no_draft(NoDraftReason.END_IS_NEAR if room <= 0 else NoDraftReason.NO_BUDGET)
                continue
            wishes.append(DraftWish(sequence.request, sequence.token_ids, min(room, budget)))
            places.append(index)
        return wishes, places

    def _num_slots(self, sequence: Sequence, num_drafts: int, num_running: int) -> int:
        """How many of the drafts find room: in the sequence's own blocks, and in those that nobody needs now."""
        block_tokens = self._pool.block_tokens
        missing = -(-(sequence.num_tokens + num_drafts) // block_tokens) - len(sequence.blocks)
        spare_blocks = self._pool.num_available - self._limits.watermark_blocks - num_running
        if 0 < missing <= spare_blocks:
            sequence.blocks.extend(self._pool.allocate(missing) or ())
        return min(num_drafts, len(sequence.blocks) * block_tokens - sequence.num_tokens)
