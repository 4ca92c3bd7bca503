"""Which drafts the target keeps.

`match` compares each draft with the token that the target samples at that place with its own position-keyed noise: the
result is what decoding without drafts gives, token for token, for chains and trees alike. `rejection` (Leviathan et al.
2023, Chen et al. 2023) accepts a sampled draft with probability min(1, p / q) and makes up for a rejection from the
residual max(0, p - q): equal in law, and it accepts more often when drafts are drawn from a broad q.

Stop rules come after this: they are applied token by token to the accepted run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.drafting import Accepted

Float64Array = npt.NDArray[np.float64]


def verify_rejection(
    draft_ids: Sequence[int],
    draft_probabilities: Float64Array,
    target_probabilities: Float64Array,
    uniforms: Float64Array,
) -> Accepted:
    """Accepts a prefix of a sampled chain so that every token has the target's law.

    Shapes: draft_probabilities `[k, V]` (what each draft was drawn from, the very numbers), target_probabilities
    `[k + 1, V]`, uniforms `[k + 1, 2]` in [0, 1): the first decides acceptance, the second draws a replacement. They
    must not be the numbers that the drafter drew with.
    """
    tokens: list[int] = []
    for index, token in enumerate(draft_ids):
        p, q = target_probabilities[index], draft_probabilities[index]
        if q[token] <= 0:
            raise ValueError(f"draft {index} has probability 0 under the law that it was drawn from")
        if uniforms[index, 0] * q[token] < p[token]:
            tokens.append(token)
            continue
        tokens.append(_draw(residual(p, q), float(uniforms[index, 1])))
        return Accepted(tuple(tokens), tuple(range(len(tokens))))
    tokens.append(_draw(target_probabilities[len(draft_ids)], float(uniforms[len(draft_ids), 1])))
    return Accepted(tuple(tokens), tuple(range(len(tokens))))


def residual(p: Float64Array, q: Float64Array) -> Float64Array:
    """norm(max(0, p - q)); p itself where they are equal and nothing is left (then nothing is ever rejected)."""
    left: Float64Array = np.maximum(p - q, 0.0)
    total = left.sum()
    return left / total if total > 0 else p


def _draw(probabilities: Float64Array, uniform: float) -> int:
    """The token in whose part of [0, 1) the number falls; never one of probability 0."""
    edges = np.cumsum(probabilities)
    index = int(np.searchsorted(edges, uniform * edges[-1], side="right"))
    # Rounding may leave the number at the last edge: the last token that has any probability.
    return min(index, int(np.flatnonzero(probabilities)[-1]))
