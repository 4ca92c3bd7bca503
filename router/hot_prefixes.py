"""Prefixes that so many ask for that their holders' copies are not enough: every eighth request makes another one.

A worker that holds a hot prefix answers fastest, so it gets everybody for as long as it keeps up, and the day it fails
or falls behind all others are cold. So when a prefix brings each of its holders more requests than a worker's fair
share of all, a request for it goes to a worker without it, which computes it once; when all have it, ties spread the
rest. What is asked for less is never copied: a copy takes the place of something else in a cache.
Counts fade by half in 30 s. Pure: every call is given the time; bounded: the prefix not asked for longest is forgotten.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from cluster.identity import BlockHash

REQUESTS_PER_COPY = 8.0
HALF_LIFE_S = 30.0
MAX_PREFIXES = 4096


@dataclass(slots=True)
class _Asked:
    """Requests, fading, as of `at_s`."""

    at_s: float
    count: float = 0.0
    since_copy: float = 0.0

    def add_one(self, now_s: float) -> None:
        kept = math.exp2(min(0.0, self.at_s - now_s) / HALF_LIFE_S)
        self.count = self.count * kept + 1
        self.since_copy = self.since_copy * kept + 1
        self.at_s = now_s


class HotPrefixes:
    """Owned by a policy."""

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._asked: OrderedDict[BlockHash, _Asked] = OrderedDict()
        self._all = _Asked(0.0)

    def count_request(self, now_s: float) -> None:
        """One more request for whatever."""
        self._all.add_one(now_s)

    def count_prefix(self, prefix: BlockHash, now_s: float) -> float:
        """That request is for this prefix: how many were, lately."""
        asked = self._asked.pop(prefix, None) or _Asked(now_s)
        asked.add_one(now_s)
        self._asked[prefix] = asked
        while len(self._asked) > self._max_prefixes:
            self._asked.popitem(last=False)
        return asked.count

    def is_due(self, prefix: BlockHash) -> bool:
        """Whether so many have asked since the last copy that there may be another one: cheap, most requests' answer
        is no."""
        return self._asked[prefix].since_copy >= REQUESTS_PER_COPY

    def wants_copy(self, prefix: BlockHash, holders_share: float) -> bool:
        """Whether the request that was counted just now, for a prefix which this share of the workers hold, should go
        to another."""
        asked = self._asked[prefix]
        if asked.since_copy < REQUESTS_PER_COPY or asked.count <= holders_share * self._all.count:
            return False
        asked.since_copy = 0.0
        return True
