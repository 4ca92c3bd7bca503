"""The engine's pace: the first step counts as it is, later ones move the averages."""

from __future__ import annotations

import pytest

from engine.step_figures import StepFigures


def test_the_first_step_counts_whole_and_later_ones_a_tenth() -> None:
    first = StepFigures().after_step(context_tokens=10, batch_size=2, num_generated=2, step_s=0.5, num_rows=9)
    assert first == StepFigures(10, 2, 0.5, 4.0, 1, 0.5, 9)
    second = first.after_step(context_tokens=12, batch_size=1, num_generated=1, step_s=0.1, num_rows=1)
    assert (second.context_tokens, second.batch_size) == (12, 1)
    assert second.step_s == pytest.approx(0.46)
    assert second.tokens_per_s == pytest.approx(4.6)
    assert (second.num_steps, second.total_rows) == (2, 10)
    assert second.total_s == pytest.approx(0.6)
