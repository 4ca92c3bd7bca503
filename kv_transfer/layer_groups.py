"""How many layers go into one push: pure arithmetic on measured costs.

A group is the smallest number of layers whose bytes take at least four times as long as one operation's fixed cost; the
last group is one layer, because that is what a request waits for after its last layer is computed. What all layers
together have is no such group where a prompt is short or an operation dear: then everything goes at once (bulk).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_COST_RATIO = 4.0


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Measured when the two workers met."""

    bytes_per_s: float
    operation_s: float  # fixed cost of one push; infinite: always bulk


def layer_groups(num_layers: int, layer_bytes: int, costs: LinkCosts) -> tuple[int, ...]:
    """Layers of each push, in order; they add up to `num_layers`. `layer_bytes` is what one layer of the chunk has."""
    layer_s = layer_bytes / costs.bytes_per_s
    group_s = MIN_COST_RATIO * costs.operation_s
    if num_layers <= 1 or num_layers * layer_s <= group_s:
        return (num_layers,)
    group = max(1, min(math.ceil(group_s / layer_s), num_layers - 1))
    full, rest = divmod(num_layers - 1, group)
    return (*([group] * full), *([rest] if rest else []), 1)
