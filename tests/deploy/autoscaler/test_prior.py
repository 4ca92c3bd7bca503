"""A plan beside the policy is the autoscaler's prior; anything else of that name is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.planner import plan, write_plan
from benchmarks.pool_capacity import TrafficShape
from cluster.errors import StartupError
from deploy.autoscaled_pools import AutoscaledPools
from deploy.autoscaler.policy import Policy
from deploy.autoscaler.prior import planned_model
from deploy.cluster_plan import plan_cluster
from deploy.config import ClusterConfig, RouterConfig
from tests.deploy.autoscaler.fleet import MODEL


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    """As `tandem plan --out` leaves it, with its plan beside it."""
    policy = Policy()
    write_plan(tmp_path, plan(TrafficShape(1000.0, 100.0, 0.0), MODEL, policy, 8, "a test"), policy)
    return tmp_path / "policy.yaml"


def test_the_plan_beside_the_policy_is_the_prior(policy_file: Path, runtime_dir: Path) -> None:
    assert planned_model(policy_file) == MODEL
    config = ClusterConfig(router=RouterConfig(port=0), autoscale=policy_file)
    cluster_plan = plan_cluster(config, Path("/models/m.gguf"), runtime_dir)
    pools = AutoscaledPools.of(config, cluster_plan, "c-1")
    assert pools is not None
    assert pools.prior == MODEL
    (policy_file.parent / "pd_plan.json").unlink()
    without = AutoscaledPools.of(config, cluster_plan, "c-1")
    assert without is not None
    assert without.prior != MODEL


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", json.dumps({"schema": "tandem.pd_plan"}), json.dumps({"schema": "other", "model": asdict(MODEL)}),
     json.dumps({"schema": "tandem.pd_plan", "model": {**asdict(MODEL), "c1_ms": "fast"}})],
)  # fmt: skip
def test_a_file_of_that_name_that_is_no_plan_is_refused(policy_file: Path, text: str) -> None:
    (policy_file.parent / "pd_plan.json").write_text(text)
    with pytest.raises(StartupError, match=r"pd_plan\.json is no plan"):
        planned_model(policy_file)
