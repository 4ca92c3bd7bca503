"""Drawing tokens where the logits are: for a GPU, so that a vocabulary of logits does not travel to the host.

The definitions are `engine.logit_filters`'s and `engine.noise`'s; only the chosen ids come back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from cluster.sampling_params import SamplingParams
from engine.draft import DrawnGuess
from engine.logit_filters import has_filter
from engine.noise import NoiseKeys


def scale_and_filter(
    logits: torch.Tensor,
    peaks: npt.NDArray[np.float32],
    temperatures: npt.NDArray[np.float32],
    params: Sequence[SamplingParams],
) -> torch.Tensor:
    """What rows of `logits` `[S, vocab]` float32 are drawn by; peaks are the rows' largest logits."""
    device = logits.device
    scaled = logits - torch.from_numpy(peaks).to(device)[:, None]
    scaled /= torch.from_numpy(temperatures).to(device)[:, None]
    if any(has_filter(one) for one in params):
        thresholds = keep_thresholds(scaled, params)
        scaled.masked_fill_(scaled < thresholds[:, None], -torch.inf)
    return scaled


def draw(scaled: torch.Tensor, keys: NoiseKeys) -> npt.NDArray[np.int64]:
    """One token for each row of `scale_and_filter`'s."""
    # Not at the top: triton need not be installed where logits are on the host.
    from engine.kernels.triton.sampling import gumbel_argmax

    device = scaled.device
    tokens = gumbel_argmax(
        scaled,
        torch.from_numpy(keys.seeds.view(np.int64)).to(device),
        torch.from_numpy(keys.choice_indices.astype(np.int32)).to(device),
        torch.from_numpy(keys.positions.astype(np.int32)).to(device),
    )
    chosen: npt.NDArray[np.int64] = tokens.cpu().numpy()
    return chosen


def draw_guessed(
    scaled: torch.Tensor, guesses: Sequence[Sequence[DrawnGuess]], uniforms: Sequence[npt.NDArray[np.float64]]
) -> npt.NDArray[np.int64]:
    """`engine.rejection.draw_after_guesses` of each row of `scaled` `[S, vocab]` with its guesses and numbers.

    Raises ValueError for a guess that its law could not draw.
    """
    from engine.kernels.triton.rejection import draw_after_guesses

    device, vocab_size = scaled.device, scaled.shape[1]
    laid = [guess for row in guesses for guess in row]
    for guess in laid:
        if guess.law.probability(guess.token_id) <= 0:
            raise ValueError(f"the guess {guess.token_id} has no probability under the law that it was drawn from")
    starts = np.concatenate(([0], np.cumsum([len(row) for row in guesses]))).astype(np.int32)
    laws = torch.zeros((len(laid), vocab_size), dtype=torch.float64, device=device)
    for index, guess in enumerate(laid):
        laws[index, torch.from_numpy(guess.law.token_ids).to(device)] = torch.from_numpy(guess.law.probabilities).to(
            device
        )
    tokens = draw_after_guesses(
        scaled,
        torch.from_numpy(starts).to(device),
        torch.tensor([guess.token_id for guess in laid], dtype=torch.int32, device=device),
        laws,
        torch.from_numpy(np.concatenate(uniforms)).to(device),
        max(len(row) for row in guesses),
    )
    chosen: npt.NDArray[np.int64] = tokens.cpu().numpy()
    return chosen


def keep_thresholds(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """`engine.logit_filters.keep_threshold` of each row, `[S]`, from one sort of all rows."""
    device, vocab_size = scaled.device, scaled.shape[1]
    falling = scaled.sort(dim=1, descending=True).values
    top_k = torch.tensor([one.top_k if 0 < one.top_k < vocab_size else vocab_size for one in params], device=device)
    thresholds = falling.gather(1, (top_k - 1)[:, None])[:, 0]
    # The mass of what top-k keeps, ties of its last value with it.
    masses = torch.where(falling >= thresholds[:, None], falling.double().exp(), 0.0)
    so_far = masses.cumsum(1)
    top_p = torch.tensor([one.top_p for one in params], dtype=torch.float64, device=device)
    wanted = (top_p * masses.sum(1))[:, None]
    last = torch.searchsorted(so_far, wanted).clamp(max=vocab_size - 1)
    nucleus = torch.where(top_p < 1.0, falling.gather(1, last)[:, 0], thresholds)
    least = torch.tensor(
        [math.log(one.min_p) if one.min_p > 0 else -math.inf for one in params], dtype=torch.float32, device=device
    )
    return torch.maximum(torch.maximum(thresholds, nucleus), least).clamp(max=0.0)
