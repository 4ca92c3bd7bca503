"""The Medusa drafter: one residual block for each position ahead, all on the last hidden state (Cai et al., 2024).

It keeps nothing of a request but its newest state: no KV, no window, no rollback. The guesses do not know each other,
so they hold less often than EAGLE's; they cost one product with the reduced output head for all of them together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from cluster.identity import RequestId
from decode_worker.speculation.confident_tree import MIN_CONFIDENCE, likeliest, product_tree
from decode_worker.speculation.drafter_file import DrafterFile
from decode_worker.speculation.small_products import FloatArray, make_product, unit_rms
from engine.draft import Draft
from engine.model_config import ModelConfig


class MedusaDrafter:
    """Implements `draft.Drafter`, `draft.ReadsHiddenStates` and `draft.KnowsConfidence`."""

    name = "medusa"

    def __init__(
        self,
        file: DrafterFile,
        target: ModelConfig,
        head: torch.Tensor,
        final_norm: torch.Tensor,
        max_contexts: int,
        *,
        min_confidence: float = MIN_CONFIDENCE,
    ) -> None:
        """`head` [vocab, hidden] and `final_norm` are the target's."""
        self.tap_layers = file.tap_layers
        self._vocabulary: list[int] = file.vocabulary.tolist()
        self._eps = target.rms_norm_eps
        self._final_norm: FloatArray = final_norm.float().numpy()
        self.min_confidence = min_confidence
        self._max_contexts = max_contexts
        blocks = sorted(name for name in file.tensors if name.startswith("blocks.") and name.endswith(".weight"))
        self._num_heads = len(blocks)
        self._linears = make_product(torch.cat([file.tensors[f"linears.{i}.weight"] for i in range(len(blocks))]))
        self._blocks = [make_product(file.tensors[name]) for name in blocks]
        self._biases = _stacked(file, [name.removesuffix("weight") + "bias" for name in blocks])
        self._norms = _stacked(file, [f"norms.{index}" for index in range(len(blocks))])
        self._head = make_product(head[file.vocabulary])
        self._states: OrderedDict[RequestId, FloatArray] = OrderedDict()  # the one that was set longest ago first

    def begin(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """Nothing: it learns a request by its rows."""

    def extend(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """Nothing: what the target said comes with its rows."""

    def sampled(self, request_id: RequestId, position: int, token_ids: Sequence[int], taps: FloatArray) -> None:
        self._states[request_id] = taps[-1, 0].copy()
        self._states.move_to_end(request_id)
        if len(self._states) > self._max_contexts:
            self._states.popitem(last=False)

    def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        state = self._states.pop(request_id, None)  # one guess for one state: the next row brings a new one
        if state is None:
            return Draft()
        num_guesses = min(num_drafts, self._num_heads)
        hidden = unit_rms(state[None], self._eps) * self._final_norm
        ahead = self._linears(hidden).reshape(self._num_heads, -1)[:num_guesses]
        inner = np.concatenate([block(row[None]) for block, row in zip(self._blocks, ahead, strict=False)])
        inner += self._biases[:num_guesses]
        logits = self._head(self._norms[:num_guesses] * (ahead + inner / (1 + np.exp(-inner))))
        laws = [likeliest(row, self._vocabulary) for row in logits]
        return product_tree(laws, num_drafts, self.min_confidence)

    def forget(self, request_id: RequestId) -> None:
        self._states.pop(request_id, None)


def _stacked(file: DrafterFile, names: Sequence[str]) -> FloatArray:
    stacked: FloatArray = torch.stack([file.tensors[name].float() for name in names]).numpy()
    return stacked
