"""Metric names are the ones dashboards know, and two registries do not meet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tandem.v1 import worker_pb2

from cluster.telemetry import RouterMetrics, WorkerMetrics, exposition, new_registry
from cluster.worker_counters import WorkerCounters

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name",
    ["tandem_num_requests_running", "tandem_num_requests_waiting", "tandem_prompt_tokens_total",
     "tandem_generation_tokens_total", "tandem_time_to_first_token_seconds", "tandem_inter_token_latency_seconds",
     "tandem_e2e_request_latency_seconds", "tandem_request_success_total", "tandem_prefix_cache_hits_total"],
)  # fmt: skip
def test_router_metrics_have_the_names_that_dashboards_use(name: str) -> None:
    registry = new_registry()
    RouterMetrics(registry)
    assert f"# TYPE {name} " in exposition(registry).decode()


def test_worker_metrics_carry_model_and_worker() -> None:
    registry = new_registry()
    metrics = WorkerMetrics(registry, "m", "decode-0")
    metrics.kv_cache_usage.set(0.25)
    metrics.block_conservation_error.set(0)
    text = exposition(registry).decode()
    assert 'tandem_kv_cache_usage_perc{model="m",worker_id="decode-0"} 0.25' in text
    assert 'tandem_block_conservation_error{model="m",worker_id="decode-0"} 0.0' in text
    assert "process_resident_memory_bytes" in text


def test_kv40_a_link_is_shown_with_its_speed_and_why_it_was_chosen_and_only_while_it_is_there() -> None:
    registry = new_registry()
    metrics = WorkerMetrics(registry, "m", "decode-0")
    reason = "auto among shm 8.00, tcp 3.00 GB/s (same host)"
    link = worker_pb2.PeerStatus(
        worker_id="prefill-0", transport="shm", measured_gb_per_s=8.0, state="ready", reason=reason
    )
    metrics.show_links([link, worker_pb2.PeerStatus(worker_id="prefill-1", state="refused", reason="x" * 1000)])
    text = exposition(registry).decode()
    chosen = f'model="m",peer="prefill-0",reason="{reason}",state="ready",transport="shm",worker_id="decode-0"'
    assert f"tandem_kv_link_info{{{chosen}}} 1.0" in text
    assert f'peer="prefill-1",reason="{"x" * 256}",state="refused",transport=""' in text
    assert text.count("tandem_kv_link_bytes_per_second{") == 1
    metrics.show_links([])
    assert "tandem_kv_link_info{" not in exposition(registry).decode()


def test_two_routers_in_one_process_do_not_share_metrics() -> None:
    first, second = new_registry(), new_registry()
    RouterMetrics(first).redis_up.set(1)
    RouterMetrics(second)
    assert "tandem_redis_up 1.0" in exposition(first).decode()
    assert "tandem_redis_up 0.0" in exposition(second).decode()


def test_an_engines_totals_become_counters_once() -> None:
    registry = new_registry()
    counters = WorkerCounters(WorkerMetrics(registry, "m", "decode-0"))
    totals = {
        "preemptions": 2.0,
        "preemptions_swapped": 1.0,
        "speculation_steps": 5.0,
        "speculation_drafts_proposed": 9.0,
        "speculation_proposed_at_1": 5.0,
        "speculation_eagle_steps": 4.0,
        "speculation_eagle_proposed_at_1": 4.0,
        "speculation_ngram_accepted_at_2": 1.0,
        "speculation_no_draft_no_match": 3.0,
    }
    for factor in (1, 1, 2):
        counters.show_engine({name: factor * total for name, total in totals.items()})
    text = exposition(registry).decode()
    labels = 'model="m",{}worker_id="decode-0"'
    assert f"tandem_num_preemptions_total{{{labels.format('')}}} 4.0" in text
    assert f"tandem_spec_decode_num_drafts_total{{{labels.format('')}}} 10.0" in text
    per_position = "tandem_spec_decode_draft_tokens_per_pos_total"
    assert (
        f'{per_position}{{drafter="eagle",model="m",outcome="proposed",position="1",worker_id="decode-0"}} 8.0' in text
    )
    assert (
        f'{per_position}{{drafter="ngram",model="m",outcome="accepted",position="2",worker_id="decode-0"}} 2.0' in text
    )
    assert 'tandem_spec_decode_no_draft_total{model="m",reason="no_match",worker_id="decode-0"} 6.0' in text


def test_lower_tiers_have_their_totals_by_tier_and_gauges_of_what_they_hold() -> None:
    registry = new_registry()
    counters = WorkerCounters(WorkerMetrics(registry, "m", "prefill-0"))
    for hits in (3.0, 5.0):
        counters.show_engine(
            {
                "kv_tier_host_hits": hits,
                "kv_tier_host_bytes": 7.0,
                "kv_tier_host_capacity_bytes": 100.0,
                "kv_tier_restores": 1.0,
                "kv_tier_unsaved_blocks": 2.0,
            }
        )
    text = exposition(registry).decode()
    assert 'tandem_kv_tier_hits_total{model="m",tier="host",worker_id="prefill-0"} 5.0' in text
    assert 'tandem_kv_tier_bytes{model="m",tier="host",worker_id="prefill-0"} 7.0' in text
    assert 'tandem_kv_tier_restores_total{model="m",worker_id="prefill-0"} 1.0' in text
    assert "unsaved" not in text
    assert 'tier="disk"' not in text


def test_what_the_engine_sums_is_counted_once_however_often_it_is_shown() -> None:
    registry = new_registry()
    counters = WorkerCounters(WorkerMetrics(registry, "m", "decode-0"))
    for steps in (3, 3, 5):
        counters.show_engine({"iterations": steps, "iteration_seconds": steps / 4, "iteration_tokens": 10 * steps})
    text = exposition(registry).decode()
    for name, total in (("iterations", 5.0), ("iteration_seconds", 1.25), ("iteration_tokens", 50.0)):
        assert f'tandem_{name}_total{{model="m",worker_id="decode-0"}} {total}' in text


def test_no_metric_is_declared_that_nothing_feeds() -> None:
    folders = ("cluster", "router", "prefill_worker", "decode_worker")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    text = re.sub(r"self\.\w+ = ", "", "\n".join(path.read_text() for path in paths))
    declared = {
        *vars(RouterMetrics(new_registry())),
        *(name for name in vars(WorkerMetrics(new_registry(), "m", "w")) if not name.startswith("_")),
    }
    assert len(declared) > 40
    assert [name for name in sorted(declared) if re.search(rf"\.{name}\b", text) is None] == []
