"""How much of a KV transfer a request waits for, by prompt length: pushed layer by layer, and in bulk.

Two clusters of one real prefill and one real decode process each, alike but for `layer_push`, are asked in turns, one
request at a time, each with a prompt of its own. Exposed is what the decode worker waited from asking for the prompt to
its verified KV, less the queue and compute that the prefill worker reports: both messages' way is in it. A prompt of
one block shows those messages alone; with them, and one layer's bytes at the measured rate, layer-wise may be no later.
"""

from __future__ import annotations

import asyncio
import csv
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.cluster_under_test import started_cluster
from benchmarks.load_run import run_closed_loop
from benchmarks.measurement import RunFailed
from benchmarks.openai_client import Endpoint, OpenAiClient
from benchmarks.workload import LengthLaw, Workload, plan_synthetic

# The default model's context is 8,192 tokens with the answer in it.
PROMPT_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8184)
REQUEST_TIMEOUT_S = 300.0
# Gets every row: a long measurement that is broken off has what it had measured.
Report = Callable[[Sequence["Exposed"]], None]
WAYS = {"layer-wise": True, "bulk": False}


@dataclass(slots=True)
class Exposed:
    """Milliseconds of one prompt length, one for each request."""

    prompt_tokens: int
    kv_bytes: int = 0
    exposed_ms: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    compute_ms: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def median_ms(self, way: str) -> float:
        return statistics.median(self.exposed_ms[way])


def measure_exposed(
    lengths: Sequence[int], num_runs: int, transport: str, folder: Path, report: Report
) -> list[Exposed]:
    """Starts both clusters and asks them in turns; `report` gets all rows after each round.

    Raises `RunFailed` or `ClusterError`.
    """
    with ExitStack() as stack:
        urls = {}
        for way, is_layer_push in WAYS.items():
            config = folder / f"{way}.yaml"
            config.write_text(f"layer_push: {str(is_layer_push).lower()}\ntransports: [{transport}]\n")
            urls[way] = stack.enter_context(started_cluster(["--config", str(config)], folder / f"{way}.log"))
        return asyncio.run(_ask_in_turns(urls, lengths, num_runs, report))


async def _ask_in_turns(urls: dict[str, str], lengths: Sequence[int], num_runs: int, report: Report) -> list[Exposed]:
    rows = [Exposed(num_tokens) for num_tokens in lengths]
    for way, url in urls.items():
        await _ask(url, way, Exposed(64), seed=999)
    for run in range(num_runs):
        for row in rows:
            # Who goes first changes from run to run.
            for way in sorted(urls, reverse=bool(run % 2)):
                await _ask(urls[way], way, row, seed=100 * row.prompt_tokens + run)
        report(rows)
    return rows


async def _ask(url: str, way: str, row: Exposed, seed: int) -> None:
    workload = Workload(LengthLaw(row.prompt_tokens, row.prompt_tokens), LengthLaw(2, 2))
    async with OpenAiClient(Endpoint(url, await _served_model(url)), REQUEST_TIMEOUT_S) as client:
        plan = plan_synthetic(workload, np.zeros(1), seed)
        run = await run_closed_loop(plan, client, 1, num_warmup=0, timeout_s=REQUEST_TIMEOUT_S)
    (record,) = run.records
    if not record.is_ok or record.stages is None or not record.stages.transport:
        raise RunFailed(
            f"{row.prompt_tokens} tokens, {way}: {record.outcome.value} {record.detail or 'not handed over'}"
        )
    row.kv_bytes = record.stages.kv_bytes
    row.exposed_ms[way].append(record.stages.exposed_transfer_ms)
    row.compute_ms[way].append(record.stages.prefill_compute_ms)


async def _served_model(url: str) -> str:
    async with OpenAiClient(Endpoint(url, ""), REQUEST_TIMEOUT_S) as client:
        models = await client.get_json("/v1/models")
    return str(models["data"][0]["id"])


def exposed_table(rows: Sequence[Exposed]) -> str:
    """Medians, and the least and the greatest in brackets."""
    lines = ["| tokens | KV | prefill | exposed, layer-wise | exposed, bulk |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.prompt_tokens:,} | {row.kv_bytes / 1e6:.1f} MB "
        f"| {statistics.median(row.compute_ms['layer-wise']):,.0f} ms "
        f"| {_spread(row.exposed_ms['layer-wise'])} | {_spread(row.exposed_ms['bulk'])} |"
        for row in rows
    ]
    return "\n".join(lines)


def _spread(values_ms: Sequence[float]) -> str:
    return f"{statistics.median(values_ms):.1f} ms [{min(values_ms):.1f} - {max(values_ms):.1f}]"


def write_exposed(rows: Sequence[Exposed], folder: Path) -> None:
    """`exposed_transfer.csv`, `.md` and `.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "exposed_transfer.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt_tokens", "kv_bytes", "way", "exposed_ms", "prefill_compute_ms"])
        for row in rows:
            for way in WAYS:
                for exposed_ms, compute_ms in zip(row.exposed_ms[way], row.compute_ms[way], strict=True):
                    writer.writerow([row.prompt_tokens, row.kv_bytes, way, f"{exposed_ms:.3f}", f"{compute_ms:.3f}"])
    (folder / "exposed_transfer.md").write_text(exposed_table(rows) + "\n")
    _plot(rows, folder / "exposed_transfer.png")


def _plot(rows: Sequence[Exposed], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    lengths = [row.prompt_tokens for row in rows]
    for way in WAYS:
        axes.plot(lengths, [row.median_ms(way) for row in rows], marker="o", label=way)
        axes.fill_between(
            lengths, [min(row.exposed_ms[way]) for row in rows], [max(row.exposed_ms[way]) for row in rows], alpha=0.15
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("exposed transfer [ms]")
    axes.legend()
    figure.savefig(path, dpi=150)
