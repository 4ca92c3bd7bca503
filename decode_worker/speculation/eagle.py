"""The EAGLE drafter: guesses from the target's own hidden states, one layer at a time (Li et al., EAGLE-3, 2025).

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
from decode_worker.speculation.confident_tree import MIN_CONFIDENCE, chain_with_siblings, likeliest
from decode_worker.speculation.eagle_layer import BLOCK_TOKENS, EagleLayer, Rows
from decode_worker.speculation.small_products import FloatArray
from engine.draft import Draft

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
    """Implements `draft.Drafter` and `draft.ReadsHiddenStates`."""

    name = "eagle"

    def __init__(
        self,
        layer: EagleLayer,
        max_contexts: int,
        *,
        min_confidence: float = MIN_CONFIDENCE,
        min_reach: float = MIN_REACH,
    ) -> None:
        """The layer's pool holds `max_contexts * BLOCKS_PER_CONTEXT` blocks."""
        self.tap_layers = layer.tap_layers
        self._layer = layer
        self._min_confidence = min_confidence
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
        context = self._contexts.get(request_id)
        if context is None or not context.unread_ids:
            return Draft()
        self._contexts.move_to_end(request_id)
        logits, state = self._read(context)
        laws = [likeliest(logits, self._layer.vocabulary)]
        reach = laws[0].probabilities[0]
        while len(laws) < min(num_drafts, MAX_GUESSES) and reach >= self._min_reach:
            ahead = len(laws) - 1
            rows = Rows(context.blocks, context.num_cached + ahead, context.next_position + ahead)
            logits, state = self._layer.next_guess(rows, state, laws[-1].token_ids[0])
            laws.append(likeliest(logits, self._layer.vocabulary))
            reach *= laws[-1].probabilities[0]
        return chain_with_siblings(laws, num_drafts, self._min_confidence)

    def forget(self, request_id: RequestId) -> None:
        context = self._contexts.pop(request_id, None)
        if context is not None:
            self._free.append(context.blocks)

    def close(self) -> None:
        self._layer.close()

    def _read(self, context: _Context) -> tuple[FloatArray, FloatArray]:
        """The layer reads what is unread, behind what it has read."""
        count = len(context.unread_ids)
        while context.num_cached + count > WINDOW_BLOCKS * BLOCK_TOKENS:  # the oldest block becomes the last one
            context.blocks = np.roll(context.blocks, -1)
            context.num_cached -= BLOCK_TOKENS
        rows = Rows(context.blocks, context.num_cached, context.next_position)
        guess = self._layer.first_guess(rows, np.stack(context.unread_taps), tuple(context.unread_ids))
        context.num_cached += count
        context.next_position += count
        context.unread_taps.clear()
        context.unread_ids.clear()
        return guess

    def _add_context(self, request_id: RequestId) -> _Context:
        if not self._free:  # more requests than run at once: a preempted one starts anew when it comes back
            self.forget(next(iter(self._contexts)))
        context = self._contexts[request_id] = _Context(self._free.pop())
        return context
