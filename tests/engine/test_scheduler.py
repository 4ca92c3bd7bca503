"""Order, budget, admission, preemption: the scheduler against a real pool, without a model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import RequestExceedsKvCapacity, StartupError
from engine.block_pool import BlockPool
from engine.mock_engine import StepTiming
from engine.request import EngineLimits
from engine.scheduler import ADMISSION_LOOKAHEAD, MAX_OVERTAKEN, MAX_PREEMPTIONS, Scheduler
from engine.sequence import Sequence, SequenceState
from engine.step_budget import StepBudget
from engine.step_plan import StepPlan
from engine.waiting_queue import AGEING_S_PER_LEVEL, MAX_SKIPS, SKIP_TOKENS, SchedulingPolicy
from tests.engine.engine_bench import make_request

BLOCK = 16


class Desk:
    """A scheduler and what an engine does around it: `step` computes and appends, `finish` ends."""

    def __init__(
        self,
        num_blocks: int = 64,
        policy: SchedulingPolicy = SchedulingPolicy.PRIORITY,
        step_budget: StepBudget | None = None,
        **limits: Any,
    ) -> None:
        self.pool = BlockPool(num_blocks, BLOCK, "model")
        self.limits = EngineLimits(**{"max_batch_tokens": 64, "max_sequences": 8, "max_model_len": 4096, **limits})
        self.scheduler = Scheduler(self.pool, self.limits, policy, step_budget=step_budget)
        self.num_arrived = 0
        self.now_s = 0.0

    def arrive(self, num_tokens: int, first_id: int | None = None, max_tokens: int = 100, **fields: Any) -> Sequence:
        first_id = 10_000 * self.num_arrived if first_id is None else first_id
        request = make_request(
            f"r{self.num_arrived}", range(first_id, first_id + num_tokens), max_tokens=max_tokens, **fields
        )
        chain = self.pool.new_chain(b"tenant")
        sequence = Sequence(request, chain, self.limits.max_model_len, self.num_arrived, self.now_s)
        self.num_arrived += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= self.limits.max_batch_tokens
        assert len(plan.chunks) <= self.limits.max_sequences
        assert len({chunk.sequence for chunk in plan.chunks}) == len(plan.chunks)
        assert not {chunk.sequence for chunk in plan.chunks} & set(plan.preempted)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert sequence.state is SequenceState.RUNNING
            assert chunk.first_token == sequence.num_computed
            assert len(sequence.blocks) * BLOCK >= chunk.first_token + chunk.num_tokens
            is_sampled = chunk.is_sampled
            sequence.num_computed += chunk.num_tokens
            self.pool.publish(sequence.chain, sequence.token_ids, sequence.blocks, sequence.num_computed)
            if is_sampled:
                sequence.append(1)
                sequence.has_output = True
                if sequence.num_tokens == sequence.max_length:
                    self.scheduler.finish(sequence)
        return plan

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)


def scheduled(plan: StepPlan) -> dict[int, int]:
    """Tokens by arrival number."""
    return {chunk.sequence.arrival_index: chunk.num_tokens for chunk in plan.chunks}


def test_a_budget_below_the_batch_is_refused_at_start() -> None:
    with pytest.raises(StartupError, match="max_batch_tokens"):
        Desk(max_batch_tokens=4, max_sequences=8)


# --- budget -----------------------------------------------------------------------------------------------------------


def test_k14_decodes_come_first_and_a_long_prompt_takes_what_is_left() -> None:
    desk = Desk(max_batch_tokens=32, num_blocks=64)
    desk.arrive(4)
    desk.step()
    desk.arrive(600)
    for _ in range(10):
        assert scheduled(desk.step()) == {0: 1, 1: 31}


def test_k14_prompts_beside_decodes_take_what_the_streams_objective_leaves() -> None:
    budget = StepBudget(itl_slo_ms=100.0, block_tokens=BLOCK)
    desk = Desk(step_budget=budget, max_batch_tokens=512)
    desk.arrive(400)
    plan = desk.step()
    assert scheduled(plan) == {0: 400}  # nobody decodes: it is not bounded
    budget.saw_step(plan.chunks, 400.0)  # a millisecond for a token
    desk.arrive(100)
    desk.arrive(100)
    assert scheduled(desk.step()) == {0: 1, 1: 85}
    assert scheduled(desk.step()) == {0: 1, 1: 15, 2: 70}
    for _ in range(5):
        budget.saw_step([plan.chunks[0]._replace(num_tokens=1)], 1000.0)
    assert scheduled(desk.step()) == {0: 1, 1: 1, 2: BLOCK}  # streams that are late anyway do not starve a prompt


def test_where_a_stream_may_begin_in_the_middle_of_a_step_prompts_alone_are_bounded_as_well() -> None:
    budget = StepBudget(itl_slo_ms=100.0, block_tokens=BLOCK, binds_alone=True)
    desk = Desk(step_budget=budget, max_batch_tokens=512)
    desk.arrive(400)
    plan = desk.step()
    assert scheduled(plan) == {0: BLOCK}  # nothing is known
    budget.saw_step(plan.chunks, float(BLOCK))  # a millisecond for a token
    assert scheduled(desk.step()) == {0: 85}


def test_a_threshold_bounds_one_prompts_share() -> None:
    desk = Desk(max_batch_tokens=64, long_prefill_token_threshold=16)
    desk.arrive(100)
    desk.arrive(10)
    assert scheduled(desk.step()) == {0: 16, 1: 10}


def test_one_long_prompt_at_a_time_and_short_ones_pass() -> None:
    desk = Desk(max_batch_tokens=64, long_prefill_token_threshold=16)
    desk.arrive(100)
    desk.arrive(100)
    desk.arrive(12)
    assert scheduled(desk.step()) == {0: 16, 2: 12}


def test_a_cached_long_prompt_is_a_short_one() -> None:
    desk = Desk(max_batch_tokens=64, long_prefill_token_threshold=16)
    warm = desk.arrive(49, first_id=5)
    while warm.num_computed < 49:
        desk.step()
    desk.finish(warm)
    desk.arrive(100)
    desk.arrive(50, first_id=5)
    assert scheduled(desk.step()) == {1: 16, 2: 2}


def test_partial_prefills_are_bounded() -> None:
    desk = Desk(max_batch_tokens=64, max_sequences=8, max_partial_prefills=2, num_blocks=200)
    for _ in range(4):
        desk.arrive(50)
    assert scheduled(desk.step()) == {0: 50, 1: 14}
    assert scheduled(desk.step()) == {0: 1, 1: 36, 2: 27}


def test_s16_a_chunk_that_ends_a_prompt_is_sampled_and_others_are_not() -> None:
    desk = Desk(max_batch_tokens=16)
    desk.arrive(40)
    assert [chunk.is_sampled for _ in range(3) for chunk in desk.scheduler.schedule().chunks] == [False] * 3
    desk = Desk(max_batch_tokens=16)
    desk.arrive(40)
    assert [desk.step() is not None and desk.scheduler.running[0].num_tokens for _ in range(3)] == [40, 40, 41]


# --- admission --------------------------------------------------------------------------------------------------------


def test_admission_takes_the_whole_prompts_blocks_and_leaves_the_watermark() -> None:
    desk = Desk(num_blocks=10, watermark_blocks=3)
    desk.arrive(60)
    desk.step()
    assert desk.pool.census().owned == 4
    desk.arrive(60)
    assert scheduled(desk.step()) == {0: 1}  # 4 more would leave 2
    desk.arrive(40)
    assert scheduled(desk.step()) == {0: 1, 2: 40}


def test_the_watermark_never_stops_a_lone_request() -> None:
    desk = Desk(num_blocks=4, watermark_blocks=3)
    desk.arrive(60, max_tokens=4)
    assert scheduled(desk.step()) == {0: 60}


def test_k7_a_request_that_can_never_fit_is_refused() -> None:
    desk = Desk(num_blocks=4)
    desk.scheduler.check_fits(64)
    with pytest.raises(RequestExceedsKvCapacity, match="needs 5 KV blocks"):
        desk.scheduler.check_fits(65)


def test_k13_small_requests_pass_a_head_that_does_not_fit_within_a_bound() -> None:
    desk = Desk(num_blocks=52, max_sequences=2)
    runs = desk.arrive(32, max_tokens=1000)
    desk.step()
    head = desk.arrive(800, max_tokens=1)  # 50 blocks: not beside the running one and its third block
    desk.step()
    desk.step()
    assert head.state is SequenceState.WAITING
    for _ in range(MAX_OVERTAKEN):
        small = desk.arrive(3, max_tokens=1)
        desk.step()
        assert small.state is SequenceState.FINISHED
    late = desk.arrive(3, max_tokens=1)
    desk.step()
    assert late.state is SequenceState.WAITING, "the head has been passed often enough"
    desk.finish(runs)
    assert desk.step().admitted[0] is head


def test_no_use_is_made_of_a_head_that_was_refused_until_blocks_come_back() -> None:
    desk = Desk(num_blocks=8)
    desk.arrive(60)
    desk.step()
    desk.arrive(100)
    desk.step()
    walks = []
    desk.pool.reserve = lambda *arguments, **names: walks.append(1)  # type: ignore[method-assign]
    for _ in range(3):
        desk.step()
    assert walks == []


def test_a_step_looks_past_few_that_do_not_fit() -> None:
    desk = Desk(num_blocks=8)
    desk.arrive(60)
    desk.step()
    for _ in range(ADMISSION_LOOKAHEAD):
        desk.arrive(100)
    fits = desk.arrive(3)
    desk.step()
    assert fits.state is SequenceState.WAITING
    assert len(desk.scheduler.waiting) == ADMISSION_LOOKAHEAD + 1


def test_choices_of_one_prompt_wait_for_the_first_and_cost_one_prefill() -> None:
    desk = Desk(max_batch_tokens=64)
    for _ in range(4):
        desk.arrive(100, first_id=5)
    other = desk.arrive(3)
    plans = [scheduled(desk.step()) for _ in range(3)]
    assert plans[0] == {0: 64}
    assert plans[1] == {0: 36, other.arrival_index: 3}
    assert plans[2] == {0: 1, 4: 1, 1: 1, 2: 1, 3: 1}  # 96 shared, 3 copied


def test_a_prefill_workers_prompt_copies_no_tail() -> None:
    desk = Desk(max_batch_tokens=64)
    desk.arrive(40, first_id=5)
    desk.step()
    desk.arrive(40, first_id=5, hold_blocks=True)
    plan = desk.step()
    assert plan.tails == []
    assert scheduled(plan) == {0: 1, 1: 8}


def test_a_prompt_waits_only_as_far_as_it_is_the_same() -> None:
    desk = Desk(max_batch_tokens=64)
    desk.arrive(200, first_id=0)
    request = make_request("r1", [*range(40), *range(500, 560)])
    branch = Sequence(request, desk.pool.new_chain(b"tenant"), 4096, 1, 0.0)
    desk.scheduler.add(branch)
    assert scheduled(desk.step()) == {0: 64}
    assert scheduled(desk.step()) == {0: 64}  # no budget is left for it
    assert branch.state is SequenceState.WAITING
    assert desk.pool.count_cached_tokens(branch.chain, branch.token_ids) == 32
    assert scheduled(desk.step()) == {0: 64}
    assert scheduled(desk.step()) == {0: 8, 1: 56}


def test_a_prompt_of_another_tenant_does_not_wait() -> None:
    desk = Desk(max_batch_tokens=64)
    desk.arrive(40, first_id=5)
    request = make_request("r1", range(5, 25))
    desk.scheduler.add(Sequence(request, desk.pool.new_chain(b"other"), 4096, 1, 0.0))
    assert scheduled(desk.step()) == {0: 40, 1: 20}


# --- order ------------------------------------------------------------------------------------------------------------


def test_fcfs_ignores_priority() -> None:
    desk = Desk(policy=SchedulingPolicy.FCFS, max_sequences=1)
    desk.arrive(3, priority=5, max_tokens=1)
    desk.arrive(3, priority=0, max_tokens=1)
    assert [scheduled(desk.step()) for _ in range(2)] == [{0: 3}, {1: 3}]


def test_priority_runs_the_lower_number_first() -> None:
    desk = Desk(max_sequences=1)
    for priority in (2, 0, 1):
        desk.arrive(3, priority=priority, max_tokens=1)
    assert [scheduled(desk.step()) for _ in range(3)] == [{1: 3}, {2: 3}, {0: 3}]


def test_waiting_makes_up_for_priority() -> None:
    desk = Desk(max_sequences=1)
    desk.arrive(3, priority=3, max_tokens=1)
    desk.now_s = 3 * AGEING_S_PER_LEVEL - 0.1
    desk.arrive(3, priority=0, max_tokens=1)
    desk.now_s = 3 * AGEING_S_PER_LEVEL + 0.1
    desk.arrive(3, priority=0, max_tokens=1)
    assert [scheduled(desk.step()) for _ in range(3)] == [{1: 3}, {0: 3}, {2: 3}]


def test_an_endless_stream_of_urgent_requests_does_not_starve_a_low_one() -> None:
    desk = Desk(max_sequences=1)
    low = desk.arrive(3, priority=2, max_tokens=1)
    for turn in range(200):
        desk.now_s = float(turn)
        desk.arrive(3, priority=0, max_tokens=1)
        desk.step()
        if low.state is SequenceState.FINISHED:
            break
    assert turn <= 2 * AGEING_S_PER_LEVEL + 1


def test_k15_shortest_first_lets_a_long_prompt_start_within_its_bound() -> None:
    desk = Desk(
        policy=SchedulingPolicy.SHORTEST, max_sequences=1, max_batch_tokens=8192, max_model_len=8192, num_blocks=512
    )
    long = desk.arrive(SKIP_TOKENS * MAX_SKIPS, max_tokens=1, first_id=1)
    num_passed = 0
    while long.state is SequenceState.WAITING:
        desk.arrive(3, max_tokens=1)
        desk.step()
        num_passed += 1
    assert 10 < num_passed <= MAX_SKIPS + 1


def test_shortest_first_counts_what_is_not_cached() -> None:
    desk = Desk(policy=SchedulingPolicy.SHORTEST, max_sequences=1, max_batch_tokens=1024, num_blocks=256)
    desk.arrive(600, max_tokens=1, first_id=0)
    desk.step()
    desk.arrive(300, max_tokens=1, first_id=70_000)
    desk.arrive(600, max_tokens=1, first_id=0)
    assert [list(scheduled(desk.step())) for _ in range(2)] == [[2], [1]]


def test_k12_a_waiting_urgent_request_takes_the_slot_of_a_low_one() -> None:
    desk = Desk(max_sequences=1)
    low = desk.arrive(3, priority=1)
    desk.step()
    high = desk.arrive(3, priority=0, max_tokens=2)
    assert desk.step().preempted == [low]
    assert list(scheduled(desk.step())) == [high.arrival_index]
    desk.step()
    assert high.state is SequenceState.FINISHED
    assert list(scheduled(desk.step())) == [low.arrival_index]


def test_k12_an_aged_low_request_is_not_preempted_back_and_forth() -> None:
    desk = Desk(max_sequences=1)
    low = desk.arrive(3, priority=1)
    desk.step()
    desk.now_s = 2 * AGEING_S_PER_LEVEL
    desk.arrive(3, priority=0)
    for _ in range(5):
        assert desk.step().preempted == []
    assert low.state is SequenceState.RUNNING


def test_an_urgent_request_takes_the_blocks_of_a_low_one() -> None:
    desk = Desk(num_blocks=8)
    low = desk.arrive(100, priority=1)
    for _ in range(3):
        desk.step()
    high = desk.arrive(60, priority=0)
    plans = [desk.step() for _ in range(3)]
    assert [sequence for plan in plans for sequence in plan.preempted] == [low]
    assert high.state is SequenceState.RUNNING


# --- preemption -------------------------------------------------------------------------------------------------------


def test_k11_a_preempted_request_keeps_its_place() -> None:
    desk = Desk(num_blocks=6, max_sequences=3)
    first, second = desk.arrive(40), desk.arrive(40)
    desk.step()
    desk.step()
    desk.arrive(40)
    while not (plan := desk.step()).preempted:
        pass
    assert plan.preempted == [second]
    assert second.num_generated > 0
    desk.finish(first)
    assert desk.step().admitted[0] is second


def test_k9_a_request_scheduled_in_a_step_is_no_victim_of_the_same_step() -> None:
    desk = Desk(num_blocks=4, max_sequences=2)
    worse, better = desk.arrive(31, priority=1), desk.arrive(31, priority=0)
    while not (plan := desk.step()).preempted:
        pass
    assert plan.preempted == [worse]
    assert [chunk.sequence for chunk in plan.chunks] == [better]


def test_k10_a_victim_does_not_make_another_running_request_skip_a_step() -> None:
    desk = Desk(num_blocks=6, max_sequences=3)
    sequences = [desk.arrive(31), desk.arrive(31), desk.arrive(20)]
    while not (plan := desk.step()).preempted:
        pass
    assert plan.preempted == [sequences[2]]
    assert {chunk.sequence for chunk in plan.chunks} == set(sequences[:2])


def test_k8_one_victim_for_one_needy_request_while_its_blocks_are_still_read() -> None:
    desk = Desk(num_blocks=6, max_sequences=3)
    sequences = [desk.arrive(31, max_tokens=64) for _ in range(3)]
    desk.step()
    desk.step()
    pinned = [list(sequence.blocks) for sequence in sequences]
    for refs in pinned:
        desk.pool.share(refs)  # transfers read from all of them: a preemption frees nothing yet
    plans: list[StepPlan] = []
    while not any(plan.preempted for plan in plans):
        plans.append(desk.step())
    assert sequences[0].state is SequenceState.RUNNING
    for refs in pinned:
        desk.pool.release(refs)
    for _ in range(400):
        desk.step()
    assert all(sequence.state is SequenceState.FINISHED for sequence in sequences)
    assert desk.pool.census().owned == 0


def test_kv13_a_held_prompt_is_never_preempted() -> None:
    desk = Desk(num_blocks=4, max_batch_tokens=16)
    decoding = desk.arrive(15)
    desk.step()
    held = desk.arrive(40, hold_blocks=True)
    preempted = desk.step().preempted + desk.step().preempted
    assert preempted == [decoding]
    assert held.state is SequenceState.RUNNING
    assert len(held.blocks) == 3


def test_a_request_preempted_too_often_comes_back_with_room_for_its_whole_life() -> None:
    desk = Desk(num_blocks=10)
    runs = desk.arrive(90, max_tokens=500)
    desk.step()
    desk.step()
    often = desk.arrive(20, max_tokens=60)
    often.num_preemptions = MAX_PREEMPTIONS
    desk.step()
    assert often.state is SequenceState.WAITING  # 2 blocks would do now, 5 at the end
    desk.finish(runs)
    desk.step()
    assert len(often.blocks) == 5


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_request_ends_whatever_the_pool_and_the_policy(data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from(list(SchedulingPolicy)))
    desk = Desk(
        num_blocks=data.draw(st.integers(7, 14)),
        policy=policy,
        max_batch_tokens=data.draw(st.sampled_from([8, 32])),
        long_prefill_token_threshold=data.draw(st.sampled_from([0, 10])),
        watermark_blocks=data.draw(st.integers(0, 3)),
    )
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 50), st.integers(0, 2)), max_size=15))
    sequences: list[Sequence] = []
    for num_tokens, max_tokens, priority in sizes:
        shared = data.draw(st.booleans())
        first_id = 3 if shared else None
        sequences.append(desk.arrive(num_tokens, first_id=first_id, max_tokens=max_tokens, priority=priority))
        for _ in range(data.draw(st.integers(0, 3))):
            desk.step()
        desk.now_s += data.draw(st.floats(0, 20))
    for _ in range(6000):
        if all(sequence.state is SequenceState.FINISHED for sequence in sequences):
            break
        plan = desk.step()
        assert plan.chunks or plan.preempted, "nothing runs although the pool is free for it"
    assert all(sequence.num_tokens == sequence.max_length for sequence in sequences)
    assert all(sequence.num_preemptions <= MAX_PREEMPTIONS for sequence in sequences)
    census = desk.pool.census()
    assert (census.owned, census.conservation_error) == (0, 0)
    assert (len(desk.scheduler.waiting), desk.scheduler.waiting.num_tokens) == (0, 0)


def test_cancelled_waiters_do_not_pile_up() -> None:
    desk = Desk(max_sequences=1)
    desk.arrive(3)
    desk.step()
    for _ in range(500):
        desk.finish(desk.arrive(3))
    assert len(desk.scheduler.waiting._heap) <= 20


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_k14_eight_streams_beside_endless_long_prompts_get_a_token_each_step_within_the_budgets_time() -> None:
    """In virtual time: a step with decodes is never longer than one of a full budget, and no decode sits one out."""
    timing = StepTiming((0.0, 1.2, 0.0), (9.0, 0.5, 0.0))
    desk = Desk(
        max_batch_tokens=64, max_sequences=16, max_model_len=8192, num_blocks=2000, long_prefill_token_threshold=48
    )
    streams = [desk.arrive(5, max_tokens=400) for _ in range(8)]
    while any(stream.num_generated == 0 for stream in streams):
        desk.step()
    budget_s = (9.0 + 8 * 0.5 + 56 * 1.2) / 1000
    gaps_s, prefilled = [], 0
    for turn in range(200):
        if turn % 8 == 0:
            desk.arrive(6000 if turn % 16 else 600, max_tokens=1)
        before = [stream.num_tokens for stream in streams]
        plan = desk.step()
        assert [stream.num_tokens - length for stream, length in zip(streams, before, strict=True)] == [1] * 8
        decodes = [chunk for chunk in plan.chunks if chunk.sequence in streams]
        prefilled += sum(chunk.num_tokens for chunk in plan.chunks) - len(decodes)
        gaps_s.append(timing.step_s(plan.chunks))
    assert max(gaps_s) <= budget_s + 1e-9
    assert prefilled >= 200 * 48, "the long prompts do not starve behind the streams either"


@pytest.mark.parametrize("queue_length", [10, 1000, 10_000])
def test_what_a_step_looks_at_does_not_grow_with_the_queue(queue_length: int) -> None:
    desk = Desk(max_sequences=4, num_blocks=64)
    for _ in range(4):
        desk.arrive(5)
    desk.step()
    for index in range(queue_length):
        desk.arrive(3 + index % 50, priority=index % 3 + 1)
    looked_at: list[str] = []
    waiting = desk.scheduler.waiting
    for name in ("push", "pop", "peek"):
        whole = getattr(waiting, name)

        def counted(*arguments: Any, name: str = name, whole: Any = whole) -> Any:
            looked_at.append(name)
            return whole(*arguments)

        setattr(waiting, name, counted)
    for _ in range(50):
        desk.step()
    assert len(looked_at) <= 50 * (2 * ADMISSION_LOOKAHEAD + 2)
