"""The engine as a whole: tokens equal those of the model alone, whatever happens on the way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    RequestExceedsKvCapacity,
    ServerOverloaded,
    WorkerUnavailable,
)
from cluster.identity import BlockRef, RequestId
from cluster.sampling_params import SamplingParams
from engine.request import FinishReason, LandedPrompt
from tests.engine.engine_bench import DEADLINE_S, EngineBench, make_request
from tests.engine.hash_runner import NUM_LAYERS, VOCAB, expected_tokens, fingerprints

GREEDY: dict[str, Any] = {"temperature": 0.0}


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, num_tokens)]


def params(index: int, max_tokens: int = 8) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        GREEDY,
        {"seed": 11 + index},
        {"temperature": 0.7, "top_p": 0.9, "seed": index},
        {"top_k": 5, "presence_penalty": 0.8, "frequency_penalty": 0.4, "seed": index},
        {"min_p": 0.05, "repetition_penalty": 1.3, "logit_bias": {3: 2.0}, "seed": index},
    ]
    return SamplingParams(max_tokens=max_tokens, **kinds[index % len(kinds)])


def assert_same_as_alone(bench: EngineBench, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> None:
    assert bench.run(prompts, sampling) == [expected_tokens(*pair) for pair in zip(prompts, sampling, strict=True)]


# --- equality ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_sequences", [1, 8])
@pytest.mark.parametrize("chunk", [1, 16, 17])
@pytest.mark.parametrize("block_tokens", [4, 16])
def test_tokens_do_not_depend_on_batch_or_chunk(max_sequences: int, chunk: int, block_tokens: int) -> None:
    with EngineBench(
        num_blocks=256, block_tokens=block_tokens, max_sequences=max_sequences, long_prefill_token_threshold=chunk
    ) as bench:
        lengths = [1, 3, 15, 16, 17, 33, 40, 64]
        assert_same_as_alone(bench, [prompt(n, n) for n in lengths], [params(n) for n in range(8)])
        assert max(bench.runner.batch_sizes) > 1 or max_sequences == 1


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_tokens_do_not_depend_on_anything(data: st.DataObject) -> None:
    block_tokens = data.draw(st.sampled_from([1, 4, 16]))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=10))
    families = data.draw(st.lists(st.integers(0, 2), min_size=10, max_size=10))
    longest = -(-(max(lengths) + 8) // block_tokens)
    with EngineBench(
        block_tokens=block_tokens,
        num_blocks=data.draw(st.integers(longest, longest + 12)),
        max_sequences=data.draw(st.sampled_from([1, 3, 8])),
        max_batch_tokens=data.draw(st.sampled_from([8, 20, 64])),
        long_prefill_token_threshold=data.draw(st.sampled_from([0, 5])),
        watermark_blocks=data.draw(st.integers(0, 2)),
    ) as bench:
        prompts = [prompt(40, family)[:length] for length, family in zip(lengths, families, strict=False)]
        assert_same_as_alone(bench, prompts, [params(index) for index in range(len(prompts))])


def test_ten_blocks_and_32_requests_end_in_the_right_tokens() -> None:
    with EngineBench(num_blocks=10, block_tokens=4, max_sequences=8, max_batch_tokens=16) as bench:
        prompts = [prompt(1 + index % 12, index) for index in range(32)]
        assert_same_as_alone(bench, prompts, [params(index, 16) for index in range(32)])


def test_preemption_happens_and_drops_no_output() -> None:
    with EngineBench(num_blocks=8, block_tokens=4, max_sequences=4) as bench:
        prompts = [prompt(5, index) for index in range(4)]
        assert_same_as_alone(bench, prompts, [params(index, 20) for index in range(4)])
        assert bench.runner.num_computed_tokens > 4 * (5 + 19), "nobody was preempted: the pool was too large"


def test_k3_a_hit_is_known_before_the_tokens_are_scheduled() -> None:
    with EngineBench(num_blocks=128, block_tokens=16, max_model_len=1024, max_batch_tokens=1024) as bench:
        first = prompt(256, 1)
        bench.run([[*first, 1]], [params(0, 1)])
        before = bench.runner.num_computed_tokens
        bench.submit("second", [*first, *prompt(209, 2)], max_tokens=1)
        bench.sink.end("second")
        assert bench.runner.num_computed_tokens - before == 209
        assert bench.sink.of("second")[0].cached_tokens == 256


def test_k1_full_hit_recomputes_the_last_block() -> None:
    with EngineBench(block_tokens=16) as bench:
        sampling = [params(1)]
        first = bench.run([prompt(32)], sampling)
        bench.submit("again", prompt(32), sampling=sampling[0])
        bench.sink.end("again")
        assert bench.sink.of("r0")[0].cached_tokens == 0
        assert bench.sink.of("again")[0].cached_tokens == 16
        assert bench.sink.tokens("again") == first[0]


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    with EngineBench(block_tokens=4) as bench:
        (answer,) = bench.run([prompt(6)], [SamplingParams(max_tokens=11, **GREEDY)])
        turn = [*prompt(6), *answer, 1]
        bench.submit("turn", turn)
        bench.sink.end("turn")
        assert bench.sink.of("turn")[0].cached_tokens == 16  # the last token's KV was never computed
        assert bench.sink.tokens("turn") == expected_tokens(turn, SamplingParams(max_tokens=8, **GREEDY))


def test_k20_a_resumed_request_hits_its_own_blocks() -> None:
    with EngineBench(num_blocks=9, block_tokens=4, max_sequences=2) as bench:
        prompts = [prompt(9, 1), prompt(9, 2)]
        assert_same_as_alone(bench, prompts, [params(0, 20), params(0, 20)])
        assert bench.runner.num_computed_tokens < 2 * (9 + 19) + 9 + 19, "the victim started from nothing"


@pytest.mark.parametrize("num_tokens", [5, 13, 15, 16, 17])
def test_a3_choices_of_one_request_share_their_prompt(num_tokens: int) -> None:
    with EngineBench(block_tokens=4, is_gated=True) as bench:
        for choice in range(4):
            bench.submit(f"c{choice}", prompt(num_tokens), seed=5, temperature=1.0, choice_index=choice)
        bench.permit(100)
        got = []
        for choice in range(4):
            bench.sink.end(f"c{choice}")
            got.append(bench.sink.tokens(f"c{choice}"))
        sampling = [SamplingParams(max_tokens=8, seed=5, choice_index=choice) for choice in range(4)]
        assert got == [expected_tokens(prompt(num_tokens), params) for params in sampling]
        assert len({tuple(tokens) for tokens in got}) == 4
        # One prefill; each other choice computes the last token alone, behind full blocks and a copied tail.
        assert bench.runner.num_computed_tokens == num_tokens + 3 * 1 + 4 * 7
        assert [bench.sink.of(f"c{choice}")[0].cached_tokens for choice in (0, 1)] == [0, num_tokens - 1]


# --- outputs ----------------------------------------------------------------------------------------------------------


def test_k17_a_chunk_of_a_prompt_gives_no_output() -> None:
    with EngineBench(max_batch_tokens=16, is_gated=True) as bench:
        bench.submit("r", prompt(40))
        bench.permit(2)
        bench.permit(1)
        bench.sink.wait_until(lambda: bench.sink.of("r"))
        assert bench.runner.num_computed_tokens >= 40
        assert len(bench.sink.of("r")[0].token_ids) == 1


def test_the_tokens_of_one_step_come_in_one_call() -> None:
    with EngineBench() as bench:
        bench.run([prompt(3, index) for index in range(4)], [params(0)] * 4)
        assert max(len(step) for step in bench.sink.steps) == 4


def test_the_first_output_tells_times_and_later_ones_do_not() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.25
        return now[0]

    with EngineBench(clock=clock) as bench:
        bench.run([prompt(5)], [params(0, 3)])
        outputs = bench.sink.of("r0")
        assert outputs[0].queued_s > 0
        assert outputs[0].compute_s > 0
        assert [output.queued_s for output in outputs[1:]] == [0.0, 0.0]


def stop_params(stop: int, max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=(stop,), **{**GREEDY, **fields})


def test_a_stop_token_ends_the_request_and_is_the_last_token() -> None:
    free = expected_tokens(prompt(5), SamplingParams(max_tokens=8, **GREEDY))
    stop = free[3]
    with EngineBench() as bench:
        bench.submit("r", prompt(5), sampling=stop_params(stop))
        end = bench.sink.end("r")
        assert (end.finish_reason, end.stop_token_id) == (FinishReason.STOP, stop)
        assert bench.sink.tokens("r") == free[: free.index(stop) + 1]


def test_a8_the_length_cap_says_length() -> None:
    with EngineBench() as bench:
        bench.submit("r", prompt(5), max_tokens=3)
        assert bench.sink.end("r").finish_reason is FinishReason.LENGTH
        assert len(bench.sink.tokens("r")) == 3


def test_s26_the_context_ends_the_request() -> None:
    with EngineBench(max_model_len=64) as bench:
        bench.submit("r", prompt(60), max_tokens=1000)
        assert bench.sink.end("r").finish_reason is FinishReason.LENGTH
        assert len(bench.sink.tokens("r")) == 4


def test_logprobs_come_with_each_token_and_do_not_depend_on_chunks() -> None:
    seen = []
    for threshold in (0, 5):
        with EngineBench(long_prefill_token_threshold=threshold) as bench:
            bench.submit("other", prompt(30, 9), max_tokens=30)
            bench.submit("r", prompt(13), max_tokens=6, logprobs=2, prompt_logprobs=1)
            bench.sink.end("r")
            outputs = bench.sink.of("r")
            assert all(len(output.logprobs) == len(output.token_ids) == 1 for output in outputs)
            assert [output.logprobs[0].chosen.token_id for output in outputs] == bench.sink.tokens("r")
            assert all(len(output.logprobs[0].top) == 2 for output in outputs)
            prompt_logprobs = outputs[0].prompt_logprobs
            assert [entry.chosen.token_id for entry in prompt_logprobs] == prompt(13)[1:]
            assert all(output.prompt_logprobs == () for output in outputs[1:])
            seen.append([round(entry.chosen.logprob, 4) for entry in prompt_logprobs])
    assert seen[0] == seen[1]


def test_a7_prompt_logprobs_are_complete_although_the_prompt_is_cached() -> None:
    with EngineBench() as bench:
        bench.run([prompt(20)], [params(0, 2)])
        bench.submit("r", prompt(20), max_tokens=2, prompt_logprobs=0)
        bench.sink.end("r")
        first = bench.sink.of("r")[0]
        assert len(first.prompt_logprobs) == 19
        assert first.cached_tokens == 0


# --- migration and landed prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", range(5))
def test_a_migrated_request_goes_on_with_the_same_tokens(kind: int) -> None:
    sampling = params(kind, 12)
    whole = expected_tokens(prompt(9), sampling)
    with EngineBench() as bench:
        bench.submit("r", [*prompt(9), *whole[:5]], sampling=sampling, num_generated=5)
        bench.sink.end("r")
        assert bench.sink.tokens("r") == whole[5:]


def land(bench: EngineBench, token_ids: list[int], spare_blocks: int = 1) -> list[BlockRef]:
    """What a transfer does: blocks, and the right KV in them."""
    refs = bench.pool.allocate(-(-len(token_ids) // bench.pool.block_tokens) + spare_blocks)
    assert refs is not None
    slots = np.concatenate([np.arange(bench.pool.block_tokens) + ref.block * bench.pool.block_tokens for ref in refs])
    bench.runner.kv[slots[: len(token_ids)]] = fingerprints(np.array(token_ids), np.arange(len(token_ids)))
    return refs


def landed(refs: list[BlockRef], first_token: int) -> LandedPrompt:
    return LandedPrompt(tuple(refs), first_token, None, cached_tokens=0)


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 31])
def test_k22_a_landed_prompt_is_not_computed_again(num_tokens: int) -> None:
    sampling = params(1)
    whole = expected_tokens(prompt(num_tokens), sampling)
    with EngineBench(block_tokens=16) as bench:
        refs = land(bench, prompt(num_tokens))
        bench.submit("r", prompt(num_tokens), sampling=sampling, landed=landed(refs, whole[0]))
        bench.sink.end("r")
        assert bench.sink.tokens("r") == whole[1:]
        assert bench.runner.num_computed_tokens == len(whole) - 1


def test_kv14_a_landed_prompt_without_a_spare_block_still_ends_right() -> None:
    sampling = params(1)
    whole = expected_tokens(prompt(16), sampling)
    with EngineBench(block_tokens=16, num_blocks=2) as bench:
        refs = land(bench, prompt(16), spare_blocks=0)
        other = bench.pool.allocate(1)
        assert other is not None
        bench.submit("r", prompt(16), sampling=sampling, landed=landed(refs, whole[0]))
        bench.pool.release(other)
        bench.sink.end("r")
        assert bench.sink.tokens("r") == whole[1:]


def test_kv45_a_landed_request_that_is_preempted_comes_back() -> None:
    sampling = [params(index, 20) for index in range(3)]
    with EngineBench(block_tokens=4, num_blocks=10) as bench:
        # All land first: an engine that is ahead would have taken the blocks of the next one.
        landings = [land(bench, prompt(7, index)) for index in range(3)]
        for index, refs in enumerate(landings):
            whole = expected_tokens(prompt(7, index), sampling[index])
            bench.submit(f"r{index}", prompt(7, index), sampling=sampling[index], landed=landed(refs, whole[0]))
        for index in range(3):
            bench.sink.end(f"r{index}")
            assert bench.sink.tokens(f"r{index}") == expected_tokens(prompt(7, index), sampling[index])[1:]


@pytest.mark.parametrize(
    ("sampling", "reason", "stop"),
    [
        (SamplingParams(max_tokens=1, **GREEDY), FinishReason.LENGTH, None),
        (stop_params(7), FinishReason.STOP, 7),
    ],
)
def test_a_landed_first_token_may_be_the_last(sampling: SamplingParams, reason: FinishReason, stop: int | None) -> None:
    with EngineBench() as bench:
        bench.submit("r", prompt(5), sampling=sampling, landed=landed(land(bench, prompt(5)), 7))
        end = bench.sink.end("r")
        assert (end.finish_reason, end.stop_token_id, end.token_ids) == (reason, stop, ())
        assert bench.runner.batch_sizes == []


def test_landed_blocks_that_were_given_away_fail_the_request_alone() -> None:
    with EngineBench() as bench:
        refs = land(bench, prompt(5))
        bench.pool.release(refs)
        bench.submit("r", prompt(5), landed=landed(refs, 7))
        end = bench.sink.end("r")
        assert end.finish_reason is FinishReason.ERROR
        assert "block_invariant" in end.error
        assert bench.run([prompt(5)], [params(0)]) == [expected_tokens(prompt(5), params(0))]


def test_a_landed_prompt_enters_the_prefix_cache() -> None:
    with EngineBench(block_tokens=4) as bench:
        bench.submit("r", prompt(9), landed=landed(land(bench, prompt(9)), 7))
        bench.sink.end("r")
        bench.submit("again", prompt(9))
        bench.sink.end("again")
        assert bench.sink.of("again")[0].cached_tokens == 8


# --- prefill workers --------------------------------------------------------------------------------------------------


class Listener:
    def __init__(self, fail_at_layer: int | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.blocks: list[BlockRef] = []
        self._fail_at_layer = fail_at_layer

    def blocks_allocated(self, blocks: Sequence[BlockRef], cached_tokens: int) -> None:
        self.blocks = list(blocks)
        self.calls.append(("allocated", len(blocks), cached_tokens))

    def chunk_started(self, first_token: int, num_tokens: int) -> None:
        self.calls.append(("started", first_token, num_tokens))

    def layer_written(self, layer: int) -> None:
        if layer == self._fail_at_layer:
            raise RuntimeError("the listener broke")
        self.calls.append(("layer", layer))

    def chunk_finished(self) -> None:
        self.calls.append(("finished",))


def test_a_prefill_worker_hears_of_each_layer_and_keeps_the_blocks() -> None:
    with EngineBench(max_batch_tokens=16, block_tokens=4) as bench:
        listener = Listener()
        bench.submit("r", prompt(20), max_tokens=50, hold_blocks=True, kv_listener=listener)
        end = bench.sink.end("r")
        layers = [("layer", layer) for layer in range(NUM_LAYERS)]
        assert listener.calls == [
            ("allocated", 5, 0),
            ("started", 0, 16),
            *layers,
            ("finished",),
            ("started", 16, 4),
            *layers,
            ("finished",),
        ]
        assert end.finish_reason is FinishReason.LENGTH
        assert list(end.token_ids) == expected_tokens(prompt(20), SamplingParams(max_tokens=1, **GREEDY))
        assert bench.pool.holds(listener.blocks)
        slots = np.concatenate([np.arange(4) + ref.block * 4 for ref in listener.blocks])
        assert np.array_equal(bench.runner.kv[slots], fingerprints(np.array(prompt(20)), np.arange(20)))
        bench.engine.release(RequestId("r"))
        bench.engine.release(RequestId("r"))
        bench.run([prompt(5)], [params(0)])  # the engine has looked at its inbox
        assert bench.pool.census().owned == 0


def test_a_cached_prefix_is_valid_at_once_for_the_listener() -> None:
    with EngineBench(block_tokens=4) as bench:
        bench.run([prompt(20)], [params(0, 1)])
        listener = Listener()
        bench.submit("r", prompt(20), hold_blocks=True, kv_listener=listener)
        bench.sink.end("r")
        assert listener.calls[:2] == [("allocated", 5, 16), ("started", 16, 4)]
        bench.engine.release(RequestId("r"))


def test_a_listener_that_raises_fails_its_request_alone() -> None:
    with EngineBench() as bench:
        bench.submit("bad", prompt(6), hold_blocks=True, kv_listener=Listener(fail_at_layer=1))
        bench.submit("good", prompt(6, 1), hold_blocks=True, kv_listener=Listener())
        assert bench.sink.end("bad").finish_reason is FinishReason.ERROR
        assert bench.sink.end("good").finish_reason is FinishReason.LENGTH
        bench.engine.release(RequestId("good"))


def test_held_blocks_come_back_when_the_engine_stops() -> None:
    with EngineBench() as bench:
        bench.submit("r", prompt(6), hold_blocks=True)
        bench.sink.end("r")


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_cancelled_request_ends_within_a_step_and_gives_its_blocks_back() -> None:
    with EngineBench(is_gated=True) as bench:
        bench.submit("r", prompt(6), max_tokens=200)
        bench.permit(3)
        bench.sink.wait_until(lambda: len(bench.sink.of("r")) == 3)
        bench.engine.cancel(RequestId("r"))
        bench.permit(1)
        assert bench.sink.end("r").finish_reason is FinishReason.CANCELLED
        assert len(bench.sink.tokens("r")) <= 4
        assert bench.pool.census().owned == 0


def test_kv11_kv35_cancels_at_odd_moments_change_nothing() -> None:
    with EngineBench(num_blocks=4, block_tokens=4) as bench:
        outside = bench.pool.allocate(4)
        assert outside is not None
        bench.submit("waits", prompt(6))
        bench.engine.cancel(RequestId("nobody"))
        bench.engine.cancel(RequestId("waits"))  # before any block
        bench.engine.cancel(RequestId("waits"))
        assert bench.sink.end("waits").finish_reason is FinishReason.CANCELLED
        bench.pool.release(outside)
        bench.run([prompt(6)], [params(0)])
        bench.engine.cancel(RequestId("r0"))  # after the end
        bench.engine.release(RequestId("r0"))
        bench.submit("later", prompt(2))
        bench.sink.end("later")
        assert len([o for o in bench.sink.of("r0") if o.finish_reason]) == 1


def test_a_cancelled_landed_request_gives_its_blocks_back() -> None:
    with EngineBench(is_gated=True) as bench:
        bench.submit("r", prompt(6), landed=landed(land(bench, prompt(6)), 7), max_tokens=50)
        bench.engine.cancel(RequestId("r"))
        bench.permit(2)
        assert bench.sink.end("r").finish_reason is FinishReason.CANCELLED


def test_f39_a_deadline_ends_a_request_that_waits() -> None:
    now = [100.0]
    with EngineBench(num_blocks=2, block_tokens=4, clock=lambda: now[0]) as bench:
        outside = bench.pool.allocate(2)
        assert outside is not None
        bench.submit("r", prompt(3), deadline_s=101.0, max_tokens=2)
        now[0] = 101.5
        bench.engine.cancel(RequestId("r2"))  # unknown: changes nothing
        bench.pool.release(outside[:1])  # something happens, so the engine looks at its clock
        end = bench.sink.end("r")
        assert (end.finish_reason, end.error) == (FinishReason.ERROR, "deadline_exceeded")
        bench.owned_outside = 1


def test_f39_the_engine_wakes_for_a_deadline_by_itself() -> None:
    with EngineBench(num_blocks=2, block_tokens=4) as bench:
        outside = bench.pool.allocate(2)
        assert outside is not None
        bench.submit("r", prompt(3), deadline_s=0.001, max_tokens=2)  # long ago on a monotonic clock
        assert bench.sink.end("r").error == "deadline_exceeded"
        bench.pool.release(outside)


def test_f39_a_deadline_ends_a_running_request() -> None:
    now = [100.0]
    with EngineBench(is_gated=True, clock=lambda: now[0]) as bench:
        bench.submit("r", prompt(3), deadline_s=101.0, max_tokens=100)
        bench.permit(2)
        bench.sink.wait_until(lambda: len(bench.sink.of("r")) == 2)
        now[0] = 102.0
        bench.permit(1)
        assert bench.sink.end("r").error == "deadline_exceeded"
        assert bench.pool.census().owned == 0


def test_an_exception_in_a_step_ends_that_step_and_the_engine_goes_on() -> None:
    with EngineBench(is_gated=True) as bench:
        bench.submit("r", prompt(3))
        bench.runner.failures.append(RuntimeError("kernel broke"))
        bench.permit(1)
        end = bench.sink.end("r")
        assert end.finish_reason is FinishReason.ERROR
        assert "RuntimeError" in end.error
        bench.permit(100)
        assert bench.run([prompt(3)], [params(0)]) == [expected_tokens(prompt(3), params(0))]


def test_a_preempted_request_survives_the_failed_step_of_another() -> None:
    sampling = SamplingParams(max_tokens=30, presence_penalty=0.8, frequency_penalty=0.4, logit_bias={49: -100.0})
    with EngineBench(is_gated=True, max_sequences=1, num_blocks=20) as bench:
        bench.runner.fail_on_token = 49
        bench.submit("low", prompt(5), sampling=sampling, priority=1)
        bench.permit(6)
        bench.sink.wait_until(lambda: len(bench.sink.of("low")) == 6)
        bench.submit("high", [1, 2, 49])  # takes the slot of the first one, and fails
        bench.permit(100)
        assert bench.sink.end("high").finish_reason is FinishReason.ERROR
        assert bench.sink.end("low").finish_reason is FinishReason.LENGTH
        assert bench.sink.tokens("low") == expected_tokens(prompt(5), sampling)


def test_an_engine_that_always_fails_gives_up_loudly() -> None:
    with EngineBench(is_gated=True) as bench:
        has_ended = threading.Event()
        bench.engine.tell_when_ended(has_ended.set)
        bench.runner.failures.extend(RuntimeError(f"failure {n}") for n in range(3))
        for index in range(3):
            bench.submit(f"r{index}", prompt(3))
            bench.permit(1)
            assert bench.sink.end(f"r{index}").finish_reason is FinishReason.ERROR
        assert has_ended.wait(DEADLINE_S)
        with pytest.raises(WorkerUnavailable, match="in a row failed"):
            bench.submit("later", prompt(3))
        told_late = threading.Event()
        bench.engine.tell_when_ended(told_late.set)
        assert told_late.is_set()


def test_a_sink_that_raises_does_not_stop_the_engine() -> None:
    bench = EngineBench()
    calls = []

    def sink(outputs: Sequence[Any]) -> None:
        calls.append(outputs)
        bench.sink(outputs)
        raise RuntimeError("the sink broke")

    bench.engine.start(sink)
    assert bench.run([prompt(3)], [params(0)]) == [expected_tokens(prompt(3), params(0))]
    bench.engine.stop(DEADLINE_S)


def test_q14_nan_logits_end_one_request_and_no_other() -> None:
    with EngineBench() as bench:
        bench.runner.nan_after_token = 49
        bench.submit("bad", [1, 2, 49])
        bench.submit("good", [1, 2, 3], logit_bias={49: -100.0})
        end = bench.sink.end("bad")
        assert end.finish_reason is FinishReason.ERROR
        assert "NaN" in end.error
        assert bench.sink.end("good").finish_reason is FinishReason.LENGTH


def test_stop_cancels_what_runs_and_what_waits() -> None:
    with EngineBench(is_gated=True, max_sequences=1) as bench:
        bench.submit("runs", prompt(3), max_tokens=100)
        bench.submit("waits", prompt(3), max_tokens=100)
        bench.permit(1)
        bench.sink.wait_until(lambda: bench.sink.of("runs"))
        stopper = threading.Thread(target=bench.engine.stop, args=(DEADLINE_S,))
        stopper.start()
        bench.permit(2)
        stopper.join(DEADLINE_S)
        assert bench.sink.end("runs").finish_reason is FinishReason.CANCELLED
        assert bench.sink.end("waits").finish_reason is FinishReason.CANCELLED
        with pytest.raises(WorkerUnavailable):
            bench.submit("late", prompt(3))


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_ids", "fields", "error"),
    [
        ([], {}, InvalidRequest),
        ([VOCAB], {}, InvalidRequest),
        ([-1], {}, InvalidRequest),
        ([1], {"temperature": 3.0}, InvalidRequest),
        ([1], {"json_schema": "{}"}, InvalidRequest),
        ([1], {"speculation": "ngram"}, InvalidRequest),
        ([1, 2], {"num_generated": 2}, InvalidRequest),
        ([1, 2, 3], {"num_generated": 2, "max_tokens": 2}, InvalidRequest),
        ([1] * 256, {}, ContextLengthExceeded),
        ([1] * 200, {"max_tokens": 100}, RequestExceedsKvCapacity),
    ],
)
def test_f37_a_worker_checks_every_limit_again(token_ids: list[int], fields: Any, error: type[Exception]) -> None:
    with EngineBench(num_blocks=60, block_tokens=4) as bench:
        with pytest.raises(error):
            bench.submit("r", token_ids, **fields)
        assert bench.run([prompt(5)], [params(0)]) == [expected_tokens(prompt(5), params(0))]


def test_k7_a_request_that_can_never_fit_is_refused_at_once() -> None:
    with EngineBench(num_blocks=4, block_tokens=16) as bench:
        with pytest.raises(RequestExceedsKvCapacity):
            bench.submit("r", prompt(80), max_tokens=1)
        with pytest.raises(RequestExceedsKvCapacity):
            bench.submit("r", prompt(60), max_tokens=6)
        bench.submit("fits", prompt(60), max_tokens=5)
        assert bench.sink.end("fits").finish_reason is FinishReason.LENGTH


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    with EngineBench(max_waiting=2, is_gated=True, max_sequences=1) as bench:
        bench.submit("runs", prompt(3), max_tokens=50)
        bench.permit(1)
        bench.sink.wait_until(lambda: bench.sink.of("runs"))
        bench.submit("w1", prompt(3))
        bench.submit("w2", prompt(3))
        with pytest.raises(ServerOverloaded) as refused:
            bench.submit("w3", prompt(3))
        assert refused.value.retry_after_s > 0
        assert bench.engine.load().waiting == 2


def test_a_request_id_in_use_is_refused() -> None:
    with EngineBench(is_gated=True) as bench:
        bench.submit("r", prompt(3))
        with pytest.raises(InvalidRequest, match="in use"):
            bench.submit("r", prompt(3))
        bench.permit(20)
        bench.sink.end("r")
        bench.submit("r", prompt(3))


def test_an_idle_engine_sleeps() -> None:
    with EngineBench() as bench:
        bench.run([prompt(3)], [params(0)])
        seen = []
        take = bench.engine._inbox.take

        def counted(timeout_s: float | None) -> Any:
            seen.append(timeout_s)
            return take(timeout_s)

        bench.engine._inbox.take = counted  # type: ignore[method-assign]
        bench.engine.submit(make_request("again", prompt(3), max_tokens=2))
        bench.sink.end("again")
        bench.engine.submit(make_request("once more", prompt(3), max_tokens=2))
        bench.sink.end("once more")
        assert len(seen) <= 8
        assert None in seen


def test_a_blocked_engine_sleeps_until_blocks_come_back() -> None:
    with EngineBench(num_blocks=4, block_tokens=4) as bench:
        outside = bench.pool.allocate(3)
        assert outside is not None
        looks = []
        take = bench.engine._inbox.take

        def counted(timeout_s: float | None) -> Any:
            with bench.sink._changed:
                looks.append(timeout_s)
                bench.sink._changed.notify_all()
            return take(timeout_s)

        bench.engine._inbox.take = counted  # type: ignore[method-assign]
        bench.submit("r", prompt(6))
        bench.sink.wait_until(lambda: looks and looks[-1] is None)  # blocked: it sleeps without a timeout
        assert len(looks) <= 3
        bench.pool.release(outside)
        assert bench.sink.end("r").finish_reason is FinishReason.LENGTH


def test_the_load_says_what_runs_and_waits() -> None:
    with EngineBench(is_gated=True, max_sequences=2) as bench:
        for index in range(3):
            bench.submit(f"r{index}", prompt(6, index), max_tokens=30)
        bench.permit(3)
        bench.sink.wait_until(lambda: len(bench.sink.steps) >= 3)
        bench.permit(1)
        load = bench.engine.load()
        assert (load.running, load.waiting, load.waiting_tokens, load.batch_size) == (2, 1, 6, 2)
        assert load.context_tokens >= 12
        assert load.step_ms > 0
        assert load.tokens_per_s > 0
        assert load.census.total == 64
