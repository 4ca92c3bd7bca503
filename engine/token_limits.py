"""Which tokens a request forbids by name: all but `allowed_token_ids`, and what would complete one of its `bad_words`.

A word of several tokens forbids its last one behind the others, where these were generated: the prompt may hold it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cluster.sampling_params import SamplingParams

NOTHING_LEFT = "allowed_token_ids and bad_words leave nothing to choose"


class TokenLimits:
    """Of one sequence. Without state beside the parameters: drafts change nothing."""

    def __init__(self, params: SamplingParams) -> None:
        self._allowed = np.array(params.allowed_token_ids, dtype=np.int64)
        self._forbidden: npt.NDArray[np.bool_] | None = None  # [vocab], made with the first logits
        self._words = tuple(np.array(word, dtype=np.int32) for word in params.bad_words)

    def forbid(self, logits: torch.Tensor, token_ids: npt.NDArray[np.int32], num_generated: int) -> None:
        """Sets the forbidden of `logits` [vocab] to -inf. `token_ids`: the sequence so far, its drafts included."""
        if self._allowed.size:
            if self._forbidden is None:
                self._forbidden = np.ones(len(logits), dtype=np.bool_)
                self._forbidden[self._allowed] = False
            logits.masked_fill_(torch.from_numpy(self._forbidden).to(logits.device), -torch.inf)
        ends = [int(word[-1]) for word in self._words if _ends_with(token_ids, word[:-1], num_generated)]
        if ends:
            logits[torch.tensor(ends, device=logits.device)] = -torch.inf


def _ends_with(token_ids: npt.NDArray[np.int32], beginning: npt.NDArray[np.int32], num_generated: int) -> bool:
    length = len(beginning)
    return length <= num_generated and (length == 0 or bool((token_ids[-length:] == beginning).all()))
