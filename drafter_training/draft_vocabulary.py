"""The reduced vocabulary of a drafter: the tokens that the target says most, and how much of its text they cover."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Added to the count of the i-th token as PRIOR / i: merges that a tokenizer learnt early are frequent in any text, so
# they fill up what little training text leaves open.
PRIOR = 1.0


def count_tokens(turns: Iterable[torch.Tensor], vocab_size: int) -> torch.Tensor:
    """How often each token was said, [vocab_size]."""
    counts = torch.zeros(vocab_size)
    for token_ids in turns:
        counts += torch.bincount(token_ids.long(), minlength=vocab_size)
    return counts


def choose_vocabulary(counts: torch.Tensor, size: int) -> torch.Tensor:
    """The token ids of the reduced vocabulary, most frequent first, [size] int64."""
    prior = PRIOR / torch.arange(1, len(counts) + 1)
    return (counts + prior).topk(min(size, len(counts))).indices


def coverage(vocabulary: torch.Tensor, counts: torch.Tensor) -> float:
    """The share of the counted tokens that the vocabulary has."""
    return float(counts[vocabulary].sum() / counts.sum())
