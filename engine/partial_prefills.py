"""How many prompts are computed in parts at once: few, so that each ends early, and one long one at most."""

from __future__ import annotations

from engine.request import EngineLimits

MAX_LONG_PARTIAL_PREFILLS = 1  # prompts above `long_prefill_token_threshold` in progress at once


class PartialPrefills:
    """How many prompts will still be in progress after this step."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._num_partial = 0
        self._num_long = 0

    def has_room(self, num_uncomputed: int, budget: int) -> bool:
        if self._ends_in_this_step(num_uncomputed, budget):
            return True
        is_long_allowed = not self._is_long(num_uncomputed) or self._num_long < MAX_LONG_PARTIAL_PREFILLS
        return self._num_partial < self._limits.max_partial_prefills and is_long_allowed

    def add(self, num_uncomputed: int, budget: int) -> None:
        if not self._ends_in_this_step(num_uncomputed, budget):
            self._num_partial += 1
            self._num_long += self._is_long(num_uncomputed)

    def _ends_in_this_step(self, num_uncomputed: int, budget: int) -> bool:
        return num_uncomputed <= min(budget, self._limits.long_prefill_token_threshold or budget)

    def _is_long(self, num_uncomputed: int) -> bool:
        return 0 < self._limits.long_prefill_token_threshold < num_uncomputed
