"""What an engine says of its pace: the last step's size, moving averages of its time and its tokens, and sums."""

from __future__ import annotations

from dataclasses import dataclass

AVERAGE_WEIGHT = 0.1  # of the newest step in the moving averages


@dataclass(frozen=True, slots=True)
class StepFigures:
    context_tokens: int = 0
    batch_size: int = 0
    step_s: float = 0.0  # moving average
    tokens_per_s: float = 0.0  # moving average
    num_steps: int = 0  # this and the next two since the start
    total_s: float = 0.0
    total_rows: int = 0  # tokens computed: of prompts, and guesses too

    def after_step(
        self, context_tokens: int, batch_size: int, num_generated: int, step_s: float, num_rows: int
    ) -> StepFigures:
        weight = AVERAGE_WEIGHT if self.step_s else 1.0
        rate = num_generated / max(step_s, 1e-9)
        return StepFigures(
            context_tokens,
            batch_size,
            self.step_s + weight * (step_s - self.step_s),
            self.tokens_per_s + weight * (rate - self.tokens_per_s),
            self.num_steps + 1,
            self.total_s + step_s,
            self.total_rows + num_rows,
        )

    def counters(self) -> dict[str, float]:
        """The sums, by the names that metrics are made from."""
        return {
            "iterations": self.num_steps,
            "iteration_seconds": self.total_s,
            "iteration_tokens": self.total_rows,
        }
