"""When a crashed process is started again, as a pure function of its past exits: back-off, and when to give up.

A process that ran for a while starts again at once; one that keeps crashing waits longer each time, and after
`max_crashes` within `window_s` it is a crash loop: somebody has to look.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimits:
    first_delay_s: float = 0.1
    max_delay_s: float = 10.0
    # A run at least this long was healthy: the crashes before it no longer count.
    healthy_run_s: float = 30.0
    max_crashes: int = 6
    window_s: float = 120.0


@dataclass(frozen=True, slots=True)
class CrashHistory:
    """When the process crashed, newest last, since its last healthy run."""

    crashes_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Restart:
    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    crashes: int
    within_s: float


def after_crash(
    history: CrashHistory, ran_s: float, now: float, limits: RestartLimits
) -> tuple[CrashHistory, Restart | GiveUp]:
    """What to do about a process that ran for `ran_s` and ended unasked at `now`."""
    earlier = () if ran_s >= limits.healthy_run_s else history.crashes_s
    crashes_s = (*(crash_s for crash_s in earlier if now - crash_s < limits.window_s), now)
    updated = CrashHistory(crashes_s)
    if len(crashes_s) >= limits.max_crashes:
        return updated, GiveUp(len(crashes_s), now - crashes_s[0])
    # Twice as long for each crash in a row, starting from the first.
    delay_s = min(limits.max_delay_s, limits.first_delay_s * 2 ** (len(crashes_s) - 1))
    return updated, Restart(delay_s)
