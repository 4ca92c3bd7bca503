"""Prefixes that so many ask for that one worker's copy is not enough: every eighth request makes another one.

A worker that holds a hot prefix answers fastest, so it gets everybody for as long as it keeps up, and the day it fails
or falls behind all others are cold. So a request for a prefix that was asked for often lately goes to a worker without
it, which computes it once; when all have it, ties spread the rest. What is asked for now and then is never copied.
Counts fade by half in 30 s. Pure: every call is given the time; bounded: the prefix not asked for longest is forgotten.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from cluster.identity import BlockHash

REQUESTS_PER_COPY = 8.0
HALF_LIFE_S = 30.0
MAX_PREFIXES = 4096


class HotPrefixes:
    """Owned by a policy."""

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._asked: OrderedDict[BlockHash, tuple[float, float]] = OrderedDict()  # count, and when

    def wants_copy(self, prefix: BlockHash, now_s: float) -> bool:
        """One more request for this prefix: whether it should go where the prefix is not yet."""
        count, at_s = self._asked.pop(prefix, (0.0, now_s))
        count = count * math.exp2(min(0.0, at_s - now_s) / HALF_LIFE_S) + 1
        is_hot = count >= REQUESTS_PER_COPY
        self._asked[prefix] = (0.0 if is_hot else count, now_s)
        while len(self._asked) > self._max_prefixes:
            self._asked.popitem(last=False)
        return is_hot
