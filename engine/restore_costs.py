"""Whether a prefix that a lower tier holds is worth fetching: measured seconds of a fetch against those of computing.

What a token costs is learnt from steps, what a block costs from fetches, each tier apart. Knows no queue and no block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

# Before the first step: what a fast GPU needs for a token. So at a start only fetches that are fast there are made.
FIRST_TOKEN_S = 1e-4
# Before the first fetch: memory of a slow laptop, whatever the tier.
FIRST_FETCH_BYTES_PER_S = 1e9
# Of one fetch, whatever its size: two threads are woken, blocks are taken and published.
FIXED_FETCH_S = 1e-3
AVERAGE_WEIGHT = 0.2  # of the newest fetch in the moving average
# A tier that was slow once is tried again: each time it is not asked for its slowness, it is believed a bit faster.
FORGIVENESS = 0.9


class RestoreCosts:
    """Owned by the engine thread, which asks; fetches are reported by another thread, one value at a time."""

    def __init__(self, block_bytes: int, block_tokens: int) -> None:
        self._first_block_s = block_bytes / FIRST_FETCH_BYTES_PER_S
        self._block_tokens = block_tokens
        self._token_s = 0.0  # 0: no step was seen
        self._block_s: dict[str, float] = {}  # by tier

    @property
    def token_s(self) -> float:
        """Of computing one token, at best."""
        return self._token_s or FIRST_TOKEN_S

    def block_s(self, tier: str) -> float:
        """Of fetching one block from that tier."""
        return self._block_s.get(tier, self._first_block_s)

    @property
    def dearest_block_s(self) -> float:
        """Of a block from the tier that is slowest, of those that were fetched from."""
        return max(list(self._block_s.values()), default=self._first_block_s)

    def fetch_s(self, tiers: Sequence[str]) -> float:
        """Of one fetch of a block from each of these tiers."""
        return FIXED_FETCH_S + sum(count * self.block_s(tier) for tier, count in Counter(tiers).items())

    def pays(self, tiers: Sequence[str]) -> bool:
        """Whether to fetch these blocks is faster than to compute them."""
        if self.fetch_s(tiers) < len(tiers) * self._block_tokens * self.token_s:
            return True
        for tier in set(tiers):
            self._block_s[tier] = max(self._first_block_s / 10, self.block_s(tier) * FORGIVENESS)
        return False

    def saw_step(self, num_tokens: int, step_s: float) -> None:
        """A step took so long. The best rate is what counts: a prompt is computed many tokens at once."""
        token_s = step_s / max(1, num_tokens)
        if num_tokens and (self._token_s == 0.0 or token_s < self._token_s):
            self._token_s = token_s

    def saw_fetch(self, tier: str, num_blocks: int, fetch_s: float) -> None:
        known_s = self._block_s.get(tier)
        measured_s = fetch_s / num_blocks
        self._block_s[tier] = measured_s if known_s is None else known_s + AVERAGE_WEIGHT * (measured_s - known_s)
