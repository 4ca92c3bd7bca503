"""Running totals of routers become the load of the last ticks, whatever routers come and go."""

from __future__ import annotations

import pytest
from tandem.v1 import membership_pb2

from deploy.autoscaler.offered_load import DEFAULT_OUTPUT_TOKENS, LoadMeter
from deploy.autoscaler.signals import TtftStage


def record(router_id: str = "router-0", incarnation: str = "a", **totals: int) -> membership_pb2.RouterRecord:
    return membership_pb2.RouterRecord(router_id=router_id, incarnation=incarnation, **totals)  # type: ignore[arg-type]


def test_arrivals_refused_ones_included_make_the_rate_and_encoded_ones_the_length() -> None:
    meter = LoadMeter()
    assert meter.read(0.0, 15.0, [record(prompts_arrived=100)]) is None
    now = record(prompts_arrived=150, prompts_encoded=20, prompt_tokens_encoded=10_000, waiting_requests=3)
    load = meter.read(5.0, 15.0, [now])
    assert load is not None
    assert load.demand.requests_per_s == 10
    assert load.demand.uncached_tokens_per_request == 500
    assert load.demand.output_tokens_per_request == DEFAULT_OUTPUT_TOKENS
    assert load.demand.queued_requests == 3


def test_what_caches_held_is_taken_from_the_prompts_that_ended() -> None:
    meter = LoadMeter()
    meter.read(0.0, 15.0, [record()])
    now = record(
        prompts_encoded=4,
        prompt_tokens_encoded=4000,
        prompts_ended=2,
        prompt_tokens_ended=2000,
        cached_tokens_ended=1500,
        generation_tokens=80,
    )
    load = meter.read(5.0, 15.0, [now])
    assert load is not None
    demand = load.demand
    assert (demand.uncached_tokens_per_request, demand.cached_tokens_per_request) == (250, 750)
    assert demand.output_tokens_per_request == 40


def test_a_rate_is_over_the_routers_own_clock_whenever_it_is_read() -> None:
    """Ten requests a second, written every second; the reader comes just before a heartbeat, then just after one."""
    meter = LoadMeter()
    meter.read(0.9, 3.0, [record(clock_ms=50_000, prompts_arrived=0)])
    load = meter.read(3.0, 3.0, [record(clock_ms=53_000, prompts_arrived=30)])
    assert load is not None
    assert load.demand.requests_per_s == pytest.approx(10)
    same = meter.read(3.5, 3.0, [record(clock_ms=53_000, prompts_arrived=30)])
    assert same is not None
    assert same.demand.requests_per_s == pytest.approx(10)


def test_only_the_window_counts() -> None:
    meter = LoadMeter()
    for tick in range(10):
        load = meter.read(5.0 * tick, 15.0, [record(prompts_arrived=1000 if tick < 5 else 1000 + tick)])
    assert load is not None
    assert load.demand.requests_per_s == pytest.approx(3 / 15)


def test_a_restarted_router_starts_its_totals_anew_and_no_rate_is_negative() -> None:
    meter = LoadMeter()
    meter.read(0.0, 5.0, [record(prompts_arrived=1000)])
    load = meter.read(5.0, 5.0, [record(incarnation="b", prompts_arrived=10)])
    assert load is not None
    assert load.demand.requests_per_s == 2


def test_two_routers_are_added() -> None:
    meter = LoadMeter()
    meter.read(0.0, 5.0, [record(), record("router-1")])
    load = meter.read(5.0, 5.0, [record(prompts_arrived=10), record("router-1", prompts_arrived=15)])
    assert load is not None
    assert load.demand.requests_per_s == 5


def test_lengths_stay_known_while_nothing_arrives() -> None:
    meter = LoadMeter()
    meter.read(0.0, 5.0, [record()])
    busy = record(prompts_arrived=1, prompts_encoded=1, prompt_tokens_encoded=300)
    meter.read(5.0, 5.0, [busy])
    load = meter.read(10.0, 5.0, [busy])
    assert load is not None
    assert (load.demand.requests_per_s, load.demand.uncached_tokens_per_request) == (0, 300)


def test_percentiles_are_those_of_the_window_over_all_routers() -> None:
    def with_queue(counts: list[int]) -> membership_pb2.RouterRecord:
        totals = membership_pb2.LatencyTotals(bounds_ms=[10, 100, 1000], counts=counts)
        return membership_pb2.RouterRecord(router_id="r", latencies={"prefill_queue": totals})

    meter = LoadMeter()
    meter.read(0.0, 5.0, [with_queue([0, 0, 50, 0])])
    load = meter.read(5.0, 5.0, [with_queue([80, 15, 55, 0])])
    assert load is not None
    assert load.ttft_p90_ms == {TtftStage.PREFILL_QUEUE: 100}
    beyond = meter.read(10.0, 5.0, [with_queue([80, 15, 55, 9])])
    assert beyond is not None
    assert beyond.ttft_p90_ms == {TtftStage.PREFILL_QUEUE: 2000}
