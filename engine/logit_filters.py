"""Which tokens stay in the draw: top-k, then top-p, then min-p, as one threshold on a row of scaled logits.

A threshold keeps ties, so what is kept does not depend on the order in which a sort leaves equal values. Rows are
filtered one by one, so what is kept does not depend on the batch either.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from cluster.sampling_params import SamplingParams

Float32Array = npt.NDArray[np.float32]

TOP_K_CUTS = (np.float32(-6.0), np.float32(-12.0), np.float32(-np.inf))


def has_filter(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def drop_filtered(scaled: Float32Array, params: SamplingParams) -> None:
    """Sets the dropped tokens of `scaled` [vocab] to -inf. Its largest value must be 0."""
    threshold = keep_threshold(scaled, params)
    scaled[scaled < threshold] = -np.inf


def keep_threshold(scaled: Float32Array, params: SamplingParams) -> np.float32:
    """The smallest value that is kept; the largest value (0) always is."""
    threshold = np.float32(-np.inf)
    vocab_size = len(scaled)
    if 0 < params.top_k < vocab_size:
        threshold = _top_k_threshold(scaled, params.top_k)
    if params.top_p < 1.0:
        threshold = _top_p_threshold(scaled[scaled >= threshold], params.top_p)
    if params.min_p > 0.0:
        threshold = max(threshold, np.float32(math.log(params.min_p)))
    return min(threshold, np.float32(0.0))


def _top_k_threshold(scaled: Float32Array, top_k: int) -> np.float32:
    """The k-th largest value, searched among the likely tokens alone where these are enough."""
    for cut in TOP_K_CUTS:
        likely = scaled[scaled >= cut]
        if len(likely) >= top_k:
            break
    index = len(likely) - top_k
    return np.float32(np.partition(likely, index)[index])


def _top_p_threshold(candidates: Float32Array, top_p: float) -> np.float32:
    """The value at which the most likely tokens first hold `top_p` of the mass.

    Everything below `cut` together weighs at most (1 - top_p) of the mass and cannot be needed, so only what is above
    is sorted.
    """
    total = float(np.exp(candidates).sum(dtype=np.float64))
    cut = np.float32(math.log((1.0 - top_p) * total / len(candidates)))
    likely = np.sort(candidates[candidates >= min(cut, np.float32(0.0))])[::-1]
    mass = np.cumsum(np.exp(likely), dtype=np.float64)
    last_kept = min(int(np.searchsorted(mass, top_p * total)), len(likely) - 1)
    return np.float32(likely[last_kept])
