"""`/metrics` of all the router processes that share a port: whichever is asked asks the others, and adds up.

Counters, histograms and gauges of load are added up; what all of them see alike is not. A process that does not answer
in time is left out, and `tandem_router_processes` says how many answered. It knows no metric's meaning but that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster import telemetry
from router.router_siblings import RouterSiblings

QUESTION = "metrics"
# Seen by every process alike: the cautious one of their answers.
_SEEN_ALIKE = {
    "tandem_workers": max,
    "tandem_kv_event_silent_workers": max,
    "tandem_redis_up": min,
    "tandem_build_info": max,
    "process_start_time_seconds": min,
}


class SharedMetrics:
    """Owned by the router process."""

    def __init__(self, registry: CollectorRegistry, siblings: RouterSiblings) -> None:
        self._registry = registry
        self._siblings = siblings
        siblings.answer(QUESTION, lambda _: telemetry.exposition(registry))

    async def exposition(self) -> bytes:
        """This process's metrics, with those of the others where there are any."""
        own = telemetry.exposition(self._registry)
        if not self._siblings.are_there:
            return own
        texts = [own, *await self._siblings.ask(QUESTION)]
        return added_up([text.decode() for text in texts])


def added_up(texts: Sequence[str]) -> bytes:
    """One exposition from several."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known = values.setdefault(family.name, {})
            add = _SEEN_ALIKE.get(family.name, _plus)
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                known[key] = add(known[key], sample.value) if key in known else sample.value
    processes = Metric("tandem_router_processes", "router processes whose metrics these are", "gauge")
    processes.add_sample("tandem_router_processes", {}, len(texts))
    return generate_latest(_Collected([*_filled(families, values), processes]))


def _plus(one: float, other: float) -> float:
    return one + other


def _filled(
    families: Mapping[str, Metric], values: Mapping[str, Mapping[tuple[str, tuple[tuple[str, str], ...]], float]]
) -> Iterable[Metric]:
    for name, family in families.items():
        for (sample_name, labels), value in values[name].items():
            family.add_sample(sample_name, dict(labels), value)
        yield family


class _Collected(CollectorRegistry):
    """Families that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
