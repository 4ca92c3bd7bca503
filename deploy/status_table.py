"""`tandem status`: what `/statusz` says, as tables. Knows the field names of `tandem.v1.WorkerStatus`, no more."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Status = Mapping[str, Any]

_ORDER = ("prefill", "decode", "aggregated")
_NO_FALLBACK = dict.fromkeys(("component", "used", "wanted", "reason"), "")
DRAFTER_STEPS = re.compile(r"speculation_([a-z]+)_steps")


def status_tables(status: Status) -> Group:
    """Pools with load and block conservation; ranks, kernels, drafts, second choices that were taken, and KV links."""
    workers = sorted(status.get("workers", ()), key=_place)
    parts: list[RenderableType] = [_headline(status, workers), _workers(workers)]
    parts += [
        table
        for table in (
            _ranks(workers),
            _kernels(workers),
            _speculation(workers),
            _tiers(workers),
            _fallbacks(status, workers),
            _links(workers),
        )
        if table.row_count
    ]
    return Group(*parts)


def fallback_lines(status: Status) -> list[str]:
    """Second choices that were taken, a line for each with all the workers that took it."""
    where_by_text: dict[str, list[str]] = {}
    for where, fallback in _all_fallbacks(status, sorted(status.get("workers", ()), key=_place)):
        text = "{component} {used} instead of {wanted}: {reason}".format_map({**_NO_FALLBACK, **fallback})
        where_by_text.setdefault(text, []).append(where)
    return [f"{', '.join(where)}: {text}" for text, where in where_by_text.items()]


def _place(worker: Status) -> tuple[int, str, int, str]:
    """Prefill first, as a request's way goes; decode-10 after decode-9."""
    role, name = str(worker["role"]), str(worker["worker_id"])
    number = name.rpartition("-")[2]
    return _ORDER.index(role) if role in _ORDER else len(_ORDER), role, int(number) if number.isdigit() else 0, name


def conservation_errors(status: Status) -> list[str]:
    """Workers that lost count of their blocks; empty as long as all is well."""
    return [
        f"{worker['worker_id']}: {worker['block_conservation_error']} blocks are unaccounted for"
        for worker in status.get("workers", ())
        if int(worker.get("block_conservation_error", 0)) != 0
    ]


def _headline(status: Status, workers: list[Status]) -> Text:
    roles = [str(worker["role"]) for worker in workers]
    pools = " + ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles)) or "no workers"
    blocks = [int(worker.get("block_conservation_error", 0)) for worker in workers]
    parts = [str(status.get("model", "no model")), pools]
    parts += ["some KV blocks are lost" if any(blocks) else "all KV blocks accounted for"] if blocks else []
    return Text(" · ".join(parts), style="bold red" if any(blocks) else "bold")


def _workers(workers: list[Status]) -> Table:
    """Narrow enough for a terminal of 80 columns; what is wrong with blocks has its column only where something is."""
    quarantined = [int(worker.get("load", {}).get("quarantined_blocks", 0)) for worker in workers]
    lost = [int(worker.get("block_conservation_error", 0)) for worker in workers]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("worker", "role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("run+wait", "KV used", "step ms", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    if any(quarantined):  # quarantined: a silent peer may still write to these
        table.add_column("unsafe", justify="right", no_wrap=True)
    if any(lost):
        table.add_column("lost", justify="right", style="bold red", no_wrap=True)
    for worker, num_quarantined, num_lost in zip(workers, quarantined, lost, strict=True):
        load = worker.get("load", {})
        table.add_row(
            str(worker["worker_id"]),
            str(worker["role"]),
            _state(worker),
            f"{load.get('running_requests', 0)}+{load.get('waiting_requests', 0)}",
            _usage(load),
            f"{float(load.get('step_ms', 0)):.1f}",
            f"{float(load.get('tokens_per_s', 0)):.1f}",
            *([str(num_quarantined)] if any(quarantined) else []),
            *([str(num_lost)] if any(lost) else []),
        )
    return table


def _state(worker: Status) -> Text:
    load = worker.get("load", {})
    if load.get("draining"):
        return Text("draining", style="yellow")
    if load.get("admission_stopped"):
        return Text("stopped", style="red")  # admission, until quarantined blocks are back
    state = str(worker.get("state", "ready"))
    return Text(state, style="green" if state == "ready" else "yellow")


def _usage(load: Status) -> str:
    total, free = int(load.get("total_blocks", 0)), int(load.get("free_blocks", 0))
    return f"{(total - free) / total:.0%} of {total}" if total else "-"


def _ranks(workers: list[Status]) -> Table:
    """Workers whose model is shared by several processes."""
    table = Table(title="tensor parallel", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("worker", "ranks", "processes"):
        table.add_column(name)
    for worker in workers:
        details = worker.get("details", {})
        if "tensor_parallel" in details:
            table.add_row(str(worker["worker_id"]), str(details["tensor_parallel"]), str(details["rank_pids"]))
    return table


def _kernels(workers: list[Status]) -> Table:
    """What the native engine's kernels run on and how the weights lie in memory."""
    table = Table(title="kernels", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("worker", "backend", "instructions", "weights", "MB", "huge pages"):
        table.add_column(name, no_wrap=True)
    for worker in workers:
        details = worker.get("details", {})
        if "isa" not in details:
            continue
        size, huge = int(details.get("weight_bytes", 0)), int(details.get("weight_bytes_on_huge_pages", 0))
        table.add_row(
            str(worker["worker_id"]),
            str(details.get("backend", "")),
            str(details["isa"]),
            str(details.get("weights", "")).lower().replace("_compressed", ", compressed"),
            f"{size / 1e6:.0f}",
            f"{min(1.0, huge / size):.0%}" if size else "-",
        )
    return table


def _speculation(workers: list[Status]) -> Table:
    """How often a guess held, by its distance from the last known token; of all drafters and of each."""
    table = Table(title="speculation", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("worker", "drafter", "steps", "tokens/step", "accepted at 1, 2, ...", "no draft"):
        table.add_column(name)
    for worker in workers:
        counters = {name: float(value) for name, value in worker.get("counters", {}).items()}
        if "speculation_steps" not in counters:
            continue
        reasons = ", ".join(_no_draft(counters)) or "-"
        table.add_row(str(worker["worker_id"]), "all", *_acceptance(counters, "speculation"), reasons)
        for name in counters:
            if drafter := DRAFTER_STEPS.fullmatch(name):
                table.add_row("", drafter[1], *_acceptance(counters, f"speculation_{drafter[1]}"), "")
    return table


def _acceptance(counters: Mapping[str, float], prefix: str) -> tuple[str, str, str]:
    """Verified steps, tokens of one, and the share of guesses that held at each position."""
    num_steps = counters[f"{prefix}_steps"]
    shares: list[str] = []
    num_accepted = 0.0
    while num_proposed := counters.get(f"{prefix}_proposed_at_{len(shares) + 1}", 0.0):
        accepted_here = counters.get(f"{prefix}_accepted_at_{len(shares) + 1}", 0.0)
        num_accepted += accepted_here
        shares.append(f"{accepted_here / num_proposed:.2f}")
    return f"{num_steps:.0f}", f"{1 + num_accepted / num_steps:.2f}" if num_steps else "-", " ".join(shares) or "-"


def _no_draft(counters: Mapping[str, float]) -> Iterator[str]:
    """The reasons that occurred, the most frequent first."""
    prefix = "speculation_no_draft_"
    reasons = [(count, name.removeprefix(prefix)) for name, count in counters.items() if name.startswith(prefix)]
    for count, reason in sorted(reasons, reverse=True):
        if count:
            yield f"{reason.replace('_', ' ')} {count:.0f}"


def _tiers(workers: list[Status]) -> Table:
    """What lies below the pools, and how much came back from there instead of being computed."""
    table = Table(title="KV tiers", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("worker", "tier", "GB", "of", "hits", "restored", "ms/block", "lost", "state"):
        table.add_column(name, justify="left" if name in ("worker", "tier", "state") else "right")
    for worker in workers:
        counters = {name: float(value) for name, value in worker.get("counters", {}).items()}
        for tier in ("host", "disk"):
            capacity = counters.get(f"kv_tier_{tier}_capacity_bytes")
            if capacity is None:
                continue
            hits, misses = counters[f"kv_tier_{tier}_hits"], counters[f"kv_tier_{tier}_misses"]
            table.add_row(
                str(worker["worker_id"]),
                tier,
                f"{counters[f'kv_tier_{tier}_bytes'] / 1e9:.2f}",
                f"{capacity / 1e9:.2f}",
                f"{hits / (hits + misses):.0%}" if hits + misses else "-",
                f"{counters.get(f'kv_tier_restored_blocks_from_{tier}', 0.0):.0f}",
                f"{counters.get(f'kv_tier_{tier}_ms_per_block', 0.0):.2f}",
                f"{counters.get('kv_tier_evicted_lost_blocks', 0.0):.0f}" if tier == "host" else "",
                str(worker.get("details", {}).get(f"kv_tier_{tier}_disabled", "ready")),
            )
    return table


def _fallbacks(status: Status, workers: list[Status]) -> Table:
    table = Table(title="fallbacks", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("where", "component", "wanted", "used", "times", "reason"):
        table.add_column(name)
    for where, fallback in _all_fallbacks(status, workers):
        row = [str(fallback.get(key, "")) for key in ("component", "wanted", "used", "count", "reason")]
        table.add_row(where, *row)
    return table


def _all_fallbacks(status: Status, workers: list[Status]) -> Iterator[tuple[str, Status]]:
    for fallback in status.get("fallbacks", ()):
        yield "router", fallback
    for worker in workers:
        for fallback in worker.get("fallbacks", ()):
            yield str(worker["worker_id"]), fallback


def _links(workers: list[Status]) -> Table:
    """Each once, as both ends tell of it; twice where they do not agree."""
    table = Table(title="KV links", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("between", "and", "transport", "GB/s", "state", "why"):
        table.add_column(name)
    seen = set()
    for worker in workers:
        for peer in worker.get("peers", ()):
            ends = str(worker["worker_id"]), str(peer.get("worker_id", ""))
            transport, state = str(peer.get("transport", "")), str(peer.get("state", ""))
            if (key := (frozenset(ends), transport, state)) in seen:
                continue
            seen.add(key)
            speed = float(peer.get("measured_gb_per_s", 0))
            table.add_row(*ends, transport, f"{speed:.1f}" if speed else "-", state, str(peer.get("reason", "")))
    return table
