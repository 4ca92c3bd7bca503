"""Finds stop strings in a text that arrives in pieces, and says how much of its end might still become one.

One Knuth-Morris-Pratt automaton for each stop string: a character costs O(1) amortised, whatever the pieces are, so a
stream and a whole answer are cut at the same place: where the first stop string to be complete began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Which stop string was found; the text ends before `start` (characters from the beginning of the stream)."""

    stop: str
    start: int


class StopMatcher:
    """Reads one stream. After a match it must not be used any more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._num_read = 0

    @property
    def num_held(self) -> int:
        """Characters at the end of what was read that begin a stop string, and so may not be shown yet."""
        return max((automaton.num_matched for automaton in self._automata), default=0)

    def push(self, piece: str) -> StopMatch | None:
        for character in piece:
            self._num_read += 1
            # Of several that end here the longest begins first: everything after its start is cut anyhow.
            found = [automaton.stop for automaton in self._automata if automaton.advance(character)]
            if found:
                stop = max(found, key=len)
                return StopMatch(stop, self._num_read - len(stop))
        return None

    def skip(self, num_characters: int) -> None:
        """Text in which no stop string may begin or end (`min_tokens` is not reached)."""
        self._num_read += num_characters
        for automaton in self._automata:
            automaton.num_matched = 0


class _Automaton:
    """How much of one stop string the text read so far ends with."""

    __slots__ = ("_fallbacks", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._fallbacks = _borders(stop)

    def advance(self, character: str) -> bool:
        """Whether the stop string is complete with this character."""
        matched = self.num_matched
        while matched and self.stop[matched] != character:
            matched = self._fallbacks[matched - 1]
        if self.stop[matched] == character:
            matched += 1
        self.num_matched = matched
        return matched == len(self.stop)


def _borders(pattern: str) -> list[int]:
    """For each prefix the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders
