"""How often a looked-up token holds, by how many tokens at the context's end stood before it there, too.

A match of two tokens is often chance, one of ten is a copy under way. Behind a guess that holds the match is one token
longer: so the i-th token of a chain holds like the first one behind a match that is i longer, and a chain is as sure as
the product along the table. The table moves with what was verified.
"""

from __future__ import annotations

from collections.abc import Sequence

# Longer matches are as sure as these.
MAX_MATCH = 16
# Behind 1, 2, ... MAX_MATCH tokens, before anything was seen: about what the default model's answers to our own prompts
# (`benchmarks.speculation`) gave.
PRIOR = (0.2, 0.5, 0.58, 0.64, 0.75, 0.8, 0.8, 0.82, 0.86, 0.88, 0.9, 0.9, 0.9, 0.9, 0.9, 0.96)


class MatchAcceptance:
    """The table of one request, or of one tenant's requests."""

    __slots__ = ("rates",)

    def __init__(self, rates: Sequence[float] = PRIOR) -> None:
        self.rates = list(rates)

    def confidences(self, match_length: int, num_drafts: int) -> tuple[float, ...]:
        """Of a chain behind such a match: how likely each token and all before it hold."""
        reached = 1.0
        falling = []
        for place in range(match_length, match_length + num_drafts):
            reached *= self.rates[_row(place)]
            falling.append(reached)
        return tuple(falling)

    def saw(self, match_length: int, num_proposed: int, num_accepted: int, smoothing: float) -> None:
        """A chain behind such a match was verified: each token up to the first rejection is one trial."""
        for index in range(min(num_accepted + 1, num_proposed)):
            row = _row(match_length + index)
            self.rates[row] += smoothing * ((1.0 if index < num_accepted else 0.0) - self.rates[row])


def _row(match_length: int) -> int:
    return min(max(match_length, 1), MAX_MATCH) - 1
