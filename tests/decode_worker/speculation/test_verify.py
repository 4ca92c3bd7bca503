"""The target alone decides what is said: exact laws by enumeration, equality for match, and mutants that must die."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.speculation.verify import Float64Array, residual, verify_rejection
from engine.draft import ROOT, Draft
from engine.drafting import Accepted, verify_match

EXACT = 1e-12
VOCABULARY = 4
Law = Callable[[tuple[int, ...]], Float64Array]


def law_from(seed: int, *, zero_share: float = 0.0) -> Law:
    """A distribution over 4 tokens for each prefix; some tokens may be impossible."""

    def law(prefix: tuple[int, ...]) -> Float64Array:
        generator = np.random.default_rng((seed, *prefix))
        weights = generator.random(VOCABULARY) * (generator.random(VOCABULARY) >= zero_share)
        weights[int(generator.integers(VOCABULARY))] += 0.1
        return np.asarray(weights / weights.sum())

    return law


def one_hot(law: Law) -> Law:
    return lambda prefix: np.eye(VOCABULARY)[int(np.argmax(law(prefix)))]


def outcomes(
    drafter: Law, target: Law, num_drafts: int, verify: Callable[..., Accepted]
) -> dict[tuple[int, ...], float]:
    """The exact probability of each emitted run: every draft, and every interval of the uniforms that acts alike."""
    result: dict[tuple[int, ...], float] = defaultdict(float)
    for draft in itertools.product(range(VOCABULARY), repeat=num_drafts):
        q = np.array([drafter(draft[:index]) for index in range(num_drafts)]).reshape(num_drafts, VOCABULARY)
        probability = float(np.prod([q[index, token] for index, token in enumerate(draft)]))
        if probability == 0:
            continue
        p = np.array([target(draft[:index]) for index in range(num_drafts + 1)])
        for weight, uniforms in _cells(draft, q, p):
            result[verify(draft, q, p, uniforms).token_ids] += probability * weight
    return result


def _cells(draft: tuple[int, ...], q: Float64Array, p: Float64Array) -> Iterator[tuple[float, Float64Array]]:
    """A point in each cell of the uniforms' cube in which nothing changes, with the cell's volume."""
    num_drafts = len(draft)
    accepts = [min(1.0, p[index, token] / q[index, token]) for index, token in enumerate(draft)]
    for stop in range(num_drafts + 1):
        reached = float(np.prod(accepts[:stop]))
        rejected = 1 - accepts[stop] if stop < num_drafts else 1.0
        law = residual(p[stop], q[stop]) if stop < num_drafts else p[stop]
        edges = np.concatenate([[0.0], np.cumsum(law)])
        for token in range(VOCABULARY):
            width = edges[token + 1] - edges[token]
            if reached * rejected * width <= 0:
                continue
            uniforms = np.zeros((num_drafts + 1, 2))
            for index in range(stop):
                uniforms[index, 0] = accepts[index] / 2
            if stop < num_drafts:
                uniforms[stop, 0] = (1 + accepts[stop]) / 2
            uniforms[stop, 1] = (edges[token] + edges[token + 1]) / 2
            yield reached * rejected * width, uniforms


def largest_error(runs: dict[tuple[int, ...], float], target: Law) -> float:
    """How far each token's conditional law, given the tokens before it, is from the target's."""
    worst = abs(sum(runs.values()) - 1)
    prefixes = {run[:length] for run in runs for length in range(max(map(len, runs)))}
    for prefix in prefixes:
        mass = np.zeros(VOCABULARY)
        for run, probability in runs.items():
            if len(run) > len(prefix) and run[: len(prefix)] == prefix:
                mass[run[len(prefix)]] += probability
        if mass.sum() > EXACT:
            worst = max(worst, float(np.abs(mass / mass.sum() - target(prefix)).max()))
    return worst


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize(
    ("drafter", "target"),
    [
        (law_from(1), law_from(2)),
        (law_from(3), law_from(3)),
        (one_hot(law_from(4)), law_from(5)),
        (law_from(6, zero_share=0.5), law_from(7, zero_share=0.5)),
        (one_hot(law_from(8)), one_hot(law_from(9))),
        (lambda _: np.full(VOCABULARY, 0.25), lambda _: np.full(VOCABULARY, 0.25)),
        (lambda _: np.array([0.5, 0.5, 0.0, 0.0]), lambda _: np.array([0.0, 0.0, 0.5, 0.5])),
    ],
    ids=["different", "equal", "one-hot draft", "masked", "both one-hot", "ties", "disjoint"],
)
def test_rejection_gives_exactly_the_targets_law(drafter: Law, target: Law, num_drafts: int) -> None:
    assert largest_error(outcomes(drafter, target, num_drafts, verify_rejection), target) < EXACT


def _recover_from_p(draft: tuple[int, ...], q: Float64Array, p: Float64Array, u: Float64Array) -> Accepted:
    """Mutant: a rejected draft is replaced by a draw from p instead of the residual."""
    for index, token in enumerate(draft):
        if u[index, 0] * q[index, token] >= p[index, token]:
            drawn = int(np.searchsorted(np.cumsum(p[index]), u[index, 1], side="right"))
            return Accepted((*draft[:index], min(drawn, VOCABULARY - 1)), ())
    return verify_rejection(draft, q, p, u)


def _always_accept(draft: tuple[int, ...], q: Float64Array, p: Float64Array, u: Float64Array) -> Accepted:
    """Mutant: lossy acceptance."""
    return verify_rejection(draft, q, np.vstack([q, p[-1:]]), u)


def _greedy_draft_with_soft_q(draft: tuple[int, ...], q: Float64Array, p: Float64Array, u: Float64Array) -> Accepted:
    """Mutant (S9): the draft is the most likely token, the ratio divides by its soft probability."""
    soft = np.array([law_from(10)(draft[:index]) for index in range(len(draft))])
    return verify_rejection(draft, soft, p, u)


@pytest.mark.parametrize(
    ("mutant", "drafter"),
    [
        (_recover_from_p, law_from(1)),
        (_always_accept, law_from(1)),
        (_greedy_draft_with_soft_q, one_hot(law_from(10))),
    ],
    ids=["recover from p", "always accept", "s9 greedy draft with soft q"],
)
def test_mutants_die(mutant: Callable[..., Accepted], drafter: Law) -> None:
    assert largest_error(outcomes(drafter, law_from(2), 2, mutant), law_from(2)) > 0.01


def test_s7_accepting_when_two_samples_agree_then_residual_is_biased() -> None:
    p, q = law_from(2)(()), law_from(1)(())
    agree = p * q
    biased = agree + (1 - agree.sum()) * residual(p, q)
    assert np.abs(biased - p).sum() / 2 > 0.01


def test_recovered_token_must_not_reuse_the_drafters_noise() -> None:
    """The subtle mutant: one uniform draws the draft and its replacement, so the two are correlated."""
    p, q = law_from(16)(()), law_from(17)(())
    generator = np.random.default_rng(14)
    counts = {"own": np.zeros(VOCABULARY), "reused": np.zeros(VOCABULARY)}
    for u_draft, u_accept, u_draw in generator.random((60_000, 3)):
        draft = int(np.searchsorted(np.cumsum(q), u_draft, side="right"))
        for name, drawn in (("own", u_draw), ("reused", u_draft)):
            uniforms = np.array([[u_accept, drawn], [0.0, drawn]])
            counts[name][verify_rejection((draft,), q[None], np.vstack([p, p]), uniforms).token_ids[0]] += 1
    variation = {name: np.abs(count / count.sum() - p).sum() / 2 for name, count in counts.items()}
    # 60,000 draws put the sampling error of the total variation below 0.008 with all but 1e-6 probability.
    assert variation["own"] < 0.008 < 0.02 < variation["reused"]


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


def test_a_draft_that_its_own_law_excludes_is_refused() -> None:
    p = np.array([[0.5, 0.5], [0.5, 0.5]])
    with pytest.raises(ValueError, match="probability 0"):
        verify_rejection((0,), np.array([[0.0, 1.0]]), p, np.zeros((2, 2)))


def test_tree_masks_show_each_row_its_own_branch() -> None:
    draft = Draft((5, 6, 7, 8), (ROOT, ROOT, 0, 1))
    assert draft.tree_masks() == (0b00001, 0b00011, 0b00101, 0b01011, 0b10101)
    assert draft.depths() == (1, 1, 2, 2)
    assert not draft.is_chain
    with pytest.raises(ValueError, match="stand before"):
        Draft((1,), (0,))
    with pytest.raises(ValueError, match="same token"):
        Draft((1, 1), (ROOT, ROOT))
