"""The search on laws with a known capacity."""

from __future__ import annotations

import pytest

from benchmarks.capacity_search import Next, Phase, Probe, max_probes, next_probe

GRID = (2.0, 4.0, 8.0, 16.0)


def _search(capacity: float, *, lucky: frozenset[tuple[float, int]] = frozenset()) -> tuple[Next, list[Probe]]:
    probes: list[Probe] = []
    while (step := next_probe(GRID, probes, 1.1)).phase is not Phase.DONE:
        passed = step.rate_per_s <= capacity or (step.rate_per_s, step.repeat) in lucky
        probes.append(Probe(step.rate_per_s, step.repeat, passed))
        assert len(probes) < 30
    return step, probes


@pytest.mark.parametrize("capacity", [2.0, 3.3, 5.9, 7.99, 11.0, 15.5])
def test_answer_is_within_the_resolution_and_confirmed(capacity: float) -> None:
    answer, probes = _search(capacity)
    assert answer.rate_per_s <= capacity < answer.rate_per_s * 1.1 + 1e-9
    assert Probe(answer.rate_per_s, 1, True) in probes
    assert len(probes) <= max_probes(GRID, 1.1)


def test_a_grid_that_began_too_high_is_left_downwards() -> None:
    answer, _ = _search(1.3)
    assert answer.rate_per_s <= 1.3 < answer.rate_per_s * 1.1 + 1e-9


def test_nothing_above_a_failure_is_tried() -> None:
    _, probes = _search(3.0)
    assert max(probe.rate_per_s for probe in probes) == 4.0


def test_a_lucky_pass_does_not_survive_its_confirmation() -> None:
    answer, _ = _search(7.0, lucky=frozenset({(8.0, 0)}))
    assert answer.rate_per_s <= 7.0


def test_ends_when_nothing_passes_and_when_nothing_fails() -> None:
    assert _search(0.1)[0] == Next(Phase.DONE, 0.0)
    assert 4 * 16.0 <= _search(1e9)[0].rate_per_s < 6 * 16.0


def test_a_grid_that_ended_too_low_is_left_upwards() -> None:
    answer, _ = _search(37.0)
    assert answer.rate_per_s <= 37.0 < answer.rate_per_s * 1.1 + 1e-9
