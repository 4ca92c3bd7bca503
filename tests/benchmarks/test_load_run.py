"""The three ways of sending, on a virtual clock."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from benchmarks.arrivals import ArrivalProcess, arrival_times
from benchmarks.load_run import LoadRun, RunLimits, Session, run_closed_loop, run_open_loop, run_sessions
from benchmarks.openai_client import StreamCapture
from benchmarks.request_record import Outcome
from benchmarks.run_summary import Flag, summarise
from benchmarks.scripted_server import Answer, SingleServerQueue, chunk, token_stream
from benchmarks.workload import LengthLaw, PlannedRequest, Workload, plan_synthetic
from tests.benchmarks.scripted_sender import ScriptedSender
from tests.benchmarks.virtual_loop import run_virtually

SHAPE = Workload(LengthLaw(16, 16), LengthLaw(1, 1))


def _plan(rate_per_s: float, duration_s: float) -> list[PlannedRequest]:
    times = arrival_times(ArrivalProcess("constant", rate_per_s), duration_s, seed=0)
    return plan_synthetic(SHAPE, times, seed=0)


def _after(delay_s: float) -> ScriptedSender:
    return ScriptedSender(lambda number, body, now_s: token_stream([now_s + delay_s]))


def test_b1_waiting_for_the_client_is_part_of_the_latency() -> None:
    run = run_virtually(run_open_loop(_plan(20.0, 10.0), _after(0.19), 10.0, RunLimits(max_in_flight=1)))
    from_schedule = np.percentile([record.latency_s for record in run.records], 99)
    from_send = np.percentile([record.service_s for record in run.records], 99)
    run_length_s = max(record.ended_s for record in run.records)
    assert from_send == pytest.approx(0.19, abs=0.001)
    # 200 requests of 190 ms one after another take 38 s; the last was due at 10 s.
    assert run_length_s == pytest.approx(38.0, abs=0.1)
    assert from_schedule == pytest.approx(run_length_s - 10.0, rel=0.02)
    assert Flag.CLIENT_LIMITED in summarise(run).flags


def test_b10_each_phase_sends_at_once_and_does_not_hang_after_the_last() -> None:
    async def two_phases() -> tuple[LoadRun, LoadRun]:
        return (
            await run_open_loop(_plan(5.0, 4.0), _after(0.05), 4.0),
            await run_open_loop(_plan(9.0, 4.0), _after(0.05), 4.0),
        )

    for run in run_virtually(two_phases()):
        assert min(record.sent_s for record in run.records) < 0.1
        assert max(record.dispatch_delay_s for record in run.records) < 0.001
        assert run.window_end_s == 4.0
        assert all(record.is_ok for record in run.records)


def test_b11_closed_loop_never_exceeds_its_cap_in_warmup_or_after() -> None:
    def script(number: int, body: dict[str, Any], now_s: float) -> Answer:
        return token_stream([now_s + 0.01 * (1 + number % 7)])

    sender = ScriptedSender(script)
    run = run_virtually(run_closed_loop(_plan(1000.0, 1.0), sender, concurrency=32, num_warmup=100, timeout_s=60.0))
    assert sender.peak_in_flight == 32
    assert run.peak_in_flight == 32
    assert sum(record.is_warmup for record in run.records) == 100
    measured = [record for record in run.records if not record.is_warmup]
    assert len(measured) == 900
    # The burst of the start is outside the window.
    assert run.window_start_s >= max(record.ended_s for record in run.records if record.is_warmup)
    assert run.window_end_s <= max(record.ended_s for record in run.records)
    summary = summarise(run, is_closed_loop=True)
    assert summary.flags == (Flag.OK,)
    # 32 users, 40 ms on average: 800 requests a second.
    assert summary.achieved_per_s == pytest.approx(800.0, rel=0.05)


def test_a_slow_server_leaves_unfinished_records_not_a_hang() -> None:
    run = run_virtually(run_open_loop(_plan(10.0, 1.0), _after(1e6), 1.0, RunLimits(drain_timeout_s=5.0)))
    assert {record.outcome for record in run.records} == {Outcome.UNFINISHED}
    assert Flag.ERRORS in summarise(run).flags


def test_closed_loop_gives_up_at_its_timeout_and_records_what_was_not_sent() -> None:
    run = run_virtually(run_closed_loop(_plan(10.0, 1.0), _after(1e6), concurrency=2, num_warmup=0, timeout_s=3.0))
    assert [record.outcome for record in run.records] == [Outcome.UNFINISHED] * 2 + [Outcome.NOT_SENT] * 8


@pytest.mark.parametrize("kind", ["open", "closed", "sessions"])
def test_a_cancelled_run_leaves_nothing_that_loads_the_server(kind: str) -> None:
    sender = _CountingSender()

    async def cancelled_in_the_middle() -> int:
        plan = _plan(10.0, 20.0)
        sessions = [Session(place, 0.4 * place, "", ("a", "b"), 1) for place in range(20)]
        runs: dict[str, Any] = {
            "open": lambda: run_open_loop(plan, sender, 20.0),
            "closed": lambda: run_closed_loop(plan, sender, 4, num_warmup=0, timeout_s=100.0),
            "sessions": lambda: run_sessions(sessions, sender, 20.0),
        }
        running = asyncio.create_task(runs[kind]())
        await asyncio.sleep(2.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert sender.num_running == 0
        num_sent = sender.num_sent
        await asyncio.sleep(10.0)
        return num_sent

    num_sent = run_virtually(cancelled_in_the_middle())
    assert sender.num_sent == num_sent > 1


class _CountingSender:
    """Answers after 0.3 s; knows what is out."""

    def __init__(self) -> None:
        self.num_sent = self.num_running = 0

    async def send(self, request: PlannedRequest, capture: StreamCapture) -> None:
        self.num_sent += 1
        self.num_running += 1
        try:
            await asyncio.sleep(0.3)
        finally:
            self.num_running -= 1


def test_a_fault_of_the_sender_itself_ends_the_run() -> None:
    class Broken:
        async def send(self, request: PlannedRequest, capture: StreamCapture) -> None:
            raise TypeError("not a request's fault")

    with pytest.raises(TypeError, match="not a request's fault"):
        run_virtually(run_open_loop(_plan(10.0, 1.0), Broken(), 1.0))


def test_session_turns_carry_the_dialogue_and_wait_for_the_answer() -> None:
    def script(number: int, body: dict[str, Any], now_s: float) -> Answer:
        return Answer(((now_s + 0.5, chunk(f"answer {number}", 2)), (now_s + 0.6, "[DONE]")))

    sender = ScriptedSender(script)
    session = Session(0, 1.0, system="be short", user_turns=("one", "two"), output_tokens=2, pause_s=3.0)
    run = run_virtually(run_sessions([session], sender, duration_s=2.0))
    first, second = run.records
    assert second.intended_s == pytest.approx(1.0 + 0.6 + 3.0)
    assert (first.turn, second.turn) == (0, 1)
    # The second prompt begins with the first one and its answer; what the first one shares is not known.
    assert (first.shareable_tokens, second.shareable_tokens) == (None, 3)
    assert sender.bodies[1]["messages"] == [
        ("system", "be short"),
        ("user", "one"),
        ("assistant", "answer 0"),
        ("user", "two"),
    ]


def test_a_failed_turn_ends_its_session() -> None:
    sender = ScriptedSender(lambda number, body, now_s: Answer(status=503, body="busy"))
    run = run_virtually(run_sessions([Session(0, 0.0, "", ("one", "two"), 2)], sender, duration_s=1.0))
    assert [record.outcome for record in run.records] == [Outcome.HTTP_ERROR]


@pytest.mark.parametrize("law", ["deterministic", "exponential"])
def test_closed_forms_of_one_server_lie_in_the_intervals(law: Any) -> None:
    """M/D/1 and M/M/1 at 60 % load, eight runs each: about 95 % of the intervals hold the theory's mean response."""
    rate_per_s, mean_s, duration_s = 6.0, 0.1, 250.0
    expected_ms = SingleServerQueue(law, mean_s, seed=0).mean_response_s(rate_per_s) * 1e3
    summaries = []
    for seed in range(8):
        times = arrival_times(ArrivalProcess("poisson", rate_per_s), duration_s, seed)
        sender = ScriptedSender(SingleServerQueue(law, mean_s, seed=100 + seed))
        run = run_virtually(run_open_loop(plan_synthetic(SHAPE, times, seed=0), sender, duration_s))
        summaries.append(summarise(run))
    assert sum(summary.latency_ms.mean.contains(expected_ms) for summary in summaries) >= 6
    assert np.mean([summary.latency_ms.mean.value for summary in summaries]) == pytest.approx(expected_ms, rel=0.1)
    # The intervals say something: a quarter of the value at most.
    assert all(summary.latency_ms.mean.half_width < 0.25 * expected_ms for summary in summaries)
    assert not any(Flag.SATURATED in summary.flags for summary in summaries)
    for summary in summaries:
        # Little's law ties the count in flight to the latency.
        in_flight = summary.offered_per_s * summary.latency_ms.mean.value / 1e3
        assert summary.in_flight.mean == pytest.approx(in_flight, rel=0.1)
