"""Log-probabilities of chosen tokens and of the most likely ones.

They come from the raw distribution: the model's logits before bias, penalties, temperature and filters, so that they
say what the model thought and do not depend on how a request samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.request import PositionLogprobs, TopLogprob


def position_logprobs(logits: torch.Tensor, chosen_ids: torch.Tensor, num_top: Sequence[int]) -> list[PositionLogprobs]:
    """One value for each row.

    `logits` [R, vocab] float32 raw, `chosen_ids` [R] int64; row r wants `num_top[r]` of the most likely tokens.
    """
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen_logits = logits.gather(1, chosen_ids[:, None])
    chosen_logprobs = (chosen_logits - normaliser)[:, 0].tolist()
    ranks = ((logits > chosen_logits).sum(dim=-1) + 1).tolist()
    chosen = [
        TopLogprob(token_id, logprob, rank)
        for token_id, logprob, rank in zip(chosen_ids.tolist(), chosen_logprobs, ranks, strict=True)
    ]
    most = min(max(num_top), logits.shape[-1])
    if most == 0:
        return [PositionLogprobs(value) for value in chosen]
    top_logits, top_ids = logits.topk(most, dim=-1)
    top_logprobs = (top_logits - normaliser).tolist()
    return [
        PositionLogprobs(value, _top(row_ids, row_logprobs, wanted))
        for value, row_ids, row_logprobs, wanted in zip(chosen, top_ids.tolist(), top_logprobs, num_top, strict=True)
    ]


def _top(token_ids: list[int], logprobs: list[float], wanted: int) -> tuple[TopLogprob, ...]:
    return tuple(
        TopLogprob(token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(zip(token_ids[:wanted], logprobs[:wanted], strict=True), start=1)
    )
