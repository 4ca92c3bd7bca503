"""When a sequence ends: stop tokens first, then the length, token by token.

A step may give several tokens (accepted drafts): the first one that ends the sequence is the last one kept, whatever
follows it. Stop strings are text and belong to the router.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cluster.sampling_params import SamplingParams
from engine.request import FinishReason


class StopDecision(NamedTuple):
    """How many of the new tokens count, and why they are the last ones (None: the sequence goes on)."""

    num_kept: int
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


def apply_stop_rules(
    new_tokens: Sequence[int], params: SamplingParams, num_generated: int, max_generated: int
) -> StopDecision:
    """`num_generated` and `max_generated` count from the end of the prompt, before `new_tokens`.

    A stop token counts as generated and is kept: it is the last of the kept tokens. Before `min_tokens` it does not
    stop (nor is it ever sampled then).
    """
    for index, token_id in enumerate(new_tokens):
        if token_id in params.stop_token_ids and num_generated + index >= params.min_tokens:
            return StopDecision(index + 1, FinishReason.STOP, token_id)
        if num_generated + index + 1 >= max_generated:
            return StopDecision(index + 1, FinishReason.LENGTH)
    return StopDecision(len(new_tokens))
