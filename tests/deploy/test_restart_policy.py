"""Back-off and giving up, on a manual clock."""

from __future__ import annotations

from deploy.restart_policy import CrashHistory, GiveUp, Restart, RestartLimits, after_crash

LIMITS = RestartLimits(
    first_delay_s=0.1, max_delay_s=1.0, healthy_run_s=30, max_crashes=6, window_s=120
)  # fmt: skip


def crash_loop(times: int, every_s: float, ran_s: float) -> list[Restart | GiveUp]:
    history, decisions = CrashHistory(), []
    for number in range(times):
        history, decision = after_crash(history, ran_s, number * every_s, LIMITS)
        decisions.append(decision)
    return decisions


def test_delays_double_up_to_the_limit_and_then_it_gives_up() -> None:
    *restarts, last = crash_loop(6, 1.0, 0.5)
    assert restarts == [Restart(0.1), Restart(0.2), Restart(0.4), Restart(0.8), Restart(1.0)]
    assert last == GiveUp(crashes=6, within_s=5.0)


def test_process_that_was_healthy_starts_at_once_again_for_ever() -> None:
    assert set(crash_loop(20, 60.0, ran_s=31)) == {Restart(0.1)}


def test_crashes_out_of_the_window_do_not_count() -> None:
    assert not any(isinstance(decision, GiveUp) for decision in crash_loop(50, 30.0, ran_s=1))
