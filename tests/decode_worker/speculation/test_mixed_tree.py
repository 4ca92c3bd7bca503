"""Guesses of two drafters as one tree: nothing lost, nothing twice, the surest first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.speculation.mixed_tree import mixed, share_of
from engine.draft import ROOT, Draft


def chain(*pairs: tuple[int, float]) -> Draft:
    drafted = Draft.chain([token_id for token_id, _ in pairs])
    return Draft(drafted.token_ids, drafted.parents, confidences=tuple(confidence for _, confidence in pairs))


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    """Up to 8 nodes over 3 tokens, siblings differ, confidences fall along branches and in order."""
    edges: dict[tuple[int, int], None] = {}
    for _ in range(draw(st.integers(1, 8))):
        edges.setdefault((draw(st.integers(ROOT, len(edges) - 1)), draw(st.integers(0, 2))))
    confidences = sorted((draw(st.floats(0.01, 1.0)) for _ in edges), reverse=True)
    return Draft(
        tuple(token_id for _, token_id in edges), tuple(parent for parent, _ in edges), confidences=tuple(confidences)
    )


def test_where_two_drafters_differ_their_tokens_stand_side_by_side() -> None:
    tree = mixed([chain((1, 0.5), (2, 0.4)), chain((3, 0.3), (4, 0.1))], 15)
    assert (tree.token_ids, tree.parents) == ((1, 2, 3, 4), (ROOT, 0, ROOT, 2))
    assert tree.confidences == pytest.approx((0.5, 0.4, 0.3, 0.1))


def test_what_both_guess_is_surer_than_either_says() -> None:
    tree = mixed([chain((1, 0.5), (2, 0.25)), chain((1, 0.6), (3, 0.3))], 15)
    assert tree.token_ids == (1, 2, 3)
    assert tree.confidences == pytest.approx((0.8, 0.4, 0.4))


def test_tokens_of_one_place_are_no_surer_than_one() -> None:
    tree = mixed([chain((1, 0.9)), chain((2, 0.9))], 15)
    assert tree.confidences == pytest.approx((0.5, 0.5))


@given(st.lists(trees(), min_size=2, max_size=3))
def test_a_mixed_tree_has_every_guess_once(drafts: list[Draft]) -> None:
    tree = mixed(drafts, 30)
    paths = [tree.path(node) for node in range(len(tree))]
    assert set(paths) == {draft.path(node) for draft in drafts for node in range(len(draft))}
    assert len(set(paths)) == len(paths)
    assert list(tree.confidences) == sorted(tree.confidences, reverse=True)


@given(st.lists(trees(), min_size=2, max_size=2), st.integers(0, 10))
def test_a_cut_tree_hangs_together(drafts: list[Draft], num_nodes: int) -> None:
    whole, cut = mixed(drafts, 30), mixed(drafts, num_nodes)
    assert cut == whole.first(num_nodes)


@given(st.lists(trees(), min_size=2, max_size=2), st.data())
def test_each_drafter_is_judged_by_its_own_guesses(drafts: list[Draft], data: st.DataObject) -> None:
    tree = mixed(drafts, 30)
    node = data.draw(st.integers(ROOT, len(tree) - 1))
    said = tree.path(node)
    accepted: list[int] = []
    while node != ROOT:
        accepted.insert(0, node)
        node = tree.parents[node]
    for draft in drafts:
        paths = {draft.path(own) for own in range(len(draft))}
        share = share_of(draft, tree, accepted)
        assert share.num_accepted == sum(said[:length] in paths for length in range(1, len(said) + 1))
        assert share.num_levels == draft.num_levels


def test_a_drafter_whose_guesses_were_cut_off_has_no_share() -> None:
    assert share_of(chain((7, 0.1)), chain((1, 0.9), (2, 0.8)), [0]) == (0, 0)
