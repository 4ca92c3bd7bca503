"""Rejection sampling of one token where a drafter has drawn guesses for it: the target's law, exactly.

    p ── guess 1 stays with min(1, p / q1) ── else p = norm(max(0, p - q1)) ── guess 2 ... ── a draw from what is left

The token of a row then either is one of the guesses below it or cannot be: a rejected guess has no mass left. So the
walk that follows (`engine.drafting.verify_match`) is the same for both ways of verifying, for chains and for trees, and
each row is drawn by itself. Sources: Leviathan et al. 2023 and Chen et al. 2023 (chains), Miao et al. 2024 (siblings).

Unlike with `match`, tokens depend on what was guessed; only their law does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.draft import DraftLaw, DrawnGuess

Float64Array = npt.NDArray[np.float64]


def probabilities_of(scaled: npt.NDArray[np.float32]) -> Float64Array:
    """The law of scaled and filtered logits [vocab] whose largest value is 0."""
    weights = np.exp(scaled, dtype=np.float64)
    weights /= weights.sum()
    return weights


def draw_after_guesses(p: Float64Array, guesses: Sequence[DrawnGuess], uniforms: Float64Array) -> int:
    """A token with law `p` [vocab]: one of the guesses as often as it may be.

    `uniforms` [len(guesses) + 1] in [0, 1): one decides about each guess, the last one draws what no guess was. They
    must not be the numbers that the drafter drew with.
    """
    left = p
    for guess, uniform in zip(guesses, uniforms, strict=False):
        q = guess.law.probability(guess.token_id)
        if q <= 0:
            raise ValueError(f"the guess {guess.token_id} has no probability under the law that it was drawn from")
        if uniform * q < left[guess.token_id]:
            return guess.token_id
        left = residual(left, guess.law)
    return DraftLaw.of(left).draw(float(uniforms[len(guesses)]))


def residual(p: Float64Array, q: DraftLaw) -> Float64Array:
    """norm(max(0, p - q)); p itself where they are equal and nothing is left (then nothing is ever rejected)."""
    left = p.copy()
    left[q.token_ids] = np.maximum(p[q.token_ids] - q.probabilities, 0.0)
    total = left.sum()
    return left / total if total > 0 else p
