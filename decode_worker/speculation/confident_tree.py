"""The tree of the guesses that are most likely to hold, out of a drafter's laws.

A node's confidence is the probability, as the drafter sees it, that it and all before it are what the target says. The
tree takes the most confident nodes; a node is never more confident than its parent, so they always hang together. They
stand in order of confidence, so that a tree that is cut short loses the least.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decode_worker.speculation.small_products import FloatArray
from engine.draft import NO_DRAFT, ROOT, Draft

# A node's row makes the step a few percent dearer; one that holds less often than this gives less.
MIN_CONFIDENCE = 0.1
WIDTH = 3  # tokens of one law that may become nodes


@dataclass(frozen=True, slots=True)
class Law:
    """The likeliest tokens of a law, the likeliest first, and their probabilities."""

    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]


def likeliest(logits: FloatArray, vocabulary: Sequence[int], width: int = WIDTH) -> Law:
    """The law of `logits` [draft vocab] over the drafter's vocabulary, with the target's token ids."""
    peak = int(logits.argmax())
    weights = np.exp(logits - logits[peak])
    total = float(weights.sum())
    best, probabilities = [peak], [1.0 / total]
    while len(best) < min(width, len(weights)):  # a few maxima are found sooner than a partition
        weights[best[-1]] = -1.0
        best.append(int(weights.argmax()))
        probabilities.append(float(weights[best[-1]]) / total)
    return Law(tuple(vocabulary[index] for index in best), tuple(probabilities))


def chain_with_siblings(laws: Sequence[Law], num_nodes: int, min_confidence: float = MIN_CONFIDENCE) -> Draft:
    """`laws[i]` follows the likeliest tokens of all laws before it: nobody guessed on behind the siblings."""
    candidates = []
    reach = 1.0  # confidence of the chain so far
    for level, law in enumerate(laws):
        for rank, probability in enumerate(law.probabilities):
            candidates.append((reach * probability, level, rank))
        reach *= law.probabilities[0]
    candidates.sort(key=lambda node: (-node[0], node[1], node[2]))
    chosen = [node for node in candidates[:num_nodes] if node[0] >= min_confidence]
    index_of = {(level, rank): index for index, (_, level, rank) in enumerate(chosen)}
    return Draft(
        tuple(laws[level].token_ids[rank] for _, level, rank in chosen),
        tuple(index_of[level - 1, 0] if level else ROOT for _, level, _ in chosen),
        confidences=tuple(confidence for confidence, _, _ in chosen),
    )


def product_tree(laws: Sequence[Law], num_nodes: int, min_confidence: float = MIN_CONFIDENCE) -> Draft:
    """`laws[i]` is the same whatever stands before it: every node may go on with every token of the next law."""
    token_ids: list[int] = []
    parents: list[int] = []
    confidences: list[float] = []
    waiting = [(-p, rank, 0, ROOT) for rank, p in enumerate(laws[0].probabilities)] if laws else []
    heapq.heapify(waiting)
    while waiting and len(token_ids) < num_nodes:
        negative, rank, level, parent = heapq.heappop(waiting)
        if -negative < min_confidence:
            break
        node = len(token_ids)
        token_ids.append(laws[level].token_ids[rank])
        parents.append(parent)
        confidences.append(-negative)
        if level + 1 < len(laws):
            for next_rank, probability in enumerate(laws[level + 1].probabilities):
                heapq.heappush(waiting, (negative * probability, next_rank, level + 1, node))
    return Draft(tuple(token_ids), tuple(parents), confidences=tuple(confidences)) if token_ids else NO_DRAFT
