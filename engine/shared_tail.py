"""The last, partly filled block of a common prefix: copied from a running sequence instead of computed again.

Full blocks are shared by reference through the prefix cache. The block behind them differs in its later tokens, so it
cannot be shared: the newcomer copies it before it writes (copy on write), and n choices of one prompt compute one
token each instead of up to a block.

    running    [ block 0 ][ block 1 ][ t32 t33 t34 t35 g g . . ]
    newcomer   [ by ref  ][ by ref  ][ t32 t33 t34 <- copied   ]  and computes t35, whose logits it needs
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from engine.sequence import Sequence


class SharedTail(NamedTuple):
    """Copy block `source` to `destination`: it holds the sequence's KV up to `num_tokens` from its start."""

    source: int
    destination: int
    num_tokens: int


def find_shared_tail(sequence: Sequence, running: Iterable[Sequence], block_tokens: int) -> SharedTail | None:
    """The longest useful tail among `running`; None when there is none.

    `sequence` has its blocks, and `num_computed` says where its shared full blocks end.
    """
    start = sequence.num_computed
    end = min(start + block_tokens, sequence.num_tokens - 1)
    best: SharedTail | None = None
    for other in running:
        num_tokens = _num_common_tokens(sequence, other, start, end)
        if num_tokens > (best.num_tokens if best else start):
            index = start // block_tokens
            best = SharedTail(other.blocks[index].block, sequence.blocks[index].block, num_tokens)
    return best


def _num_common_tokens(sequence: Sequence, other: Sequence, start: int, end: int) -> int:
    """Up to where, within [start, end], the two agree in every token and the other's KV is written."""
    end = min(end, other.num_computed)
    if end <= start or other.request.scope_key != sequence.request.scope_key:
        return start
    if sequence.token_ids[start] != other.token_ids[start]:  # nearly everyone
        return start
    differs = sequence.token_ids[start:end] != other.token_ids[start:end]
    num_common = start + (int(differs.argmax()) if differs.any() else end - start)
    if not np.array_equal(sequence.token_ids[:start], other.token_ids[:start]):
        return start
    return num_common
