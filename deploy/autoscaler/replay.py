"""Decides a recorded run again from its own snapshots: the same function, so the same decisions.

With another policy it answers what that one would have decided on the same traffic (not what would have come of it).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deploy.autoscaler.decide import Decision, ScalerState, decide
from deploy.autoscaler.journal import Entry, PolicyEntry, TickEntry
from deploy.autoscaler.policy import Policy


@dataclass(frozen=True, slots=True)
class ReplayedTick:
    recorded: TickEntry
    decision: Decision

    @property
    def is_same(self) -> bool:
        return self.decision == self.recorded.decision


def replay(entries: Iterable[Entry], policy: Policy | None = None) -> list[ReplayedTick]:
    """Every tick decided anew. `policy` replaces the recorded ones. A policy must come before the first tick."""
    state, ticks = ScalerState(), []
    current = policy
    for entry in entries:
        if isinstance(entry, PolicyEntry):
            current = policy or entry.policy
        elif isinstance(entry, TickEntry):
            if current is None:
                raise ValueError("the journal has a tick before any policy")
            decision, state = decide(entry.snapshot, state, current, entry.model)
            ticks.append(ReplayedTick(entry, decision))
    return ticks
