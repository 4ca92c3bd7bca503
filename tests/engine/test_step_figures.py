"""The engine's pace: the first step counts as it is, later ones move the averages."""

from __future__ import annotations

import pytest

from engine.step_figures import StepFigures


def test_the_first_step_counts_whole_and_later_ones_a_tenth() -> None:
    first = StepFigures().after_step(context_tokens=10, batch_size=2, num_generated=2, step_s=0.5)
    assert first == StepFigures(10, 2, 0.5, 4.0)
    second = first.after_step(context_tokens=12, batch_size=1, num_generated=1, step_s=0.1)
    assert (second.context_tokens, second.batch_size) == (12, 1)
    assert second.step_s == pytest.approx(0.46)
    assert second.tokens_per_s == pytest.approx(4.6)
