"""The loop from reports to a fleet, on a manual clock: it acts, it explains, it holds, it reads its policy again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.autoscaler.actuator import FIRST_RETRY_S
from deploy.autoscaler.autoscaler import Autoscaler
from deploy.autoscaler.decide import Action
from deploy.autoscaler.fleet import FleetState
from deploy.autoscaler.journal import EventEntry, Journal, JournalError, PolicyEntry, TickEntry, read_journal
from deploy.autoscaler.policy_source import PolicySource
from deploy.autoscaler.replay import replay
from deploy.autoscaler.sampler import Sampler
from deploy.autoscaler.signals import Pool
from deploy.scaler_view import explained
from deploy.yaml_settings import YamlSettingsError
from tests.deploy.autoscaler.fleet import MODEL
from tests.deploy.autoscaler.scripted_fleet import ScriptedFleet

QUICK = "version: 1\nname: quick\nscale_down: {window_s: 20.0, cooldown_s: 0.0, after_up_s: 0.0}\n"


class Run:
    """An autoscaler over a scripted fleet."""

    def __init__(self, folder: Path, fleet: ScriptedFleet, policy: str = QUICK) -> None:
        self.fleet = fleet
        self.policy_file = folder / "policy.yaml"
        self.policy_file.write_text(policy)
        self.policies = PolicySource(self.policy_file)
        self.journal = Journal(folder / "journal.jsonl")
        self.journal.policy(self.policies.policy)
        self.autoscaler = Autoscaler(fleet, fleet, Sampler(MODEL), self.policies, self.journal, fleet.clock)

    async def ticks(self, count: int, requests_per_s: float) -> None:
        for _ in range(count):
            self.fleet.now_s += 5.0
            self.fleet.arrived += round(requests_per_s * 5)
            await self.autoscaler.tick()

    def write_policy(self, text: str) -> None:
        self.policy_file.write_text(text)
        os.utime(self.policy_file, ns=(0, self.policy_file.stat().st_mtime_ns + 1_000_000))

    @property
    def entries(self) -> list[object]:
        return list(read_journal(self.journal.path))

    @property
    def done(self) -> list[str]:
        return [what for entry in self.entries if isinstance(entry, TickEntry) for what in entry.done]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(*arguments: str, **counts: int) -> Run:
        runs.append(Run(tmp_path, ScriptedFleet(**counts), *arguments))
        return runs[-1]

    yield make
    for run in runs:
        run.journal.close()


async def test_load_grows_the_pool_and_idleness_brings_it_back(start: Callable[..., Run]) -> None:
    run = start(prefill=1, decode=1)
    await run.ticks(4, 16.0)
    assert run.fleet.count(Pool.PREFILL) == 2
    run.fleet.become(FleetState.READY, "prefill-1")
    await run.ticks(12, 0.0)
    assert (run.fleet.count(Pool.PREFILL), run.fleet.count(Pool.DECODE)) == (1, 1)
    assert run.done[0].startswith("starting prefill-1: ")


async def test_rt44_refused_streams_grow_the_pool_and_leave_nothing_that_keeps_it_grown(
    start: Callable[..., Run],
) -> None:
    """Whatever is refused counts when it arrives, as a total: there is no count that a lost answer could leave up."""
    run = start(prefill=1, decode=1)
    run.fleet.num_refused = 3  # of four
    await run.ticks(4, 20.0)
    assert run.fleet.count(Pool.PREFILL) > 1
    run.fleet.become(FleetState.READY, *(name for name in run.fleet.entries if name.startswith("prefill")))
    await run.ticks(16, 0.0)
    assert (run.fleet.count(Pool.PREFILL), run.fleet.count(Pool.DECODE)) == (1, 1)


async def test_a_recorded_run_decides_the_same_when_it_is_replayed(start: Callable[..., Run]) -> None:
    run = start(prefill=1, decode=1)
    await run.ticks(4, 30.0)
    run.fleet.is_redis_up = False
    await run.ticks(2, 30.0)
    run.fleet.is_redis_up = True
    run.write_policy(QUICK + "prefill: {min: 2, max: 3}\n")
    run.fleet.become(FleetState.READY, "prefill-1")
    await run.ticks(10, 0.0)
    ticks = replay(read_journal(run.journal.path))
    assert len(ticks) == 16
    assert all(tick.is_same for tick in ticks)
    assert {tick.decision.prefill.action for tick in ticks} >= {Action.UP, Action.HOLD}
    stricter = replay(read_journal(run.journal.path), PolicySource(run.policy_file).policy)
    assert any(not tick.is_same for tick in stricter), "another policy would have decided otherwise"


async def test_f22_a_metrics_outage_holds_however_long(start: Callable[..., Run]) -> None:
    run = start(prefill=3, decode=3)
    await run.ticks(2, 1.0)
    run.fleet.is_redis_up = False
    await run.ticks(200, 50.0)
    assert (run.fleet.count(Pool.PREFILL), run.fleet.count(Pool.DECODE)) == (3, 3)
    assert run.done == []


async def test_a_dry_run_says_what_it_would_do_and_does_nothing(start: Callable[..., Run]) -> None:
    run = start(QUICK + "dry_run: true\n", prefill=1, decode=1)
    await run.ticks(6, 30.0)
    assert run.fleet.count(Pool.PREFILL) == 1
    assert run.done[0].startswith("dry run: prefill up +1 of 1: ")


async def test_a_wrong_new_policy_is_told_by_file_line_and_key_and_the_old_one_stays(
    start: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = start(prefill=1, decode=1)
    await run.ticks(2, 0.0)
    run.write_policy("version: 1\nprefill:\n  min: 0\n")
    with caplog.at_level(logging.ERROR):
        await run.ticks(3, 0.0)
    assert caplog.text.count("the old one stays") == 1, "it is said once"
    (event,) = [entry for entry in run.entries if isinstance(entry, EventEntry)]
    assert f"{run.policy_file}:3: prefill.min: " in event.what
    assert run.policies.policy.name == "quick"
    run.write_policy(QUICK.replace("quick", "mended"))
    await run.ticks(1, 0.0)
    assert [entry.policy.name for entry in run.entries if isinstance(entry, PolicyEntry)] == ["quick", "mended"]


async def test_a_removed_policy_file_changes_nothing(start: Callable[..., Run]) -> None:
    run = start(prefill=1, decode=1)
    run.policy_file.unlink()
    await run.ticks(1, 0.0)
    assert run.policies.policy.name == "quick"


def test_a_wrong_first_policy_is_refused(start: Callable[..., Run]) -> None:
    with pytest.raises(YamlSettingsError, match=r"policy.yaml:1: tick_s"):
        start("tick_s: 0\n")


async def test_rt51_a_worker_that_never_comes_is_given_up_and_the_next_start_waits(start: Callable[..., Run]) -> None:
    run = start(QUICK + "start_timeout_s: 20.0\n", prefill=1, decode=1)
    await run.ticks(4, 16.0)
    assert run.fleet.count(Pool.PREFILL, FleetState.STARTING) == 1
    await run.ticks(5, 16.0)
    assert "prefill-1" in run.fleet.stopped
    assert any(what.startswith("gave prefill-1 up: it was not ready in time") for what in run.done)
    assert any(what.startswith("no prefill worker started: 1 failed") for what in run.done)
    for _ in range(int(FIRST_RETRY_S / 5) + 4):
        if "prefill-2" not in run.fleet.entries:
            await run.ticks(1, 16.0)
    run.fleet.become(FleetState.FAILED, "prefill-2")
    await run.ticks(1, 0.0)
    assert "prefill-2" not in run.fleet.entries


async def test_the_least_busy_worker_is_drained_and_among_equals_the_newest(start: Callable[..., Run]) -> None:
    run = start(prefill=1, decode=3)
    run.fleet.running = {"decode-0": 1, "decode-1": 7, "decode-2": 4}
    # Little load, and the last requests still run.
    await run.ticks(12, 0.2)
    assert run.fleet.stopped == ["decode-0", "decode-2"]


async def test_a_flip_drains_one_and_starts_the_other_role(start: Callable[..., Run]) -> None:
    policy = "version: 1\nname: flips\nbudget: {replicas: 4}\nprefill: {max: 3}\ndecode: {max: 3}\n"
    run = start(policy, prefill=1, decode=3)
    run.fleet.prompt_tokens = 2000
    await run.ticks(6, 20.0)
    assert (run.fleet.count(Pool.PREFILL), run.fleet.count(Pool.DECODE)) == (2, 2)
    assert any("in its place" in what for what in run.done)


async def test_explain_says_what_was_seen_decided_and_done(start: Callable[..., Run]) -> None:
    run = start(prefill=1, decode=1)
    await run.ticks(4, 16.0)
    text = "\n".join(explained(read_journal(run.journal.path)))
    assert "policy 'quick' is in force" in text
    assert "16.00 requests/s of 1000 uncached" in text
    assert "prefill: 1 running or starting, 2 wanted: up +1" in text
    assert "-> starting prefill-1" in text


async def test_a_full_journal_is_kept_once_and_each_file_can_be_read_by_itself(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(prefill=1, decode=1)
    run.journal.close()
    run.journal = Journal(tmp_path / "small.jsonl", max_bytes=4000)
    run.journal.policy(run.policies.policy)
    run.autoscaler = Autoscaler(run.fleet, run.fleet, Sampler(MODEL), run.policies, run.journal, run.fleet.clock)
    await run.ticks(10, 1.0)
    for path in (run.journal.path, run.journal.path.with_suffix(".jsonl.1")):
        assert path.stat().st_size < 8000
        assert isinstance(next(read_journal(path)), PolicyEntry)


def test_a_journal_that_is_none_is_told_by_line_and_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text('{"kind": "event", "at": "now", "what": "a"}\n{"kind": "ev')
    assert [type(entry) for entry in read_journal(path)] == [EventEntry]
    path.write_text('{"kind": "event", "at": "now", "what": "a"}\n[1]\n')
    with pytest.raises(JournalError, match=r"j.jsonl:2: is no entry"):
        list(read_journal(path))
