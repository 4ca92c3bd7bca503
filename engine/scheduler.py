"""Which sequences run in a step, and with how many tokens each.

    schedule():  make room for an urgent arrival ─> decodes ─> prompts in progress ─> admissions ─> drafts

Its promise:
- A step never has more than `max_batch_tokens` tokens or `max_sequences` sequences. Sequences with one token to compute
  come first, so a long prompt costs a running stream at most one step of that budget; with a `StepBudget`, of what the
  streams' objective leaves.
- An admission takes the blocks of the whole sequence so far, and leaves a watermark; a decode takes blocks on demand.
- When a decode finds no block, the last running sequence in order gives way and keeps its place, its tokens and its KV:
  in host memory where that is faster (`engine.swap_space`), else its cached blocks as far as nobody needs the room. At
  most one victim for one needy sequence and step. After `MAX_PREEMPTIONS` a sequence comes back only with room for its
  longest life, and is no victim any more.
- A request that does not fit now may be passed by at most `MAX_OVERTAKEN` smaller ones.
- A prompt whose next block another prompt is computing waits for it, and finds it in the cache; the tail behind the
  full blocks is copied (`engine.shared_tail`). So n choices of one prompt cost one prefill and one token each.
- A prompt whose next block a lower tier is giving back (`engine.kv_tiering`) waits for it likewise, at most
  `FETCH_TIMEOUT_S`; others pass meanwhile.
- Drafts to verify get what budget and blocks are left over after all of that (`engine.draft_allotment`).

A step costs O(batch), however long the queue is. The scheduler knows no model, no clock and no thread; the pool is the
only thing it changes beside sequences, and through the swap space the content of blocks that are a sequence's own.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from cluster.errors import RequestExceedsKvCapacity, StartupError
from engine.block_pool import BlockPool
from engine.draft_allotment import DraftAllotment
from engine.drafting import Speculator
from engine.kv_tiering import KvTiering
from engine.partial_prefills import PartialPrefills
from engine.request import EngineLimits
from engine.sequence import NEVER_REFUSED, Sequence, SequenceState
from engine.shared_tail import find_shared_tail
from engine.step_budget import StepBudget
from engine.step_plan import ScheduledChunk, StepPlan
from engine.swap_space import SwapSpace
from engine.waiting_queue import SchedulingPolicy, WaitingQueue, order_key

MAX_PREEMPTIONS = 3
MAX_OVERTAKEN = 16
ADMISSION_LOOKAHEAD = 8  # how many that do not fit are looked past in one step


class Scheduler:
    """The waiting and the running sequences of one engine. Used by one thread."""

    def __init__(
        self,
        pool: BlockPool,
        limits: EngineLimits,
        policy: SchedulingPolicy = SchedulingPolicy.PRIORITY,
        speculator: Speculator | None = None,
        swap: SwapSpace | None = None,
        step_budget: StepBudget | None = None,
        tiering: KvTiering | None = None,
    ) -> None:
        if limits.max_batch_tokens < limits.max_sequences:
            raise StartupError(
                f"max_batch_tokens is {limits.max_batch_tokens}, must be at least max_sequences "
                f"({limits.max_sequences}): every running sequence gets a token in each step",
                param="max_batch_tokens",
            )
        self._pool = pool
        self._limits = limits
        self._policy = policy
        self._drafts = DraftAllotment(speculator, pool, limits) if speculator is not None else None
        self._swap = swap
        self._step_budget = step_budget
        self._tiering = tiering
        self.num_preemptions = 0
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in order: the last one is the first victim

    # --- arrivals and ends ------------------------------------------------------------------------------------------

    def check_fits(self, num_kv_tokens: int) -> None:
        """Raises `RequestExceedsKvCapacity` when so many tokens could never be in this pool."""
        needed = self._num_blocks(num_kv_tokens)
        if needed > self._pool.num_blocks:
            raise RequestExceedsKvCapacity(
                f"the request needs {needed} KV blocks at its longest, this worker has {self._pool.num_blocks}: "
                "shorten the prompt or lower max_tokens",
                param="max_tokens",
            )

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        num_uncached = 0
        if self._policy is SchedulingPolicy.SHORTEST:
            cached = self._pool.count_cached_tokens(sequence.chain, sequence.token_ids)
            num_uncached = max(0, sequence.num_uncomputed - cached)
        sequence.order_key = order_key(self._policy, sequence, num_uncached)
        self.waiting.push(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, waiting or running; keeps its blocks when the worker asked for that."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED
        if self._swap is not None:
            self._swap.drop(sequence)
        if self._tiering is not None:
            self._tiering.forget(sequence)
        blocks, sequence.blocks = sequence.blocks, []
        self._pool.release(blocks)

    def hold(self, sequence: Sequence) -> None:
        """Takes a running sequence out with its blocks; `finish` gives them back."""
        self.running.remove(sequence)
        sequence.state = SequenceState.HELD

    # --- one step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step's chunks. An empty plan means that nothing can run until blocks come back."""
        plan = StepPlan()
        self._make_room_for_urgent(plan)
        budget, in_progress = self._schedule_decodes(plan, self._limits.max_batch_tokens)
        num_decodes = len(plan.chunks)
        kept_back = self._kept_from_prompts(budget, num_decodes, in_progress)
        budget, partial = self._schedule_prefills(plan, budget - kept_back, in_progress)
        if not plan.preempted:  # what a victim gave back is for those who run
            budget = self._admit(plan, budget, partial)
        if self._drafts is not None:
            self._drafts.add_drafts(plan, num_decodes, budget + kept_back, len(self.running))
        return plan

    def _kept_from_prompts(self, budget: int, num_decodes: int, in_progress: Iterable[Sequence]) -> int:
        """Tokens that no prompt may take, so that the decodes of this step are in time."""
        if self._step_budget is None or not (num_decodes or self._step_budget.binds_alone):
            return 0
        position = max((sequence.num_computed for sequence in in_progress), default=0)
        return max(0, budget - self._step_budget.prefill_tokens(num_decodes, position))

    def _schedule_decodes(self, plan: StepPlan, budget: int) -> tuple[int, list[Sequence]]:
        """Everyone with one token to compute. Gives the budget left and the prompts in progress."""
        block_tokens = self._pool.block_tokens
        in_progress = []
        for sequence in tuple(self.running):
            computed = sequence.num_computed
            if sequence.num_tokens - computed > 1:
                in_progress.append(sequence)
            elif sequence.state is SequenceState.RUNNING and (
                computed < len(sequence.blocks) * block_tokens or self._extend(sequence, plan)
            ):
                plan.chunks.append(ScheduledChunk(sequence, computed, 1))
                budget -= 1
        return budget, in_progress

    def _schedule_prefills(
        self, plan: StepPlan, budget: int, in_progress: Iterable[Sequence]
    ) -> tuple[int, PartialPrefills]:
        partial = PartialPrefills(self._limits)
        for sequence in in_progress:
            if sequence.state is not SequenceState.RUNNING:  # a decode took its blocks
                continue
            partial.add(sequence.num_uncomputed, budget)
            budget -= self._add_chunk(plan, sequence, budget)
        return budget, partial

    def _admit(self, plan: StepPlan, budget: int, partial: PartialPrefills) -> int:
        """Takes from the queue while there is room, past a few that do not fit, within bounds. Gives what is left."""
        passed_by: list[Sequence] = []
        passed_for_a_while: list[Sequence] = []  # their prefix is being computed by another one, or fetched
        while budget > 0 and len(self.running) < self._limits.max_sequences:
            if len(passed_by) + len(passed_for_a_while) >= ADMISSION_LOOKAHEAD or any(
                sequence.num_overtaken >= MAX_OVERTAKEN for sequence in passed_by
            ):
                break
            sequence = self.waiting.pop()
            if sequence is None:
                break
            if self._is_being_computed(sequence, plan) or self._is_being_fetched(sequence):
                passed_for_a_while.append(sequence)
                continue
            if not self._may_start(sequence, budget, partial) or not self._take_blocks(sequence):
                passed_by.append(sequence)
                continue
            for other in passed_by:
                other.num_overtaken += 1
            if not sequence.num_preemptions:
                self._share_tail(sequence, plan)
            sequence.state = SequenceState.RUNNING
            bisect.insort(self.running, sequence, key=_key)
            plan.admitted.append(sequence)
            partial.add(sequence.num_uncomputed, budget)
            budget -= self._add_chunk(plan, sequence, budget)
        for sequence in (*passed_by, *passed_for_a_while):
            self.waiting.push(sequence)
        return budget

    def _is_being_computed(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Whether a prompt of this step is at, or on its way to, the first block that the cache does not have yet."""
        others = [chunk.sequence for chunk in plan.chunks if chunk.num_tokens > 1]
        if not others or sequence.blocks or sequence.wants_prompt_logprobs:
            return False
        block_tokens, hashes = self._pool.block_tokens, sequence.chain.hash_chain.hashes
        num_reusable = (sequence.num_tokens - 1) // block_tokens
        sequence.chain.hash_chain.extend(sequence.token_ids)
        if not num_reusable or all(other.chain.hash_chain.hashes[:1] != hashes[:1] for other in others):
            return False
        block = self._pool.count_cached_tokens(sequence.chain, sequence.token_ids) // block_tokens
        return block < num_reusable and any(
            other.num_computed < (block + 1) * block_tokens
            and other.chain.hash_chain.hashes[block : block + 1] == [hashes[block]]
            for other in others
        )

    def _is_being_fetched(self, sequence: Sequence) -> bool:
        """Whether a lower tier has more of its prefix than the cache, and that is on its way."""
        if self._tiering is None or (self._swap is not None and sequence in self._swap):
            return False
        return self._tiering.must_wait(sequence)

    def _may_start(self, sequence: Sequence, budget: int, partial: PartialPrefills) -> bool:
        """Whether one more prompt may be in progress, or this one will not be: what is cached needs no compute."""
        num_uncomputed = sequence.num_uncomputed
        if not partial.has_room(num_uncomputed, budget):
            num_uncomputed -= self._pool.count_cached_tokens(sequence.chain, sequence.token_ids)
        return partial.has_room(num_uncomputed, budget)

    def _add_chunk(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        num_tokens = min(sequence.num_uncomputed, budget, self._limits.long_prefill_token_threshold or budget)
        if num_tokens > 0:
            plan.chunks.append(ScheduledChunk(sequence, sequence.num_computed, num_tokens))
        return num_tokens

    # --- blocks -----------------------------------------------------------------------------------------------------

    def _take_blocks(self, sequence: Sequence) -> bool:
        """All blocks of the sequence so far, from the prefix cache and the pool; or nothing."""
        if sequence.blocks:  # landed: what is missing, if anything, is the block of the first decode
            if self._grow(sequence):
                return True
            self._pool.release(sequence.restart())  # computed again from the prefix that was published
        num_available = self._pool.num_available
        if self.running and num_available <= sequence.refused_at_available:
            return False
        num_blocks = self._target_blocks(sequence)
        spare_blocks = self._limits.watermark_blocks if self.running else 0
        if sequence.wants_prompt_logprobs:  # those need the logits of every prompt token, so nothing is reused
            blocks = self._pool.allocate(num_blocks) if num_blocks + spare_blocks <= num_available else None
        else:
            blocks = self._pool.reserve(sequence.chain, sequence.token_ids, num_blocks, spare_blocks=spare_blocks)
        if blocks is None:
            sequence.refused_at_available = num_available
            return False
        sequence.blocks = blocks
        sequence.num_computed = sequence.chain.num_blocks * self._pool.block_tokens
        if self._swap is not None and sequence in self._swap:
            sequence.num_computed = self._swap.restore(sequence, sequence.chain.num_blocks)
        return True

    def _share_tail(self, sequence: Sequence, plan: StepPlan) -> None:
        """For a first admission: the tail that a running sequence has, and what usage will call cached."""
        request = sequence.request
        if request.landed is not None:
            return
        # A prefill worker's transfer reads whole blocks from `blocks_allocated` on.
        if not request.hold_blocks and not sequence.wants_prompt_logprobs:
            tail = find_shared_tail(sequence, self.running, self._pool.block_tokens)
            if tail is not None:
                plan.tails.append(tail)
                sequence.num_computed = tail.num_tokens
        sequence.cached_tokens = sequence.num_computed

    def _target_blocks(self, sequence: Sequence) -> int:
        """Blocks at admission: for the tokens so far; for the longest life once preempted too often."""
        if sequence.num_preemptions >= MAX_PREEMPTIONS:
            return self._num_blocks(sequence.max_kv_tokens)
        return self._num_blocks(sequence.num_tokens)

    def _grow(self, sequence: Sequence) -> bool:
        """Blocks on demand up to the sequence's last token."""
        missing = self._num_blocks(sequence.num_tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        fresh = self._pool.allocate(missing)
        if fresh is None:
            return False
        sequence.blocks.extend(fresh)
        return True

    def _extend(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Blocks for a decode, if need be from one victim. False: the sequence sits out this step."""
        if self._grow(sequence):
            return True
        victim = self._last_victim()
        if victim is not None:
            self._preempt(victim, plan)
        # A victim's blocks may come back later (a transfer still reads them): then the next step finds them.
        return victim is not None and victim is not sequence and self._grow(sequence)

    def _last_victim(self) -> Sequence | None:
        for sequence in reversed(self.running):
            # A held sequence needs no further block and is being read by its transfer: it ends soon by itself.
            if sequence.num_preemptions < MAX_PREEMPTIONS and not sequence.request.hold_blocks:
                return sequence
        return None

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        self.running.remove(victim)
        self.num_preemptions += 1
        if self._swap is not None and not victim.wants_prompt_logprobs:  # those come with the prompt's computation
            self._swap.save(victim, self._pool.block_tokens)  # first: released blocks may be anyone's at once
        self._pool.release(victim.restart())
        victim.state = SequenceState.WAITING
        victim.num_preemptions += 1
        victim.refused_at_available = NEVER_REFUSED
        self.waiting.push(victim)
        plan.preempted.append(victim)

    def _make_room_for_urgent(self, plan: StepPlan) -> None:
        """One running sequence gives way to a waiting one of a better priority that cannot start otherwise."""
        if self._policy is not SchedulingPolicy.PRIORITY or not self.running:
            return
        urgent, victim = self.waiting.peek(), self._last_victim()
        if urgent is None or victim is None or urgent.request.priority >= victim.request.priority:
            return
        is_blocked = (
            len(self.running) >= self._limits.max_sequences or self._pool.num_available <= urgent.refused_at_available
        )
        if is_blocked and urgent.order_key < victim.order_key:
            self._preempt(victim, plan)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_tokens)


def _key(sequence: Sequence) -> tuple[float, int]:
    return sequence.order_key
