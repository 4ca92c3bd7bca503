"""The shipped dashboard asks for nothing that no process exports, and the other shipped files fit the code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from cluster.telemetry import RouterMetrics, WorkerMetrics, exposition, new_registry
from deploy.cluster_plan import plan_cluster
from deploy.config import DEFAULT_CLUSTER_FILE, ClusterConfig, PoolConfig, RouterConfig, load_cluster_config

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "dashboards" / "tandem.json").read_text())
METRIC = re.compile(r"\b((?:tandem|process)_[a-z0-9_]+)")
PROMETHEUS_LABELS = {"le", "job", "instance"}


def expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def exported() -> dict[str, set[str]]:
    """Every sample name of a router and a worker, with the labels that it can have."""
    names: dict[str, set[str]] = {}
    router, worker = new_registry(), new_registry()
    RouterMetrics(router)
    WorkerMetrics(worker, "model", "decode-0")
    for registry in (router, worker):
        for family in text_string_to_metric_families(exposition(registry).decode()):
            for suffix in _suffixes(family.type):
                names.setdefault(family.name + suffix, set()).update(_labels(registry, family.name))
    return names


def _suffixes(kind: str) -> tuple[str, ...]:
    return {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(kind, ("",))


def _labels(registry: CollectorRegistry, family: str) -> tuple[str, ...]:
    collectors = registry._names_to_collectors  # the only place where a metric without samples keeps its labels
    return getattr(collectors.get(family), "_labelnames", ())


def test_every_metric_in_the_documents_exists() -> None:
    known = {name.removesuffix(suffix) for name in exported() for suffix in ("", "_bucket")}
    written = set(METRIC.findall((DEPLOY.parent / "docs" / "api.md").read_text()))
    assert len(written) > 15
    assert written <= known


@pytest.mark.parametrize(("title", "expression"), list(expressions()), ids=lambda value: value[:24])
def test_every_metric_of_a_panel_is_exported_with_the_labels_it_is_grouped_by(title: str, expression: str) -> None:
    known = exported()
    metrics = METRIC.findall(expression)
    assert metrics, title
    for metric in metrics:
        assert metric in known, f"{title}: {metric}"
    labels = set().union(*(known[metric] for metric in metrics)) | PROMETHEUS_LABELS
    for group in re.findall(r"by \(([^)]*)\)", expression):
        assert {label.strip() for label in group.split(",")} <= labels, f"{title}: {group}"


def test_panels_have_titles_units_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["title"] for panel in panels}) == len(panels) > 20
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)


def test_the_scrape_configuration_names_the_ports_that_workers_serve(runtime_dir: Path) -> None:
    scraped = yaml.safe_load((DEPLOY / "dashboards" / "prometheus.yml").read_text())
    targets = {
        target for job in scraped["scrape_configs"] for one in job["static_configs"] for target in one["targets"]
    }
    pools = PoolConfig(workers=4)
    config = ClusterConfig(prefill=pools, decode=pools, router=RouterConfig(port=0), worker_metrics_port=9100)
    plan = plan_cluster(config, Path("/models/m.gguf"), runtime_dir)
    ports = {word.partition("=")[2] for spec in plan.processes for word in spec.command if "metrics-port" in word}
    assert len(ports) == 8
    router_port = load_cluster_config(DEFAULT_CLUSTER_FILE).router.port
    assert {f"127.0.0.1:{port}" for port in (*ports, router_port)} == targets


@pytest.mark.parametrize("path", sorted((DEPLOY / "clusters").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_cluster_files_load(path: Path) -> None:
    assert load_cluster_config(path).decode.workers >= 1
