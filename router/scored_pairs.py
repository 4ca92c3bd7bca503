"""Workers with their scores, and which prefill and decode worker together are the best pair.

The best four of each pool are paired; the lowest sum wins. Within 5 ms or 5 % the pair with fewer requests in flight
wins, then the one chosen least recently, then the first in the router's own order of them.

Tuples and plain loops: a decision over a thousand workers makes one row for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from router.placement import Candidate, may_pair
from router.worker_state import Role, WorkerState

NUM_PAIRED = 4
NEAR_TIE_MS, NEAR_TIE_SHARE = 5.0, 0.05


class Scored(NamedTuple):
    """A worker's terms, in the order of their names."""

    total_ms: float
    last_chosen_s: float  # breaks ties between those that are idle alike
    order: int  # its place in the snapshot; no two are equal: workers are never compared
    worker: WorkerState
    terms_ms: tuple[float, ...]

    def explained(self, names: tuple[str, ...]) -> Candidate:
        return Candidate(self.worker, self.total_ms, names, self.terms_ms)


@dataclass(frozen=True, slots=True)
class Pair:
    decode: Scored
    prefill: Scored | None  # None: the decode worker prefills by itself
    total_ms: float
    is_tied: bool  # with others: it was not the lowest time that decided


_Summed = tuple[float, Scored, Scored | None]


def best_pair(
    decodes: Sequence[Scored], prefills: Sequence[Scored], local_ms: Callable[[Scored], float] | None
) -> Pair | None:
    """Of workers of which the best come first; None: no decode worker has anybody to prefill for it.

    `local_ms`: what a decode worker costs that prefills by itself, asked for where nobody else may prefill for it;
    None: it must not.
    """
    pairs: list[_Summed] = []
    for decode in decodes[:NUM_PAIRED]:
        decode_ms = decode.total_ms
        if decode.worker.role is Role.AGGREGATED:
            pairs.append((decode_ms, decode, None))
            continue
        partners = _best_partners(prefills, decode)
        pairs += [(decode_ms + prefill.total_ms, decode, prefill) for prefill in partners]
        if not partners and local_ms is not None:
            pairs.append((local_ms(decode), decode, None))
    if not pairs:
        return None
    lowest_ms = min([pair[0] for pair in pairs])
    tied_ms = lowest_ms + max(NEAR_TIE_MS, NEAR_TIE_SHARE * lowest_ms)
    tied = [pair for pair in pairs if pair[0] <= tied_ms]
    total_ms, decode, prefill = tied[0] if len(tied) == 1 else min(tied, key=_order_of_tied)
    return Pair(decode, prefill, total_ms, is_tied=len(tied) > 1)


def partners_of(prefills: Sequence[Scored], decode: Scored) -> Iterator[Scored]:
    """Those that may prefill for this decode worker."""
    return (prefill for prefill in prefills if may_pair(prefill.worker, decode.worker))


def _best_partners(prefills: Sequence[Scored], decode: Scored) -> Sequence[Scored]:
    best = prefills[:NUM_PAIRED]
    if all(may_pair(prefill.worker, decode.worker) for prefill in best):  # nearly always: nobody refuses anybody
        return best
    return list(islice(partners_of(prefills, decode), NUM_PAIRED))


def _order_of_tied(pair: _Summed) -> tuple[int, float, int, int]:
    _, decode, prefill = pair
    if prefill is None:
        return decode.worker.num_in_flight, decode.last_chosen_s, decode.order, 0
    return (
        decode.worker.num_in_flight + prefill.worker.num_in_flight,
        max(decode.last_chosen_s, prefill.last_chosen_s),
        decode.order,
        prefill.order,
    )
