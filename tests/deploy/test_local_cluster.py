"""Which processes a cluster has that is taken over: the plan's, or what the autoscaler has made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cluster_plan import plan_cluster
from deploy.config import ClusterConfig, PoolConfig, RouterConfig
from deploy.local_cluster import processes_of

MODEL = Path("/models/SmolLM2-135M-Instruct.Q4_1.gguf")
PLANNED = ["redis", "prefill-0", "prefill-1", "decode-0", "decode-1", "router-0"]
TWO = PoolConfig(workers=2)


@pytest.mark.parametrize(
    ("running", "wanted"),
    [
        ([], PLANNED),
        (PLANNED, PLANNED),
        # Decode grew, prefill shrank, one role changed.
        (["redis", "router-0", "prefill-1", "decode-0", "decode-1", "decode-2"],
         ["redis", "prefill-1", "decode-0", "decode-1", "router-0", "decode-2"]),
        # Nobody prefills any more, and Redis is gone: what the plan has of it starts.
        (["router-0", "decode-7"], ["redis", "prefill-0", "prefill-1", "router-0", "decode-7"]),
    ],
)  # fmt: skip
def test_an_autoscaled_cluster_goes_on_with_the_workers_that_it_has(
    runtime_dir: Path, running: list[str], wanted: list[str]
) -> None:
    config = ClusterConfig(prefill=TWO, decode=TWO, router=RouterConfig(port=0), autoscale=Path("policy.yaml"))
    plan = plan_cluster(config, MODEL, runtime_dir)
    assert [spec.name for spec in processes_of(config, plan, frozenset(running))] == wanted


def test_a_cluster_of_a_fixed_size_has_the_plans_processes_whatever_runs(runtime_dir: Path) -> None:
    config = ClusterConfig(prefill=TWO, decode=TWO, router=RouterConfig(port=0))
    plan = plan_cluster(config, MODEL, runtime_dir)
    assert [spec.name for spec in processes_of(config, plan, frozenset({"router-0", "decode-1"}))] == PLANNED
