"""What a first token teaches the timing model."""

from __future__ import annotations

import pytest
from tandem.v1 import common_pb2, worker_pb2

from router.dispatcher import learn_times
from router.timing_model import MIN_SAMPLES, TimingModel, TimingPrior
from router.worker_state import Role, WorkerState
from tests.router.placement_simulation import worker

PRIOR = TimingPrior(prefill=(0.0, 1.0, 0.0), decode=(10.0, 1.0, 0.0))


def learned(decode: WorkerState, prefill_worker_id: str) -> TimingModel:
    """After many first tokens of prompts of 1,000 tokens that took two seconds."""
    timing = TimingModel(PRIOR)
    timeline = common_pb2.Timeline(prefill_compute_us=2_000_000, prefill_worker_id=prefill_worker_id)
    for _ in range(5 * MIN_SAMPLES):
        learn_times(timing, decode, worker_pb2.RequestEvent(prompt_tokens=1000, timeline=timeline))
    return timing


def busy_decode(share: float, running: int = 8) -> WorkerState:
    decode = worker("decode-0", Role.DECODE)
    report = worker_pb2.LoadReport(running_requests=running, context_tokens=1, step_ms=36.0, prefill_share=share)
    decode.take_report(report, 0.0)
    return decode


def test_a_prefill_workers_time_counts_in_full() -> None:
    assert learned(busy_decode(0.5), "prefill-0").prefill_ms(1000, 0) == pytest.approx(2000, rel=0.05)


@pytest.mark.parametrize(
    ("share", "running", "own_ms"),
    [(0.5, 8, 1000.0), (0.5, 1, 2000.0), (0.0, 8, 2000.0)],
    ids=["beside streams", "alone", "streams that wait"],
)
def test_of_a_prompt_beside_streams_counts_its_own_share(share: float, running: int, own_ms: float) -> None:
    assert learned(busy_decode(share, running), "").prefill_ms(1000, 0) == pytest.approx(own_ms, rel=0.05)


def test_steps_that_hold_a_prompt_teach_nothing_of_decodes() -> None:
    decode = busy_decode(0.5)
    assert learned(decode, "prefill-0").step_ms(8, 1) == pytest.approx(36.0, rel=0.05)
    decode.booked_prefills = 1
    assert learned(decode, "").step_ms(8, 1) == pytest.approx(18.0)
