"""The n-gram drafter: what followed the last time these tokens stood here will follow again.

Prompt-lookup decoding (Saxena 2023) with an index that is kept while tokens arrive, so that a guess costs a few
look-ups and not a search through the context. It pays where an answer copies: summaries, edits, extraction, code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.identity import RequestId
from engine.draft import Draft

MAX_NGRAM = 4
MIN_NGRAM = 2


@dataclass(slots=True)
class _History:
    """One request's tokens, and where each n-gram was last followed by something."""

    token_ids: list[int] = field(default_factory=list)
    # Key: the n-gram itself (its length tells n); value: index of the token after its latest occurrence.
    followed_at: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter:
    """Looks up the longest n-gram at the end of the context, from `max_ngram` down to `min_ngram` tokens."""

    name = "ngram"

    def __init__(self, *, max_ngram: int = MAX_NGRAM, min_ngram: int = MIN_NGRAM) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram {min_ngram} must be in [1, max_ngram {max_ngram}]")
        self._sizes = tuple(range(max_ngram, min_ngram - 1, -1))
        self._histories: dict[RequestId, _History] = {}

    def begin(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        self._histories[request_id] = _History()
        self.extend(request_id, token_ids)

    def extend(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        history = self._histories[request_id]
        known, followed_at = history.token_ids, history.followed_at
        for token_id in token_ids:
            # The n-grams that end just before this token are followed by it.
            length = len(known)
            for size in self._sizes:
                if size <= length:
                    followed_at[tuple(known[length - size :])] = length
            known.append(token_id)

    def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        history = self._histories[request_id]
        known = history.token_ids
        for size in self._sizes:
            if size > len(known):
                continue
            start = history.followed_at.get(tuple(known[len(known) - size :]))
            if start is not None:
                return Draft.chain(_continuation(known, start, num_drafts))
        return Draft()

    def forget(self, request_id: RequestId) -> None:
        self._histories.pop(request_id, None)


def _continuation(known: list[int], start: int, num_drafts: int) -> list[int]:
    """The tokens from `start` on; past the end of the context the repetition itself goes on."""
    period = len(known) - start
    return [known[start + offset % period] for offset in range(num_drafts)]
