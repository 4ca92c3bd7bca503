"""The tree of the likeliest guesses, against the sum over all trees of that size."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from decode_worker.speculation.confident_tree import Law, chain_with_siblings, likeliest, product_tree
from engine.draft import NO_DRAFT, ROOT, Draft

LAWS = (
    Law((10, 11, 12), (0.5, 0.3, 0.1)),
    Law((20, 21, 22), (0.6, 0.2, 0.1)),
    Law((30, 31, 32), (0.9, 0.05, 0.01)),
)


def confidences(draft: Draft) -> list[float]:
    """Of each node in the product of LAWS."""
    found: list[float] = []
    for token_id, parent, depth in zip(draft.token_ids, draft.parents, draft.depths(), strict=True):
        law = LAWS[depth - 1]
        found.append(law.probabilities[law.token_ids.index(token_id)] * (1.0 if parent == ROOT else found[parent]))
    return found


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5, 8, 15, 30])
def test_the_product_tree_has_the_most_confident_nodes_of_all(num_nodes: int) -> None:
    draft = product_tree(LAWS, num_nodes, min_confidence=0.0)
    every = [
        float(np.prod(part))
        for length in (1, 2, 3)
        for part in itertools.product(*(law.probabilities for law in LAWS[:length]))
    ]
    assert confidences(draft) == pytest.approx(sorted(every, reverse=True)[:num_nodes])


def test_a_chain_with_siblings_guesses_on_behind_the_likeliest_alone() -> None:
    draft = chain_with_siblings(LAWS, 6, min_confidence=0.0)
    assert draft.token_ids == (10, 11, 20, 30, 12, 21)
    assert draft.parents == (ROOT, ROOT, 0, 2, ROOT, 0)
    assert draft.first_chain() == Draft.chain((10, 20, 30))


@pytest.mark.parametrize("make", [product_tree, chain_with_siblings])
def test_what_hardly_holds_is_left_out(make: object) -> None:
    assert callable(make)
    draft = make(LAWS, 30, min_confidence=0.25)
    assert min(confidences(draft)) >= 0.25
    assert make(LAWS, 30, min_confidence=0.6) == NO_DRAFT
    assert make((), 4) == NO_DRAFT


def test_likeliest_is_the_softmax_over_the_drafters_vocabulary() -> None:
    logits = np.array([0.0, 2.0, -1.0, 3.0, 1.0], np.float32)
    law = likeliest(logits, [50, 51, 52, 53, 54])
    expected = np.exp(logits) / np.exp(logits).sum()
    assert law.token_ids == (53, 51, 54)
    assert law.probabilities == pytest.approx(expected[[3, 1, 4]].tolist())
