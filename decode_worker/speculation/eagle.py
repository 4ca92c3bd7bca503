"""The EAGLE drafter: guesses from the target's own hidden states, one layer at a time (Li et al., EAGLE-3, 2025).

Layers for multi-token prediction that come with a checkpoint guess in the same way, under the name `mtp`.

It reads the rows that decoding gives on this worker, never the prompt's: the target's states carry what the prompt
says, and so a prompt that was computed elsewhere, or found in the prefix cache, changes nothing. Per request it keeps a
window of KV and the rows that it has not read yet. What it wrote behind its own guesses is overwritten by the rows that
the target confirmed: rollback is a length.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cluster.identity import RequestId
from decode_worker.speculation.confident_tree import MIN_CONFIDENCE, chain_with_siblings
from decode_worker.speculation.eagle_layer import BLOCK_TOKENS, EagleLayer, Reading
from decode_worker.speculation.small_products import FloatArray
from engine.draft import NO_DRAFT, Draft

# Tokens that the layer sees: about the longest answer that it was trained on.
WINDOW_BLOCKS = 16
# Guesses behind the window's last token.
MAX_GUESSES = 15
BLOCKS_PER_CONTEXT = WINDOW_BLOCKS + -(-MAX_GUESSES // BLOCK_TOKENS) + 1
# Rows that wait to be read. Where guessing rests for longer, the context starts anew with the last of them.
MAX_UNREAD = 32
# Guessing goes on behind a chain that holds this often: a guess costs the drafter a pass over its weights.
MIN_REACH = 0.2


@dataclass(slots=True)
class _Context:
    """One request: `blocks` in order of position, the first `num_cached` tokens of them read."""

    blocks: npt.NDArray[np.int32]
    num_cached: int = 0
    next_position: int = 0  # of the next row, counted from the first one that was read
    target_position: int = -1  # of the token that the next row is expected to have chosen
    unread_taps: deque[FloatArray] = field(default_factory=lambda: deque(maxlen=MAX_UNREAD))
    unread_ids: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_UNREAD))

    def restart(self) -> None:
        self.num_cached = self.next_position = 0
        self.unread_taps.clear()
        self.unread_ids.clear()


class EagleDrafter:
    """Implements `draft.Drafter`, `draft.ReadsHiddenStates`, `GuessesTogether` and `KnowsConfidence`."""

    def __init__(
        self,
        layer: EagleLayer,
        max_contexts: int,
        *,
        name: str = "eagle",
        min_confidence: float = MIN_CONFIDENCE,
        min_reach: float = MIN_REACH,
    ) -> None:
        """The layer's pool holds `max_contexts * BLOCKS_PER_CONTEXT` blocks."""
        self.name = name
        self.tap_layers = layer.tap_layers
        self._layer = layer
        self.min_confidence = min_confidence
        self._min_reach = min_reach
        self._free = np.split(np.arange(max_contexts * BLOCKS_PER_CONTEXT, dtype=np.int32), max_contexts)
        self._contexts: OrderedDict[RequestId, _Context] = OrderedDict()  # the one that was used longest ago first

    def begin(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """Nothing: it learns a request by its rows."""

    def extend(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """Nothing: what the target said comes with its rows."""

    def sampled(self, request_id: RequestId, position: int, token_ids: Sequence[int], taps: FloatArray) -> None:
        context = self._contexts.get(request_id) or self._add_context(request_id)
        if position != context.target_position:  # rows between were not seen
            context.restart()
        if len(context.unread_ids) + len(token_ids) > MAX_UNREAD:
            context.num_cached = context.next_position = 0
        context.unread_taps.extend(taps.copy())
        context.unread_ids.extend(token_ids)
        context.target_position = position + len(token_ids)

    def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        return self.propose_all([(request_id, num_drafts)])[0]

    def propose_all(self, wanted: Sequence[tuple[RequestId, int]]) -> list[Draft]:
        readings: dict[RequestId, Reading] = {}
        for request_id, num_drafts in wanted:
            context = self._contexts.get(request_id)
            if context is not None and context.unread_ids:
                self._contexts.move_to_end(request_id)
                readings[request_id] = _read(context, min(num_drafts, MAX_GUESSES))
        laws = dict(zip(readings, self._layer.guess(list(readings.values()), self._min_reach), strict=True))
        return [
            chain_with_siblings(laws[request_id], num_drafts, self.min_confidence) if request_id in laws else NO_DRAFT
            for request_id, num_drafts in wanted
        ]

    def forget(self, request_id: RequestId) -> None:
        context = self._contexts.pop(request_id, None)
        if context is not None:
            self._free.append(context.blocks)

    def close(self) -> None:
        self._layer.close()

    def _add_context(self, request_id: RequestId) -> _Context:
        if not self._free:  # more requests than run at once: a preempted one starts anew when it comes back
            self.forget(next(iter(self._contexts)))
        context = self._contexts[request_id] = _Context(self._free.pop())
        return context


def _read(context: _Context, num_guesses: int) -> Reading:
    """What the layer is to read behind what it has read; it counts as read from here on."""
    count = len(context.unread_ids)
    while context.num_cached + count > WINDOW_BLOCKS * BLOCK_TOKENS:  # the oldest block becomes the last one
        context.blocks = np.roll(context.blocks, -1)
        context.num_cached -= BLOCK_TOKENS
    reading = Reading(
        context.blocks,
        context.num_cached,
        context.next_position,
        np.stack(context.unread_taps),
        tuple(context.unread_ids),
        num_guesses,
    )
    context.num_cached += count
    context.next_position += count
    context.unread_taps.clear()
    context.unread_ids.clear()
    return reading
