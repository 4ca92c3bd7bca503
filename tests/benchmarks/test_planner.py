"""Plans for numbers whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.planner import CoupledCheck, Split, Verdict, best_split, plan, prefill_per_decode, write_plan
from benchmarks.pool_capacity import TrafficShape, decode_requests_per_s
from deploy.autoscaler.capacity import CapacityModel
from deploy.autoscaler.policy import Policy, Slo
from deploy.autoscaler.policy_file import load_policy

# About an 8B model on a large GPU.
MODEL = CapacityModel(
    c0_ms=5.0,
    c1_ms=0.04,
    c2_ms=1e-6,
    alpha_ms=8.0,
    beta_ms=0.05,
    gamma_ms=5e-5,
    kv_tokens=400_000,
    max_batch=512,
    exposed_transfer_ms=3.0,
)
POLICY = Policy(slo=Slo(ttft_ms=1000.0, itl_ms=30.0))


def test_256_sequences_at_40_ms_and_500_tokens_are_12_8_requests_and_1_28_prefill_workers() -> None:
    x_d = decode_requests_per_s(256, 40.0, 500)
    assert x_d == pytest.approx(12.8)
    # A prefill worker that takes 10 requests a second (100 ms a prompt) matches it at 1.28.
    assert prefill_per_decode(10.0, x_d) == pytest.approx(1.28)


def test_split_balances_the_pools() -> None:
    assert _split(10.0, 20.0, 3) == Split(2, 1, 20.0)
    # A third worker that adds nothing is not taken.
    assert _split(10.0, 10.0, 3).per_worker == 5.0
    four = _split(10.0, 10.0, 5)
    assert (four.prefill, four.decode) == (2, 2)


def _split(x_p: float, x_d: float, max_workers: int) -> Split:
    return best_split(lambda prefill: prefill * x_p, lambda decode: decode * x_d, max_workers)


def test_longer_prompts_want_more_prefill_and_longer_answers_more_decode() -> None:
    ratios = [
        plan(shape, MODEL, POLICY, 16, "test").ratio
        for shape in (TrafficShape(500, 1000), TrafficShape(4000, 250), TrafficShape(8000, 50))
    ]
    assert ratios == sorted(ratios)
    assert ratios[-1] > 10 * ratios[0]


def test_a_cached_prompt_wants_less_prefill() -> None:
    cold, warm = (plan(TrafficShape(8000, 200, hit), MODEL, POLICY, 16, "test").ratio for hit in (0.0, 0.9))
    assert warm < 0.3 * cold


def test_an_objective_below_the_prompts_own_compute_cannot_be_met() -> None:
    impossible = plan(TrafficShape(30_000, 100), MODEL, POLICY, 16, "test")
    assert impossible.verdict is Verdict.INFEASIBLE
    assert "1000 ms" in impossible.reason
    assert impossible.split is None
    too_fast = plan(TrafficShape(100, 100), MODEL, Policy(slo=Slo(ttft_ms=1000.0, itl_ms=5.0)), 16, "test")
    assert too_fast.verdict is Verdict.INFEASIBLE
    assert "ms a token" in too_fast.reason


def test_rt60_aggregated_is_recommended_when_the_control_is_as_good() -> None:
    traffic = TrafficShape(4000, 200)
    disaggregated = plan(traffic, MODEL, POLICY, 8, "test", measured_aggregated_per_s=0.1)
    assert disaggregated.verdict is Verdict.DISAGGREGATE
    assert disaggregated.split is not None
    control = disaggregated.split.per_worker / 1.04
    assert plan(traffic, MODEL, POLICY, 8, "test", control).verdict is Verdict.AGGREGATE
    assert plan(traffic, MODEL, POLICY, 8, "test", control * 1.04 / 1.06).verdict is Verdict.DISAGGREGATE


def test_prediction_error_is_measured_over_predicted_and_corrects_the_split() -> None:
    traffic = TrafficShape(4000, 200)
    made = plan(traffic, MODEL, POLICY, 8, "test", measured_aggregated_per_s=0.1)
    assert made.prediction_error is None
    assert made.split is not None
    checked = plan(traffic, MODEL, POLICY, 8, "test", 0.1, CoupledCheck("1P1D", 5.0, 4.5, 4.2, 4.8))
    assert checked.prediction_error == pytest.approx(-0.1)
    assert checked.warning == ""
    assert checked.split is not None
    assert checked.split.requests_per_s == pytest.approx(0.9 * made.split.requests_per_s)
    off = plan(traffic, MODEL, POLICY, 8, "test", 0.1, CoupledCheck("1P1D", 5.0, 4.0, 3.8, 4.3))
    assert "-20%" in off.warning


def test_a_control_that_carried_nothing_is_said_and_written_as_json(tmp_path: Path) -> None:
    made = plan(TrafficShape(4000, 200), MODEL, POLICY, 8, "test", measured_aggregated_per_s=0.0)
    assert made.gain is None
    assert "at no rate that was tried" in made.reason
    plan_path, _ = write_plan(tmp_path, made, POLICY)
    assert json.loads(plan_path.read_text(), parse_constant=pytest.fail)["gain"] is None


def test_written_plan_and_policy_are_read_by_their_readers(tmp_path: Path) -> None:
    made = plan(TrafficShape(4000, 200), MODEL, POLICY, 8, "sweep of a test", measured_aggregated_per_s=0.1)
    plan_path, policy_path = write_plan(tmp_path, made, POLICY)
    document = json.loads(plan_path.read_text())
    assert document["version"] == 2
    assert document["verdict"] == "disaggregate"
    assert document["provenance"] == "sweep of a test"
    policy = load_policy(policy_path)
    assert policy.slo == POLICY.slo
    assert made.split is not None
    assert policy.budget.replicas == made.split.prefill + made.split.decode


def test_one_worker_cannot_be_two() -> None:
    with pytest.raises(ValueError, match="max_workers is 1"):
        plan(TrafficShape(100, 10), MODEL, POLICY, 1, "test")
