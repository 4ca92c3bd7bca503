"""How often things were counted lately: every count fades by half in 30 s.

Counts are kept in units of one moment, so the passing of time touches none of them, and reading many costs a look-up
each. Pure: every call is given the time. Bounded: the key not counted for longest is forgotten.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

HALF_LIFE_S = 30.0
# Half-lives after which counts are put in units of a later moment: far below what a float holds.
MAX_HALF_LIVES = 64.0
FORGOTTEN = 1e-6

Key = TypeVar("Key", bound=Hashable)


class FadingCounts(Generic[Key]):
    """Owned by a policy."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._counts: OrderedDict[Key, float] = OrderedDict()  # in units of the base
        self._base_s = 0.0

    def count(self, key: Key, now_s: float) -> None:
        """Once more."""
        unit = self._unit(now_s)  # before the counts are looked at: it may put them in other units
        counts = self._counts
        counts[key] = counts.get(key, 0.0) + unit
        counts.move_to_end(key)
        while len(counts) > self._max_keys:
            counts.popitem(last=False)

    def of(self, key: Key, now_s: float) -> float:
        """What is left of its count."""
        unit = self._unit(now_s)
        return self._counts.get(key, 0.0) / unit

    def of_all(self, keys: Iterable[Key], now_s: float) -> list[float]:
        """The same for each of many."""
        per_unit = 1 / self._unit(now_s)
        get = self._counts.get
        return [get(key, 0.0) * per_unit for key in keys]

    def _unit(self, now_s: float) -> float:
        """What one count of this moment weighs."""
        half_lives = (now_s - self._base_s) / HALF_LIFE_S
        if half_lives <= MAX_HALF_LIVES:
            return math.exp2(half_lives)
        left = math.exp2(-min(half_lives, 1000.0))
        faded = ((key, count * left) for key, count in self._counts.items())
        self._counts = OrderedDict((key, count) for key, count in faded if count > FORGOTTEN)
        self._base_s = now_s
        return 1.0
