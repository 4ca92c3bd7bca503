"""Match verification says what the model says: chains and trees, at any temperature."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.draft import ROOT, Draft
from engine.drafting import verify_match


def test_s6_match_verification_samples_every_position() -> None:
    """T = 1, p = [.6, .4], the draft is always token 0: token 0 must come out in .6 of the cases, not always."""
    targets = np.random.default_rng(6).random(100_000) >= 0.6
    emitted = [verify_match(Draft.chain([0]), (int(first), 0)).token_ids[0] for first in targets]
    assert abs(emitted.count(0) / len(emitted) - 0.6) < 0.005


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    """Up to 15 nodes over 3 tokens; siblings differ."""
    edges: dict[tuple[int, int], None] = {}
    for _ in range(draw(st.integers(0, 15))):
        edges.setdefault((draw(st.integers(ROOT, len(edges) - 1)), draw(st.integers(0, 2))))
    return Draft(tuple(token for _, token in edges), tuple(parent for parent, _ in edges))


@given(trees(), st.integers(0, 2**31))
def test_match_emits_what_decoding_without_drafts_would(draft: Draft, seed: int) -> None:
    def say(prefix: tuple[int, ...]) -> int:
        return int(np.random.default_rng((seed, *prefix)).integers(3))

    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*paths[parent], token) if parent != ROOT else (token,))
    verified = verify_match(draft, [say(()), *map(say, paths)])
    expected: tuple[int, ...] = ()
    while len(expected) < len(verified.token_ids):
        expected = (*expected, say(expected))
    assert verified.token_ids == expected
    # Maximal: no branch of the tree goes on along what was said.
    assert verified.token_ids not in paths
    assert len(verified.rows) == len(verified.token_ids)


def test_wrong_number_of_target_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="need 3 target tokens"):
        verify_match(Draft.chain([1, 2]), [1, 2])


def test_tree_masks_show_each_row_its_own_branch() -> None:
    draft = Draft((5, 6, 7, 8), (ROOT, ROOT, 0, 1))
    assert draft.tree_masks() == (0b00001, 0b00011, 0b00101, 0b01011, 0b10101)
    assert draft.depths() == (1, 1, 2, 2)
    assert not draft.is_chain
    with pytest.raises(ValueError, match="stand before"):
        Draft((1,), (0,))
    with pytest.raises(ValueError, match="same token"):
        Draft((1, 1), (ROOT, ROOT))
