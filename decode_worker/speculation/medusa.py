"""The Medusa drafter: one residual block for each position ahead, all on the last hidden state (Cai et al., 2024).

It keeps nothing of a request but its newest state: no KV, no window, no rollback. The guesses do not know each other,
so they hold less often than EAGLE's; one product with the reduced output head gives all guesses of all requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from cluster.identity import RequestId
from decode_worker.speculation.confident_tree import MIN_CONFIDENCE, likeliest, product_tree
from decode_worker.speculation.drafter_file import DrafterFile
from decode_worker.speculation.drafter_shapes import check_drafter
from decode_worker.speculation.small_products import FloatArray, make_product, unit_rms
from engine.draft import NO_DRAFT, Draft
from engine.model_config import ModelConfig


class MedusaDrafter:
    """Implements `draft.Drafter`, `draft.ReadsHiddenStates`, `GuessesTogether` and `KnowsConfidence`."""

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
        """`head` [vocab, hidden] and `final_norm` are the target's. Raises `StartupError` where these do not fit."""
        check_drafter(file, target)
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
        return self.propose_all([(request_id, num_drafts)])[0]

    def propose_all(self, wanted: Sequence[tuple[RequestId, int]]) -> list[Draft]:
        known = [(request_id, num_drafts) for request_id, num_drafts in wanted if request_id in self._states]
        if not known:
            return [NO_DRAFT] * len(wanted)
        num_heads = min(self._num_heads, max(num_drafts for _, num_drafts in known))
        # One guess for one state: the next row brings a new one.
        logits = self._logits(np.stack([self._states.pop(request_id) for request_id, _ in known]), num_heads)
        drafts = {
            request_id: product_tree(
                [likeliest(row, self._vocabulary) for row in rows[:num_drafts]], num_drafts, self.min_confidence
            )
            for (request_id, num_drafts), rows in zip(known, logits, strict=True)
        }
        return [drafts.get(request_id, NO_DRAFT) for request_id, _ in wanted]

    def _logits(self, states: FloatArray, num_heads: int) -> FloatArray:
        """`states` [requests, hidden] -> [requests, heads, draft vocab]: each matrix is read once."""
        count, size = states.shape
        ahead = self._linears(unit_rms(states, self._eps) * self._final_norm).reshape(count, self._num_heads, size)
        ahead = ahead[:, :num_heads]
        inner = np.stack([self._blocks[head](np.ascontiguousarray(ahead[:, head])) for head in range(num_heads)], 1)
        inner += self._biases[:num_heads]
        guessed = self._norms[:num_heads] * (ahead + inner / (1 + np.exp(-inner)))
        return self._head(guessed.reshape(count * num_heads, size)).reshape(count, num_heads, -1)

    def forget(self, request_id: RequestId) -> None:
        self._states.pop(request_id, None)


def _stacked(file: DrafterFile, names: Sequence[str]) -> FloatArray:
    stacked: FloatArray = torch.stack([file.tensors[name].float() for name in names]).numpy()
    return stacked
