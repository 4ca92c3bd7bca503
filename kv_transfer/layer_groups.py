"""How many layers go into one push: pure arithmetic on measured costs.

A prompt below the bulk threshold goes at once: the fixed cost of many small pushes outweighs what they hide. Above it,
a group is the smallest number of layers whose bytes take at least four times as long as one operation's fixed cost; the
last group is one layer, because that is what a request waits for after its last layer is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BULK_BELOW_TOKENS = 768
MIN_COST_RATIO = 4.0


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Measured when the two workers met."""

    bytes_per_s: float
    operation_s: float  # fixed cost of one push


def layer_groups(num_layers: int, layer_bytes: int, new_tokens: int, costs: LinkCosts) -> tuple[int, ...]:
    """Layers of each push, in order; they add up to `num_layers`. `layer_bytes` is what one layer of the chunk has."""
    if num_layers <= 1 or new_tokens < BULK_BELOW_TOKENS:
        return (num_layers,)
    layer_s = layer_bytes / costs.bytes_per_s
    group = math.ceil(MIN_COST_RATIO * costs.operation_s / layer_s) if layer_s > 0 else num_layers
    group = max(1, min(group, num_layers - 1))
    full, rest = divmod(num_layers - 1, group)
    return (*([group] * full), *([rest] if rest else []), 1)
