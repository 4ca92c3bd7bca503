"""What the autoscaler does to real processes, one judged line for each claim. `python -m benchmarks.live_scaling`

    swing    prompts grow prefill alone, answers grow decode while prefill shrinks
    step     from 1x to 4x: settled within three start-up times, at most one replica too many
    steady   80 % of what the pool carries changes nothing
    outage   Redis stands still for seconds: nothing is started or stopped, under load and after it
    idle     back to the minimum
    replay   the recorded run, decided again, gives the same decisions
    clients  no answer was refused or cut short, over all of it

`tandem serve --engine mock --autoscale`: processes, router, Redis, drains and decisions are real, minutes of policy are
seconds. Takes some three minutes. Ends with status 1 if a line says FAILED. Half an hour of steady load, flapping and
long outages are tested on a virtual clock (`tests/deploy/autoscaler`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks.cluster_under_test import started_cluster
from cluster.model_files import DEFAULT_MODEL, resolve_model
from deploy.autoscaler.decide import Action
from deploy.autoscaler.journal import EventEntry, TickEntry, read_journal
from deploy.autoscaler.replay import replay
from deploy.autoscaler.signals import Pool

POLICY = """\
version: 1
name: live
tick_s: 1.0
start_timeout_s: 60.0
slo: {ttft_ms: 1500.0, itl_ms: 60.0}
prefill: {min: 1, max: 8}
decode: {min: 1, max: 4}
scale_up: {ticks: 2, of_ticks: 3, max_step: 1.0}
scale_down: {window_s: 8.0, cooldown_s: 2.0, after_up_s: 4.0}
forecast: {horizon_s: 8.0}
"""
# A worker reads 400 tokens in 200 ms, and gives 8 sequences a token each in 24 ms.
CLUSTER = """\
model: {model}
engine: mock
mock_prefill_ms: [0.0, 0.5, 0.0]
mock_decode_ms: [20.0, 0.5, 0.0]
decode: {{max_sequences: 8}}
drain_timeout_s: 3
autoscale: {policy}
"""
ANSWER_TIMEOUT_S = 180.0
SETTLE_TIMEOUT_S = 60.0
OUTAGE_S = 12.0


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of traffic."""

    prompt_tokens: int
    output_tokens: int
    requests_per_s: float


PROMPTS = Shape(400, 4, 8.0)  # 1.6 busy prefill workers, 0.1 decode
ANSWERS = Shape(20, 100, 6.0)  # 0.06 busy prefill workers, 1.8 decode
ONCE = Shape(400, 4, 3.6)  # 80 % of what one prefill worker may carry at a utilisation of 0.9
FOUR_TIMES = Shape(400, 4, 14.4)


@dataclass(slots=True)
class Run:
    """One cluster with its traffic and its journal."""

    client: httpx.AsyncClient
    model: str
    journal: Path
    answers: list[asyncio.Task[str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def judge(self, name: str, is_met: bool, seen: str) -> None:
        sys.stdout.write(f"{'ok    ' if is_met else 'FAILED'} {name:<8} {seen}\n")
        sys.stdout.flush()
        if not is_met:
            self.failures.append(name)

    def ticks(self, after: int = 0) -> list[TickEntry]:
        return [entry for entry in read_journal(self.journal) if isinstance(entry, TickEntry)][after:]

    def sizes(self) -> tuple[int, int]:
        """Prefill and decode workers at the last tick, starting ones included."""
        last = self.ticks()[-1].decision
        return last.prefill.current, last.decode.current

    def ready(self) -> tuple[int, int]:
        """Those that serve."""
        last = self.ticks()[-1].snapshot
        return len(last.prefill.ready), len(last.decode.ready)

    async def offer(self, shape: Shape, seconds: float, is_over: Callable[[], bool] = lambda: False) -> float:
        """Sends at an even pace until the time is over or `is_over`; the seconds it took."""
        started_s = time.monotonic()
        for number in itertools.count():
            due_s = started_s + number / shape.requests_per_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            now_s = time.monotonic()
            if now_s - started_s > seconds or (number % max(1, int(shape.requests_per_s)) == 0 and is_over()):
                return now_s - started_s
            self.answers.append(asyncio.create_task(self._ask(shape, len(self.answers))))
        raise AssertionError("never reached: the count has no end")

    async def _ask(self, shape: Shape, number: int) -> str:
        """Empty for an answer that came whole, else what was wrong with it."""
        prompt = [(31 * number + 7 * index) % 40_000 + 1 for index in range(shape.prompt_tokens)]
        body = {"model": self.model, "prompt": prompt, "max_tokens": shape.output_tokens, "ignore_eos": True}
        reason, last = None, ""
        try:
            async with self.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                async for last in answer.aiter_lines():
                    if last.startswith("data: {"):
                        choices = json.loads(last.removeprefix("data: ")).get("choices") or [{}]
                        reason = choices[0].get("finish_reason") or reason
        except httpx.TransportError as error:
            return f"{type(error).__name__}: {error}"
        is_whole = answer.status_code == httpx.codes.OK and reason == "length"
        return "" if is_whole else f"{answer.status_code} {reason or last}"


async def _swing(run: Run) -> None:
    took_s = await run.offer(PROMPTS, SETTLE_TIMEOUT_S, lambda: run.ready() == (2, 1))
    run.judge("swing", run.ready() == (2, 1), f"prompts: {run.ready()} prefill and decode workers after {took_s:.0f} s")
    took_s = await run.offer(ANSWERS, SETTLE_TIMEOUT_S, lambda: run.ready() == (1, 2))
    run.judge("swing", run.ready() == (1, 2), f"answers: {run.ready()} after {took_s:.0f} s")


async def _step(run: Run) -> None:
    await run.offer(ONCE, 20.0, lambda: False)
    before, at_step = run.sizes()[0], len(run.ticks())
    await run.offer(FOUR_TIMES, 45.0)
    ticks = run.ticks(at_step)
    counts = [tick.decision.prefill.current for tick in ticks]
    enough = next(one.decision.prefill for one in reversed(ticks) if one.decision.prefill.action is Action.HOLD)
    start_up_s = _slowest_start(run)
    ready = [len(tick.snapshot.prefill.ready) for tick in ticks]
    settled = next((index for index, count in enumerate(ready) if count >= enough.wish), None)
    settled_s = None if settled is None else ticks[settled].snapshot.now_s - ticks[0].snapshot.now_s
    run.judge(
        "step",
        settled_s is not None and settled_s <= 3 * start_up_s and max(counts) <= enough.wish + 1,
        f"{before} to {enough.wish} prefill workers wanted: ready after "
        f"{'never' if settled_s is None else f'{settled_s:.1f} s'} (a start takes up to {start_up_s:.1f} s), "
        f"at most {max(counts)} ({counts})",
    )


async def _steady(run: Run, seconds: float) -> None:
    await run.offer(ONCE, SETTLE_TIMEOUT_S, lambda: run.ready() == (1, 1))
    await run.offer(ONCE, 10.0)
    before = len(run.ticks())
    await run.offer(ONCE, seconds)
    ticks = run.ticks(before)
    changes = _changes(ticks)
    run.judge("steady", not changes, f"{len(ticks)} ticks at 80 %: {len(changes)} changes {changes or ''}")


async def _outage(run: Run) -> None:
    redis = next(
        child for child in psutil.Process().children(recursive=True) if child.name().startswith("valkey-server")
    )
    before = len(run.ticks())
    redis.suspend()
    try:
        await run.offer(FOUR_TIMES, OUTAGE_S / 2)
        await asyncio.sleep(OUTAGE_S / 2)
    finally:
        redis.resume()
    ticks = run.ticks(before)
    blind = [tick for tick in ticks if not tick.snapshot.has_heartbeat]
    changes = _changes(blind)
    is_met = len(blind) >= OUTAGE_S / 2 and not changes
    run.judge("outage", is_met, f"{len(blind)} of {len(ticks)} ticks blind: {len(changes)} changes {changes or ''}")


async def _idle(run: Run) -> None:
    await asyncio.wait(run.answers, timeout=ANSWER_TIMEOUT_S)
    started_s = time.monotonic()
    while run.ready() != (1, 1) and time.monotonic() - started_s < SETTLE_TIMEOUT_S * 2:  # noqa: ASYNC110  a file
        await asyncio.sleep(1.0)
    run.judge(
        "idle", run.ready() == (1, 1), f"{run.ready()} after {time.monotonic() - started_s:.0f} s without traffic"
    )


async def _judged(url: str, journals: Path, steady_s: float) -> int:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=ANSWER_TIMEOUT_S, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        run = Run(client, model, await _first_tick(journals))
        await _swing(run)
        await _step(run)
        await _idle(run)
        await _steady(run, steady_s)
        await _outage(run)
        await _idle(run)
        broken = Counter(what for what in await asyncio.gather(*run.answers) if what)
        told = f"{broken.total()} of {len(run.answers)} answers were refused or cut short {dict(broken) or ''}"
        run.judge("clients", not broken, told)
    again = replay(read_journal(run.journal))
    differing = sum(not tick.is_same for tick in again)
    run.judge("replay", not differing, f"{len(again)} ticks decided again, {differing} differ")
    return 1 if run.failures else 0


async def _first_tick(journals: Path) -> Path:
    """The journal, once it has a tick."""
    async with asyncio.timeout(SETTLE_TIMEOUT_S):
        while (journal := _with_a_tick(journals)) is None:  # noqa: ASYNC110  a file
            await asyncio.sleep(0.2)
    return journal


def _with_a_tick(journals: Path) -> Path | None:
    for path in journals.glob("*.jsonl"):
        if any(isinstance(entry, TickEntry) for entry in read_journal(path)):
            return path
    return None


def _changes(ticks: list[TickEntry]) -> list[str]:
    decided = [(pool, getattr(tick.decision, pool.value)) for tick in ticks for pool in Pool]
    acted = [(pool, one) for pool, one in decided if one.action is not Action.HOLD]
    return [f"{pool.value} {one.action.value} {one.change:+d} of {one.current}: {one.reason}" for pool, one in acted]


def _slowest_start(run: Run) -> float:
    """As the journal's events say; 0 when nothing has started yet."""
    words = [entry.what for entry in read_journal(run.journal) if isinstance(entry, EventEntry)]
    took_s = [float(what.split(" was ready ")[1].split(" s ")[0]) for what in words if " was ready " in what]
    return max(took_s, default=0.0)


@contextmanager
def _cluster(folder: Path) -> Iterator[tuple[str, Path]]:
    """URL and journals' folder of a cluster of this run alone."""
    model = resolve_model(DEFAULT_MODEL)
    (folder / "policy.yaml").write_text(POLICY)
    (folder / "cluster.yaml").write_text(CLUSTER.format(model=model, policy=folder / "policy.yaml"))
    os.environ["TANDEM_HOME"] = str(folder)
    with started_cluster(("--config", str(folder / "cluster.yaml")), folder / "cluster.log") as url:
        yield url, folder / "scaler"


def main(steady_s: float, keep: Path | None) -> int:
    """The exit status."""
    with tempfile.TemporaryDirectory(prefix="tandem-live-scaling-") as name:
        try:
            with _cluster(Path(name)) as (url, journals):
                return asyncio.run(_judged(url, journals, steady_s))
        finally:
            if keep is not None:
                shutil.copytree(Path(name) / "scaler", keep, dirs_exist_ok=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steady-s", type=float, default=40.0, help="length of the steady phase")
    parser.add_argument("--keep", type=Path, help="folder for the journal (`tandem scaler explain JOURNAL`)")
    given = parser.parse_args()
    sys.exit(main(given.steady_s, given.keep))
