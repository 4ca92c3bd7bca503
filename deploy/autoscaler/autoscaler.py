"""The live loop: sample, decide, write it down, do it. Everything that decides is elsewhere and pure.

    every tick:  policy file ─> reports ─> Sampler ─> decide ─> Journal, and Actuator ─> Fleet

A tick that fails changes nothing, and the next one comes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from deploy.autoscaler.actuator import Actuator
from deploy.autoscaler.decide import Decision, ScalerState, decide
from deploy.autoscaler.fleet import Fleet
from deploy.autoscaler.journal import Journal
from deploy.autoscaler.policy_source import PolicySource
from deploy.autoscaler.sampler import ReportReader, Sampler
from deploy.autoscaler.signals import Pool

_log = logging.getLogger(__name__)


class Autoscaler:
    """Owned by whoever runs the cluster. `run` until cancelled."""

    def __init__(
        self,
        fleet: Fleet,
        reports: ReportReader,
        sampler: Sampler,
        policies: PolicySource,
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._reports = reports
        self._sampler = sampler
        self._policies = policies
        self._journal = journal
        self._clock = clock
        self._actuator = Actuator(fleet)
        self._state = ScalerState()
        self._last: Decision | None = None
        self._start_up_s: dict[Pool, float] = {}

    async def run(self) -> None:
        """One tick after the other, at the policy's pace."""
        self._journal.policy(self._policies.policy)
        next_s = self._clock()
        while True:
            next_s = max(next_s + self._policies.policy.tick_s, self._clock())
            await asyncio.sleep(next_s - self._clock())
            try:
                await self.tick()
            except Exception:
                # The fleet stays as it is: an autoscaler that is broken must not take the cluster with it.
                _log.exception("a tick of the autoscaler failed")

    async def tick(self) -> Decision:
        """One decision, written down and, unless it is a dry run, carried out."""
        self._refresh_policy()
        policy = self._policies.policy
        reports = await self._reports.read()
        now_s = self._clock()
        workers = self._fleet.workers()
        self._note_start_ups()
        snapshot = self._sampler.sample(now_s, workers, policy, reports)
        decision, self._state = decide(snapshot, self._state, policy, self._sampler.model)
        done = self._actuator.obey(decision, snapshot, workers, policy)
        self._journal.tick(snapshot, self._sampler.model, decision, done)
        self._say(decision, done)
        return decision

    def _refresh_policy(self) -> None:
        change = self._policies.refresh()
        if change is None:
            return
        if change.problems:
            self._journal.event("the new policy is wrong, the old one stays: " + "; ".join(change.problems))
        else:
            self._journal.policy(change.policy)

    def _note_start_ups(self) -> None:
        for pool in Pool:
            took_s = self._fleet.start_up_s(pool)
            if took_s is not None and took_s != self._start_up_s.get(pool):
                self._start_up_s[pool] = took_s
                self._journal.event(f"a {pool.value} worker was ready {took_s:.1f} s after its start")

    def _say(self, decision: Decision, done: list[str]) -> None:
        """INFO for what changes something; holding is said once for each reason."""
        for what in done:
            _log.info("autoscaler: %s", what)
        if self._last is None or decision.alerts != self._last.alerts:
            for alert in decision.alerts:
                _log.warning("autoscaler alert: %s (%s; %s)", alert, decision.prefill.reason, decision.decode.reason)
        self._last = decision
