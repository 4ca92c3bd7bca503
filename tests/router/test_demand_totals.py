"""What a router says of the load offered to it."""

from __future__ import annotations

from tandem.v1 import common_pb2

from router.demand_totals import BOUNDS_MS, DECODE_WAIT, ITL, OWN_COMPUTE, DemandTotals


def test_rt49_prompts_count_when_they_arrive_not_when_they_end() -> None:
    demand = DemandTotals()
    demand.arrived(3)
    demand.encoded([10, 20])  # the third one was refused before its length was known
    record = demand.to_record()
    assert (record.prompts_arrived, record.prompts_encoded, record.prompt_tokens_encoded) == (3, 2, 30)
    assert (record.prompts_ended, record.generation_tokens) == (0, 0)


def test_each_token_of_a_step_has_its_share_of_the_gap() -> None:
    demand = DemandTotals()
    demand.step(0.3, 3)
    totals = demand.to_record().latencies[ITL]
    (bucket,) = (index for index, count in enumerate(totals.counts) if count)
    assert totals.counts[bucket] == 3
    assert totals.bounds_ms[bucket - 1] < 100 <= totals.bounds_ms[bucket]


def test_the_parts_of_a_first_token_are_told_apart_and_huge_ones_are_counted() -> None:
    demand = DemandTotals()
    demand.started(common_pb2.Timeline(prefill_compute_us=10**12, decode_wait_us=2000))
    latencies = demand.to_record().latencies
    assert latencies[OWN_COMPUTE].counts[-1] == 1
    assert len(latencies[OWN_COMPUTE].counts) == len(BOUNDS_MS) + 1
    assert sum(latencies[DECODE_WAIT].counts[:-1]) == 1
