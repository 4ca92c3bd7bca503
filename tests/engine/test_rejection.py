"""Rejection sampling gives the target's law: by enumeration, by chi-square through the sampler, and mutants that die.

Statistical tests have fixed seeds. Each has size 1e-6 (a right sampler fails one in a million seeds, and the seed that
stands here passes); with 150,000 draws over 32 tokens, a law that is off by a total variation of 0.014 is caught with
probability 0.997 (noncentral chi-square, 31 degrees of freedom, noncentrality 4 N TV^2 = 118).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.identity import RequestId
from cluster.sampling_params import SamplingParams
from decode_worker.speculation.draft_model import DraftModelDrafter
from decode_worker.speculation.speculator import DraftingSpeculator
from engine import rejection
from engine.draft import ROOT, Draft, DraftLaw, DrawnGuess
from engine.drafting import verify_match
from engine.rejection import Float64Array, draw_after_guesses, residual
from engine.sampler import SampleRow, SamplerState, row_probabilities, sample
from engine.step import LayerCallback, StepInput, StepOutput
from tests.engine.engine_bench import EngineBench
from tests.engine.hash_runner import VOCAB, HashRunner, fingerprints, logits_of_context

EXACT = 1e-12
SMALL = 4
SIZE = 1e-6
Law = Callable[[tuple[int, ...]], Float64Array]
Draw = Callable[[Float64Array, Sequence[DrawnGuess], Float64Array], int]


def law_from(seed: int, *, zero_share: float = 0.0, size: int = SMALL) -> Law:
    """A distribution for each prefix; some tokens may be impossible."""

    def law(prefix: tuple[int, ...]) -> Float64Array:
        generator = np.random.default_rng((seed, *prefix))
        weights = generator.random(size) * (generator.random(size) >= zero_share)
        weights[int(generator.integers(size))] += 0.1
        return np.asarray(weights / weights.sum())

    return law


def one_hot(law: Law) -> Law:
    return lambda prefix: np.eye(SMALL)[int(np.argmax(law(prefix)))]


def mixed(law: Law, other: Law) -> Law:
    """Equal to `law` but for prefixes that begin with an odd token."""
    return lambda prefix: other(prefix) if prefix and prefix[0] % 2 else law(prefix)


PAIRS: dict[str, tuple[Law, Law]] = {
    "different": (law_from(1), law_from(2)),
    "equal": (law_from(3), law_from(3)),
    "one-hot draft": (one_hot(law_from(4)), law_from(5)),
    "masked": (law_from(6, zero_share=0.5), law_from(7, zero_share=0.5)),
    "both one-hot": (one_hot(law_from(8)), one_hot(law_from(9))),
    "ties": (lambda _: np.full(SMALL, 0.25), lambda _: np.full(SMALL, 0.25)),
    "disjoint": (lambda _: np.array([0.5, 0.5, 0.0, 0.0]), lambda _: np.array([0.0, 0.0, 0.5, 0.5])),
    "residual sometimes zero": (mixed(law_from(10), law_from(11)), law_from(10)),
}


# --- 1. algebra: the law by enumeration -----------------------------------------------------------------------------


def siblings(law: Float64Array, count: int) -> Iterator[tuple[float, tuple[DrawnGuess, ...]]]:
    """Every way to draw up to so many different tokens, one after the other, with its probability."""
    if count == 0:
        yield 1.0, ()
        return
    for token_id in np.flatnonzero(law).tolist():
        first = DrawnGuess(token_id, DraftLaw.of(law))
        rest = first.law.without(token_id)
        if count == 1 or rest is None:
            yield float(law[token_id]), (first,)
            continue
        left = np.zeros(SMALL)
        left[rest.token_ids] = rest.probabilities
        for probability, others in siblings(left, count - 1):
            yield float(law[token_id]) * probability, (first, *others)


def cells(p: Float64Array, guesses: Sequence[DrawnGuess]) -> Iterator[tuple[float, Float64Array]]:
    """A point in each cell of the uniforms' cube in which nothing changes, with the cell's volume: the rule by hand."""
    reached, left, point = 1.0, p, np.zeros(len(guesses) + 1)
    for index, guess in enumerate(guesses):
        q = np.zeros(len(p))
        q[guess.law.token_ids] = guess.law.probabilities
        accept = min(1.0, left[guess.token_id] / q[guess.token_id])
        if accept > 0:
            accepted = point.copy()
            accepted[index] = accept / 2
            yield reached * accept, accepted
        point[index] = (1 + accept) / 2
        reached *= 1 - accept
        if reached <= EXACT:
            return
        left = np.maximum(left - q, 0)
        left = left / left.sum()
    edges = np.concatenate([[0.0], np.cumsum(left)])
    for low, high in itertools.pairwise(edges):
        if high - low > EXACT:
            drawn = point.copy()
            drawn[-1] = (low + high) / 2
            yield reached * float(high - low), drawn


def law_of_rows(
    drafter: Law, target: Law, widths: Sequence[int], draw: Draw, prefix: tuple[int, ...] = ()
) -> dict[tuple[int, ...], float]:
    """The exact law of the runs that a verified tree gives: `widths[i]` siblings below each node of level i."""
    runs: dict[tuple[int, ...], float] = defaultdict(float)
    p = target(prefix)
    for probability, guesses in siblings(drafter(prefix), widths[0] if widths else 0):
        for volume, uniforms in cells(p, guesses):
            token_id = draw(p, guesses, uniforms)
            weight = probability * volume
            if token_id not in [guess.token_id for guess in guesses]:
                runs[(token_id,)] += weight
                continue
            below = law_of_rows(drafter, target, widths[1:], draw, (*prefix, token_id))
            for run, share in below.items():
                runs[(token_id, *run)] += weight * share
    return dict(runs)


def largest_error(runs: dict[tuple[int, ...], float], target: Law) -> float:
    """How far each token's conditional law, given the tokens before it, is from the target's."""
    worst = abs(sum(runs.values()) - 1)
    prefixes = {run[:length] for run in runs for length in range(max(map(len, runs)))}
    for prefix in prefixes:
        mass = np.zeros(SMALL)
        for run, probability in runs.items():
            if len(run) > len(prefix) and run[: len(prefix)] == prefix:
                mass[run[len(prefix)]] += probability
        if mass.sum() > EXACT:
            worst = max(worst, float(np.abs(mass / mass.sum() - target(prefix)).max()))
    return worst


@pytest.mark.parametrize("widths", [(1,), (1, 1, 1), (2,), (3,), (2, 2), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_chains_and_trees_have_exactly_the_targets_law(pair: str, widths: tuple[int, ...]) -> None:
    drafter, target = PAIRS[pair]
    assert largest_error(law_of_rows(drafter, target, widths, draw_after_guesses), target) < EXACT


def test_a_rejected_guess_cannot_be_what_is_said_instead() -> None:
    """So `verify_match` walks on exactly where a guess was accepted."""
    generator = np.random.default_rng(5)
    for _ in range(2000):
        p, law = generator.dirichlet(np.full(6, 0.5)), DraftLaw.of(generator.dirichlet(np.full(6, 0.5)))
        token_id = law.draw(generator.random())
        uniforms = np.array([1 - 2**-53, generator.random()])  # rejects wherever that is possible
        said = draw_after_guesses(p, [DrawnGuess(token_id, law)], uniforms)
        assert (said == token_id) == (p[token_id] >= law.probability(token_id))


# --- 2. against plain loops, at all sizes ---------------------------------------------------------------------------


def draw_in_plain_numbers(p: Float64Array, guesses: Sequence[DrawnGuess], uniforms: Float64Array) -> int:
    left = p.tolist()
    for guess, uniform in zip(guesses, uniforms, strict=False):
        q = dict(zip(guess.law.token_ids.tolist(), guess.law.probabilities.tolist(), strict=True))
        if uniform < left[guess.token_id] / q[guess.token_id]:
            return guess.token_id
        left = [max(0.0, value - q.get(index, 0.0)) for index, value in enumerate(left)]
        total = sum(left)
        left = [value / total for value in left]
    reached = 0.0
    for index, value in enumerate(left):
        reached += value
        if uniforms[len(guesses)] < reached:
            return index
    raise AssertionError("the probabilities do not add up")


@pytest.mark.parametrize("size", [1, 31, 32, 33, 49_152])
def test_draws_on_a_lattice_of_uniforms(size: int) -> None:
    generator = np.random.default_rng(size)
    p, law = generator.dirichlet(np.full(size, 0.3)), DraftLaw.of(generator.dirichlet(np.full(size, 0.3)))
    lattice = (np.arange(2 if size > 1000 else 8) + 0.37) / (2 if size > 1000 else 8)
    for num_guesses in (0, 1, 2):  # ragged
        guesses: list[DrawnGuess] = []
        rest: DraftLaw | None = law
        while rest is not None and len(guesses) < num_guesses:
            guesses.append(DrawnGuess(rest.draw(generator.random()), rest))
            rest = rest.without(guesses[-1].token_id)
        if size == 1 and len(guesses) == 2:
            continue
        for uniforms in itertools.product(lattice, repeat=len(guesses) + 1):
            point = np.array(uniforms)
            assert draw_after_guesses(p, guesses, point) == draw_in_plain_numbers(p, guesses, point)


def test_a_guess_that_its_own_law_excludes_is_refused() -> None:
    guess = DrawnGuess(0, DraftLaw.of(np.array([0.0, 1.0])))
    with pytest.raises(ValueError, match="no probability"):
        draw_after_guesses(np.array([0.5, 0.5]), [guess], np.zeros(2))
    with pytest.raises(ValueError, match="drawn from 1 laws"):
        Draft((1, 2), (ROOT, 0), (guess.law,))


# --- 3 to 5. statistics: law, joint law, acceptance, mutants -------------------------------------------------------


def chi_square(counts: Float64Array, law: Float64Array) -> tuple[float, float]:
    """The statistic, and the value that a right sampler passes with probability `SIZE` (Wilson and Hilferty)."""
    expected = law * counts.sum()
    used = expected > 5
    counts, expected = np.append(counts[used], counts[~used].sum()), np.append(expected[used], expected[~used].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    z = 4.7534  # the normal quantile of 1 - 1e-6
    bound = freedom * (1 - 2 / (9 * freedom) + z * (2 / (9 * freedom)) ** 0.5) ** 3
    return float(((counts - expected) ** 2 / expected).sum()), bound


def count_draws(
    draw: Draw, p: Float64Array, q: Float64Array, num_draws: int, seed: int, num_guesses: int
) -> Counter[int]:
    generator = np.random.default_rng(seed)
    law = DraftLaw.of(q)
    said: Counter[int] = Counter()
    for numbers in generator.random((num_draws, 2 * num_guesses + 1)):
        guesses: list[DrawnGuess] = []
        rest: DraftLaw | None = law
        for uniform in numbers[num_guesses + 1 :]:
            assert rest is not None
            guesses.append(DrawnGuess(rest.draw(uniform), rest))
            rest = rest.without(guesses[-1].token_id) if len(guesses) < num_guesses else None
        said[draw(p, guesses, numbers[: num_guesses + 1])] += 1
    return said


def as_array(counts: Counter[int], size: int) -> Float64Array:
    return np.array([counts[token_id] for token_id in range(size)], np.float64)


P32, Q32 = law_from(21, size=32)(()), law_from(22, size=32)(())
P4, Q4 = np.array([0.1, 0.5, 0.2, 0.2]), np.array([0.6, 0.1, 0.2, 0.1])


def test_the_drawn_tokens_have_the_targets_law() -> None:
    for num_draws, num_guesses in ((150_000, 1), (30_000, 3)):
        counts = count_draws(draw_after_guesses, P32, Q32, num_draws, 31, num_guesses)
        statistic, bound = chi_square(as_array(counts, 32), P32)
        assert statistic < bound


def test_guesses_are_accepted_as_often_as_theory_says() -> None:
    num_draws, rate = 40_000, float(np.minimum(P32, Q32).sum())
    generator, law = np.random.default_rng(32), DraftLaw.of(Q32)
    accepted = 0
    for u_draft, *numbers in generator.random((num_draws, 3)):
        guess = DrawnGuess(law.draw(u_draft), law)
        accepted += draw_after_guesses(P32, [guess], np.array(numbers)) == guess.token_id
    z = (accepted - num_draws * rate) / (num_draws * rate * (1 - rate)) ** 0.5
    assert abs(z) < 5


def _recover_from_p(p: Float64Array, guesses: Sequence[DrawnGuess], uniforms: Float64Array) -> int:
    """A rejected guess is replaced by a draw from p instead of the residual."""
    for guess, uniform in zip(guesses, uniforms, strict=False):
        if uniform * guess.law.probability(guess.token_id) < p[guess.token_id]:
            return guess.token_id
    return DraftLaw.of(p).draw(uniforms[-1])


def _always_accept(p: Float64Array, guesses: Sequence[DrawnGuess], uniforms: Float64Array) -> int:
    """Lossy acceptance."""
    return guesses[0].token_id if guesses else draw_after_guesses(p, guesses, uniforms)


def _upside_down(p: Float64Array, guesses: Sequence[DrawnGuess], uniforms: Float64Array) -> int:
    """min(1, q / p) in place of min(1, p / q)."""
    for guess, uniform in zip(guesses, uniforms, strict=False):
        if uniform * p[guess.token_id] < guess.law.probability(guess.token_id):
            return guess.token_id
    return draw_after_guesses(p, (), uniforms[-1:])


def _greedy_draft_with_soft_q(p: Float64Array, guesses: Sequence[DrawnGuess], uniforms: Float64Array) -> int:
    """S9: the guess is the likeliest token, the ratio divides by its soft probability."""
    likeliest = [DrawnGuess(int(guess.law.token_ids[guess.law.probabilities.argmax()]), guess.law) for guess in guesses]
    return draw_after_guesses(p, likeliest[:1], uniforms)


def _match_two_samples_then_residual(p: Float64Array, guesses: Sequence[DrawnGuess], uniforms: Float64Array) -> int:
    """S7: the guess stays where a sample of the target is the same, else the residual is drawn."""
    for guess, uniform in zip(guesses, uniforms, strict=False):
        if DraftLaw.of(p).draw(uniform) == guess.token_id:
            return guess.token_id
    return DraftLaw.of(residual(p, guesses[0].law)).draw(uniforms[-1]) if guesses else DraftLaw.of(p).draw(uniforms[-1])


def _siblings_as_if_drawn_alone(p: Float64Array, guesses: Sequence[DrawnGuess], uniforms: Float64Array) -> int:
    """The second sibling's ratio divides by the first one's law, though it was drawn without the first."""
    return draw_after_guesses(p, [DrawnGuess(guess.token_id, guesses[0].law) for guess in guesses], uniforms)


def _unnormalised_residual(p: Float64Array, guesses: Sequence[DrawnGuess], uniforms: Float64Array) -> int:
    """The second sibling is compared with what is left of p, not scaled up to 1."""
    left = p.copy()
    for guess, uniform in zip(guesses, uniforms, strict=False):
        if uniform * guess.law.probability(guess.token_id) < left[guess.token_id]:
            return guess.token_id
        left[guess.law.token_ids] = np.maximum(left[guess.law.token_ids] - guess.law.probabilities, 0)
    return DraftLaw.of(left).draw(uniforms[-1])


def _one_uniform_for_all(p: Float64Array, guesses: Sequence[DrawnGuess], uniforms: Float64Array) -> int:
    """The number that rejected a guess also draws its replacement."""
    return draw_after_guesses(p, guesses, np.full(len(uniforms), uniforms[0]))


MUTANTS = [
    (_recover_from_p, 1),
    (_always_accept, 1),
    (_upside_down, 1),
    (_greedy_draft_with_soft_q, 1),
    (_match_two_samples_then_residual, 1),
    (_one_uniform_for_all, 1),
    (_siblings_as_if_drawn_alone, 2),
    (_unnormalised_residual, 2),
]


@pytest.mark.parametrize(("mutant", "num_guesses"), MUTANTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_mutants_die_s7_s9(mutant: Draw, num_guesses: int) -> None:
    p, q = (P32, Q32) if num_guesses == 1 else (P4, Q4)
    counts = count_draws(mutant, p, q, 10_000, 33, num_guesses)
    statistic, bound = chi_square(as_array(counts, len(p)), p)
    assert statistic > bound


def test_recovered_token_must_not_reuse_the_drafters_noise() -> None:
    """The subtle mutant: one uniform draws the guess and its replacement, so the two are correlated."""
    p, q = law_from(16)(()), law_from(17)(())
    law, counts = DraftLaw.of(q), {"own": np.zeros(SMALL), "reused": np.zeros(SMALL)}
    for u_draft, u_accept, u_draw in np.random.default_rng(14).random((40_000, 3)):
        guess = DrawnGuess(law.draw(u_draft), law)
        for name, drawn in (("own", u_draw), ("reused", u_draft)):
            counts[name][draw_after_guesses(p, [guess], np.array([u_accept, drawn]))] += 1
    statistics = {name: chi_square(count, p) for name, count in counts.items()}
    assert statistics["own"][0] < statistics["own"][1]
    assert statistics["reused"][0] > statistics["reused"][1]


# --- through the sampler and the engine -----------------------------------------------------------------------------


def test_the_sampler_takes_guesses_by_the_processed_law() -> None:
    """Temperature, filters, bias and penalties stand before the ratio; noise is keyed, so seeds are the draws."""
    params = SamplingParams(temperature=0.7, top_k=6, logit_bias={3: 1.5}, frequency_penalty=0.4, max_tokens=8)
    history = np.array([1, 5, 5, 2], np.int32)
    generator = np.random.default_rng(41)
    logits = torch.from_numpy(generator.standard_normal(24).astype(np.float32) * 2)
    p = row_probabilities(logits[None].clone(), SampleRow(SamplerState(params, 1), history, 3))
    assert p is not None
    assert np.count_nonzero(p) == 6
    law = DraftLaw.of(generator.dirichlet(np.ones(24)))
    rows = []
    for seed in range(3_000):
        state = SamplerState(replace(params, seed=seed), 1)
        guess = DrawnGuess(law.draw(generator.random()), law)
        rows.append(SampleRow(state, history, 3, guesses=(guess,)))
    samples = sample(logits.repeat(len(rows), 1), rows)
    statistic, bound = chi_square(as_array(Counter(samples.token_ids.tolist()), 24), p)
    assert statistic < bound
    plain = sample(logits.repeat(500, 1), [row._replace(guesses=()) for row in rows[:500]])
    assert samples.token_ids[:500].tolist() != plain.token_ids.tolist(), "the guesses were not looked at"


class OtherModel(HashRunner):
    """A draft model that is often, not always, of the target's opinion."""

    def forward(self, step: StepInput, layer_done: LayerCallback | None) -> StepOutput:
        output = super().forward(step, layer_done)
        tilt = np.random.default_rng(9).standard_normal(VOCAB).astype(np.float32)
        return StepOutput(output.logits * 0.8 + torch.from_numpy(tilt), output.hidden)


def rejecting_speculator() -> DraftingSpeculator:
    drafter = DraftModelDrafter(OtherModel(160, 4), 160, 4, 64, draws_for_rejection=True)
    return DraftingSpeculator({"draft": drafter}, ("draft",), 3, None)


def target_law(history: Sequence[int], params: SamplingParams) -> Float64Array:
    tokens = np.array(history, np.int32)
    row = SampleRow(SamplerState(params, len(tokens)), tokens, 0)
    logits = torch.from_numpy(logits_of_context(fingerprints(tokens, np.arange(len(tokens)))))[None]
    p = row_probabilities(logits, row)
    assert p is not None
    return p


def test_a_worker_that_verifies_by_rejection_has_the_models_joint_law_over_three_tokens() -> None:
    """Scheduler, draft model, executor and engine together; 700 seeds, three tokens of at most two kinds each."""
    params = SamplingParams(temperature=1.2, top_k=2, max_tokens=4)
    prompt, num_requests = [7, 8, 9], 700
    speculator = rejecting_speculator()
    sampling = [replace(params, seed=seed) for seed in range(num_requests)]
    with EngineBench(
        num_blocks=256, max_sequences=32, max_batch_tokens=256, max_waiting=num_requests, speculator=speculator
    ) as bench:
        answers = bench.run([prompt] * num_requests, sampling)
    joint: dict[tuple[int, ...], float] = {}
    for first in np.flatnonzero(target_law(prompt, params)).tolist():
        p_first = target_law(prompt, params)[first]
        for second in np.flatnonzero(law_second := target_law([*prompt, first], params)).tolist():
            law_third = target_law([*prompt, first, second], params)
            for third in np.flatnonzero(law_third).tolist():
                joint[first, second, third] = float(p_first * law_second[second] * law_third[third])
    outcomes = list(joint)
    said = Counter(tuple(answer[:3]) for answer in answers)
    assert set(said) <= set(outcomes)
    statistic, bound = chi_square(
        np.array([said[outcome] for outcome in outcomes], np.float64), np.array(list(joint.values()))
    )
    assert statistic < bound
    counters = speculator.counters()
    assert 0 < counters["speculation_drafts_accepted"] < counters["speculation_drafts_proposed"]


@pytest.mark.parametrize("mutant", [_always_accept, _recover_from_p])
def test_a_wrong_rule_in_the_engine_is_seen_in_its_tokens(mutant: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sampler.draw_after_guesses", mutant)
    with pytest.raises(AssertionError):
        test_a_worker_that_verifies_by_rejection_has_the_models_joint_law_over_three_tokens()


def test_greedy_requests_are_not_drawn_for_and_equal_plain_decoding() -> None:
    sampling = [SamplingParams(max_tokens=20, temperature=0.0)] * 3
    prompts = [[1, 2, 3], [4, 5], [6] * 9]
    with EngineBench(num_blocks=160) as bench:
        plain = bench.run(prompts, sampling)
    with EngineBench(num_blocks=160, speculator=rejecting_speculator()) as bench:
        assert bench.run(prompts, sampling) == plain


def test_s8_the_law_that_is_told_is_the_law_that_was_drawn_from() -> None:
    """Guesses are drawn from logits rounded to bfloat16: the ratio divides by these, bit for bit, not by float32's."""

    class Rounded(HashRunner):
        def forward(self, step: StepInput, layer_done: LayerCallback | None) -> StepOutput:
            output = super().forward(step, layer_done)
            return StepOutput(output.logits.to(torch.bfloat16).float(), output.hidden)

    params, prompt, request_id = SamplingParams(max_tokens=40, seed=3), [3, 1, 4], RequestId("r0")
    drafter = DraftModelDrafter(Rounded(16, 4), 16, 4, 64, draws_for_rejection=True)
    drafter.starts(request_id, params, len(prompt))
    drafter.begin(request_id, prompt)
    draft = drafter.propose(request_id, 4)
    for index, law in enumerate(draft.laws):
        tokens = np.array([*prompt, *draft.token_ids[:index]], np.int32)
        logits = torch.from_numpy(logits_of_context(fingerprints(tokens, np.arange(len(tokens)))))[None]
        row = SampleRow(SamplerState(params, 3), tokens, index)
        rounded, unrounded = (
            row_probabilities(each, row) for each in (logits.to(torch.bfloat16).float(), logits.clone())
        )
        assert rounded is not None
        assert law.probabilities.tobytes() == (rounded / rounded.sum()).tobytes()
        assert unrounded is not None
        assert law.probabilities.tobytes() != unrounded.tobytes()


def test_s19_two_ranks_with_the_same_logits_accept_the_same() -> None:
    """No state and no clock: what is accepted is a function of logits, guesses, seed, choice and position."""
    law = DraftLaw.of(np.random.default_rng(2).dirichlet(np.ones(24)))
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((64, 24)).astype(np.float32))
    said = []
    for _ in range(2):
        rows = [
            SampleRow(
                SamplerState(SamplingParams(max_tokens=9, seed=seed), 1), np.arange(4, dtype=np.int32), 3,
                guesses=(DrawnGuess(law.draw(seed / 64), law),),
            )
            for seed in range(64)
        ]  # fmt: skip
        said.append(sample(logits.clone(), rows).token_ids.tolist())
    assert said[0] == said[1]


def test_a_draft_that_is_cut_keeps_the_laws_of_what_is_left() -> None:
    laws = [DraftLaw.of(np.eye(8)[token]) for token in (5, 6, 7)]
    tree = Draft((5, 6, 7), (ROOT, ROOT, 0), tuple(laws))
    assert tree.first(2).laws == tuple(laws[:2])
    assert tree.first_chain() == Draft.chain([5, 7])
    assert tree.first_chain().laws == (laws[0], laws[2])
    assert [guess.token_id for guess in tree.drawn_children(ROOT, 3)] == [5, 6]
    assert tree.drawn_children(0, 2) == ()
    assert verify_match(tree, [5, 7, 0, 1]).token_ids == (5, 7, 1)
    assert rejection.residual(np.array([0.5, 0.5]), DraftLaw.of(np.array([0.5, 0.5]))).tolist() == [0.5, 0.5]
