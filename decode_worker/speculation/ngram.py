"""The n-gram drafter: what followed the last time these tokens stood here will follow again.

Prompt-lookup decoding (Saxena 2023) with an index that is kept while tokens arrive, so that a guess costs a few
look-ups and not a search through the context. It pays where an answer copies: summaries, edits, extraction, code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.identity import RequestId
from decode_worker.speculation.match_acceptance import MAX_MATCH
from engine.draft import Draft

MAX_NGRAM = 4
MIN_NGRAM = 1  # the surety of a single token is learned like that of others, and is little
# Keys are hashes modulo 2^64, an n-gram's length being its start: should two ever meet, one guess is wrong.
MULTIPLIER = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


@dataclass(slots=True)
class _History:
    """One request's tokens, and where each n-gram was last followed by something."""

    token_ids: list[int] = field(default_factory=list)
    followed_at: dict[int, int] = field(default_factory=dict)  # index of the token after the latest occurrence
    match_length: int = 0  # of the last guess


class NgramDrafter:
    """Looks up the longest n-gram at the end of the context, from `max_ngram` down to `min_ngram` tokens.

    Implements `draft.Drafter` and `draft.LooksUp`.
    """

    name = "ngram"

    def __init__(self, *, max_ngram: int = MAX_NGRAM, min_ngram: int = MIN_NGRAM) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram {min_ngram} must be in [1, max_ngram {max_ngram}]")
        self._sizes = tuple(range(max_ngram, min_ngram - 1, -1))
        self._histories: dict[RequestId, _History] = {}

    def begin(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        history = self._histories[request_id] = _History(list(token_ids))
        for size in self._sizes:
            history.followed_at.update(_followed_at(token_ids, size))

    def extend(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        history = self._histories[request_id]
        known, followed_at = history.token_ids, history.followed_at
        for token_id in token_ids:
            # The n-grams that end just before this token are followed by it.
            length = len(known)
            for size in self._sizes:
                if size <= length:
                    followed_at[_key(known[length - size :])] = length
            known.append(token_id)

    def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        history = self._histories[request_id]
        known = history.token_ids
        for size in self._sizes:
            if size > len(known):
                continue
            start = history.followed_at.get(_key(known[len(known) - size :]))
            if start is not None:
                history.match_length = _match_length(known, start, size)
                return Draft.chain(continuation(known, start, num_drafts))
        return Draft()

    def match_length(self, request_id: RequestId) -> int:
        return self._histories[request_id].match_length

    def forget(self, request_id: RequestId) -> None:
        self._histories.pop(request_id, None)


def _key(ngram: Sequence[int]) -> int:
    key = len(ngram)
    for token_id in ngram:
        key = (key * MULTIPLIER + token_id) & MASK
    return key


def _followed_at(token_ids: Sequence[int], size: int) -> zip[tuple[int, int]]:
    """Pairs of an n-gram's key and the index behind it, for all that something follows: a prompt's at once."""
    tokens = np.array(token_ids, np.uint64)
    count = max(0, len(tokens) - size)
    keys = np.full(count, size, np.uint64)
    for offset in range(size):
        keys = keys * np.uint64(MULTIPLIER) + tokens[offset : offset + count]
    return zip(keys.tolist(), range(size, size + count), strict=True)


def _match_length(known: list[int], start: int, length: int) -> int:
    """How many tokens before `start` are those at the end, `length` of them being known to be."""
    while length < min(MAX_MATCH, start) and known[start - 1 - length] == known[-1 - length]:
        length += 1
    return length


def continuation(known: list[int], start: int, num_drafts: int) -> list[int]:
    """The tokens from `start` on; past the end of the context the repetition itself goes on."""
    period = len(known) - start
    return [known[start + offset % period] for offset in range(num_drafts)]
