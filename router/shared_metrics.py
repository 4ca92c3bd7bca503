"""`/metrics` of all the router processes that share a port: whichever is asked asks the others.

    each process ── its own text on RUNTIME_DIR/ROUTER_ID.metrics, a Unix socket ──> the one that was asked: sums

Counters, histograms and gauges of load are added up; what all of them see alike is not. A process that does not answer
in time is left out, and `tandem_router_processes` says how many answered. It knows no metric's meaning but that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster import telemetry

ANSWER_TIMEOUT_S = 1.0
MAX_BYTES = 16 << 20
SUFFIX = ".metrics"
# Seen by every process alike: the cautious one of their answers.
_SEEN_ALIKE = {
    "tandem_workers": max,
    "tandem_kv_event_silent_workers": max,
    "tandem_redis_up": min,
    "process_start_time_seconds": min,
}

_log = logging.getLogger(__name__)


class SharedMetrics:
    """Owned by the router process: `start` where others share its port, later `stop`."""

    def __init__(self, registry: CollectorRegistry, directory: Path, router_id: str) -> None:
        self._registry = registry
        self._path = directory / f"{router_id}{SUFFIX}"
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Raises OSError when the runtime directory takes no socket."""
        self._path.unlink(missing_ok=True)  # a killed one's
        self._server = await asyncio.start_unix_server(self._answer, self._path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
            self._server = None

    async def exposition(self) -> bytes:
        """This process's metrics, with those of the others where there are any."""
        own = telemetry.exposition(self._registry)
        if self._server is None:
            return own
        others = [path for path in sorted(self._path.parent.glob(f"*{SUFFIX}")) if path != self._path]
        answers = await asyncio.gather(*(_ask(path) for path in others))
        texts = [own, *(answer for answer in answers if answer)]
        return added_up([text.decode() for text in texts])

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(telemetry.exposition(self._registry))
        with contextlib.suppress(OSError, TimeoutError):  # the one that asked has gone
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await writer.drain()
        writer.close()


async def _ask(path: Path) -> bytes:
    """Another process's text; nothing when it does not give it in time."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                parts = []
                while part := await reader.read(1 << 16):
                    parts.append(part)
                    if sum(map(len, parts)) > MAX_BYTES:
                        raise OSError(f"it says more than {MAX_BYTES} bytes")
                return b"".join(parts)
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        _log.warning("a router process does not tell its metrics", extra={"peer": path.stem, "reason": str(error)})
        return b""


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
