"""The suffix drafter: the longest end of the context that stood anywhere before, whatever its length.

A suffix automaton of the request's own tokens, grown one token at a time in constant amortised time (Blumer et al.
1985). The longer the match, the more it dares to guess: at most as many tokens as matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.identity import RequestId
from engine.draft import Draft

INITIAL = 0
NO_STATE = -1
MIN_MATCH = 2


@dataclass(slots=True)
class _Automaton:
    """States as columns: transitions, suffix link, longest length, and where the state's strings end first."""

    token_ids: list[int] = field(default_factory=list)
    transitions: list[dict[int, int]] = field(default_factory=lambda: [{}])
    links: list[int] = field(default_factory=lambda: [NO_STATE])
    lengths: list[int] = field(default_factory=lambda: [0])
    first_ends: list[int] = field(default_factory=lambda: [0])
    last: int = INITIAL

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        current = self._new_state(self.lengths[self.last] + 1, {}, len(self.token_ids))
        state = self.last
        while state != NO_STATE and token_id not in self.transitions[state]:
            self.transitions[state][token_id] = current
            state = self.links[state]
        self.links[current] = self._link_for(state, token_id)
        self.last = current

    def match(self) -> tuple[int, int]:
        """Length of the longest suffix that also ends earlier, and the index of the token after that earlier end."""
        link = self.links[self.last]
        return (self.lengths[link], self.first_ends[link]) if link > INITIAL else (0, 0)

    def _link_for(self, state: int, token_id: int) -> int:
        if state == NO_STATE:
            return INITIAL
        target = self.transitions[state][token_id]
        if self.lengths[target] == self.lengths[state] + 1:
            return target
        clone = self._new_state(self.lengths[state] + 1, dict(self.transitions[target]), self.first_ends[target])
        self.links[clone], self.links[target] = self.links[target], clone
        while state != NO_STATE and self.transitions[state].get(token_id) == target:
            self.transitions[state][token_id] = clone
            state = self.links[state]
        return clone

    def _new_state(self, length: int, transitions: dict[int, int], first_end: int) -> int:
        self.transitions.append(transitions)
        self.links.append(INITIAL)
        self.lengths.append(length)
        self.first_ends.append(first_end)
        return len(self.links) - 1


class SuffixDrafter:
    """Guesses what followed the longest earlier occurrence of the context's end.

    Implements `draft.Drafter` and `draft.LooksUp`.
    """

    name = "suffix"

    def __init__(self, *, min_match: int = MIN_MATCH) -> None:
        self._min_match = min_match
        self._automata: dict[RequestId, _Automaton] = {}

    def begin(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        self._automata[request_id] = _Automaton()
        self.extend(request_id, token_ids)

    def extend(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        automaton = self._automata[request_id]
        for token_id in token_ids:
            automaton.append(token_id)

    def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        automaton = self._automata[request_id]
        length, start = automaton.match()
        if length < self._min_match:
            return Draft()
        return Draft.chain(automaton.token_ids[start : start + min(num_drafts, length)])

    def match_length(self, request_id: RequestId) -> int:
        return self._automata[request_id].match()[0]

    def forget(self, request_id: RequestId) -> None:
        self._automata.pop(request_id, None)
