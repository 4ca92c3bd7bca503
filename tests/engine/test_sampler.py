"""Sampling of mixed batches: exactness, filters, penalties, log-probabilities, failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.sampling_params import SamplingParams
from engine.logit_filters import keep_threshold
from engine.noise import NoiseKeys, gumbel_of_bits, vocabulary_bits
from engine.sampler import NO_DISTRIBUTION, SampleRow, SamplerState, Samples, gumbel_argmax, sample, sample_greedily

VOCAB = 1000
PROMPT = np.arange(5, dtype=np.int32)


def row(token_ids: Sequence[int] | np.ndarray = PROMPT, num_generated: int = 0, **params: Any) -> SampleRow:
    state = SamplerState(SamplingParams(max_tokens=64, **params), len(token_ids) - num_generated)
    return SampleRow(state, np.array(token_ids, dtype=np.int32), num_generated)


def logits_of(num_rows: int, seed: int = 0, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def one(logits: torch.Tensor, sample_row: SampleRow) -> int:
    return int(sample(logits[None].clone(), [sample_row]).token_ids[0])


def log_of(probabilities: Sequence[float]) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().float()


def draws(logits: torch.Tensor, num_draws: int, **params: Any) -> np.ndarray:
    """Tokens of consecutive positions under one distribution."""
    tokens = np.zeros(num_draws, dtype=np.int64)
    state = SamplerState(SamplingParams(max_tokens=1, **params), 1)
    history = np.zeros(num_draws + 1, dtype=np.int32)
    for start in range(0, num_draws, 500):
        rows = [SampleRow(state, history[: 1 + index], 0) for index in range(start, min(start + 500, num_draws))]
        tokens[start : start + len(rows)] = sample(logits.repeat(len(rows), 1), rows).token_ids
    return tokens


# --- the draw ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    vocab=st.sampled_from([1, 2, 31, 32, 33, 1000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 5.0, 60.0, 1e6]),
    num_rows=st.integers(1, 5),
)
def test_the_lazy_draw_equals_the_argmax_over_all_noise(seed: int, vocab: int, spread: float, num_rows: int) -> None:
    scaled = (logits_of(num_rows, seed % 1000, vocab) * spread).numpy()
    scaled = scaled - scaled.max(axis=1, keepdims=True)
    keys = NoiseKeys(
        np.full(num_rows, seed, dtype=np.uint64),
        np.arange(num_rows, dtype=np.uint64),
        np.arange(num_rows, dtype=np.uint64) + np.uint64(9),
    )
    want = [
        int(np.argmax(scaled[r] + gumbel_of_bits(vocabulary_bits(vocab, keys.rows(np.array([r]))))))
        for r in range(num_rows)
    ]
    assert gumbel_argmax(scaled, scaled.argmax(axis=1), keys).tolist() == want


@pytest.mark.parametrize(("vocab", "num_draws"), [(32, 30_000), (2000, 10_000)])
def test_chi_square_of_the_sampler_against_softmax(vocab: int, num_draws: int) -> None:
    logits = logits_of(1, seed=3, vocab=vocab, spread=1.5)[0]
    counts = np.bincount(draws(logits, num_draws, seed=20240801), minlength=vocab)
    expected = torch.softmax(logits.double(), 0).numpy() * num_draws
    rare = expected < 8
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    z = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))  # Wilson-Hilferty
    assert abs(z) < 4.9  # 1e-6


def test_consecutive_tokens_are_independent() -> None:
    tokens = draws(log_of([0.5, 0.5]), 10_000, seed=5)
    agreements = int((tokens[1:] == tokens[:-1]).sum())
    assert abs(agreements - 5_000) < 5 * 50


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(0, 1000))
def test_a_token_does_not_depend_on_its_batch(kinds: list[int], seed: int) -> None:
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1},
        {"temperature": 0.7, "top_p": 0.9, "seed": 2},
        {"top_k": 5, "seed": 3},
        {"min_p": 0.1, "logit_bias": {3: 5.0}, "seed": 4},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "seed": 5},
        {"logprobs": 3, "seed": 6},
    ]
    logits = logits_of(len(kinds), seed)
    rows = [row(np.arange(5 + index), 2, **params[kind]) for index, kind in enumerate(kinds)]
    together = sample(logits.clone(), rows)
    for index, kind in enumerate(kinds):
        alone = sample(logits[index : index + 1].clone(), [row(np.arange(5 + index), 2, **params[kind])])
        assert alone.token_ids[0] == together.token_ids[index]
        if kind == 6:
            assert alone.logprobs[0].chosen.rank == together.logprobs[index].chosen.rank
            assert alone.logprobs[0].chosen.logprob == pytest.approx(together.logprobs[index].chosen.logprob, abs=1e-5)


def test_a3_a4_choices_of_one_seed_differ_and_repeat() -> None:
    logits = logits_of(1, spread=0.5)[0]
    first = [one(logits, row(seed=1, choice_index=choice)) for choice in range(8)]
    assert len(set(first)) >= 4
    assert first == [one(logits, row(seed=1, choice_index=choice)) for choice in range(8)]


# --- temperature ------------------------------------------------------------------------------------------------------


def test_q10_greedy_and_sampled_rows_mix_without_dividing_by_zero() -> None:
    logits = logits_of(3)
    got = sample(logits.clone(), [row(temperature=0.0), row(temperature=0.7), row(temperature=1e-6)])
    assert not got.failed
    assert got.token_ids[0] == logits[0].argmax()
    assert got.token_ids[2] == logits[2].argmax()


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-6, 1e-3])
def test_a_vanishing_temperature_is_the_limit_of_greedy(temperature: float) -> None:
    logits = logits_of(1, spread=30.0)[0]
    assert one(logits, row(temperature=temperature)) == int(logits.argmax())


def test_a_greedy_tie_goes_to_the_lower_token() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 700] = logits[:, 300] = 5.0
    assert sample(logits.clone(), [row(temperature=0.0)] * 4).token_ids.tolist() == [300] * 4


def test_greedy_takes_what_the_model_found_on_its_way() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 4.0, 0.0], [float("nan"), 0.0, 1.0]])
    samples = sample_greedily(logits, np.array([1, 0, -1], np.int32))
    assert samples.token_ids.tolist()[:2] == sample_greedily(logits).token_ids.tolist()[:2] == [1, 0]
    assert samples.failed == sample_greedily(logits).failed == {2: NO_DISTRIBUTION}


def test_greedy_never_computes_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("noise on the greedy path")

    monkeypatch.setattr("engine.sampler.gumbel_argmax", forbidden)
    rows = [row(temperature=0.0), row(temperature=0.0, logit_bias={1: 1.0}), row(temperature=0.0, logprobs=1)]
    sample(logits_of(3), rows)


# --- filters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [-1, 0])
def test_q12_an_unset_top_k_does_not_force_greedy(top_k: int) -> None:
    assert len(set(draws(logits_of(1, spread=0.5)[0], 50, top_k=top_k).tolist())) > 10


def test_top_k_keeps_the_k_most_likely() -> None:
    logits = logits_of(1, seed=2)[0]
    allowed = set(logits.topk(3).indices.tolist())
    assert set(draws(logits, 400, top_k=3).tolist()) == allowed


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 500), top_k=st.integers(1, 999), spread=st.sampled_from([0.0, 0.5, 3.0, 12.0]))
def test_top_k_agrees_with_a_full_sort(seed: int, top_k: int, spread: float) -> None:
    scaled = logits_of(1, seed, spread=spread)[0].numpy()
    scaled = scaled - scaled.max()
    threshold = keep_threshold(scaled, SamplingParams(max_tokens=1, top_k=top_k))
    assert threshold == np.sort(scaled)[::-1][top_k - 1]


def test_s4_a_low_temperature_with_top_k_stays_inside() -> None:
    logits = log_of([0.3, 0.3, 0.2, 0.2])
    assert set(draws(logits, 2000, temperature=0.5, top_k=2).tolist()) == {0, 1}


def test_top_p_keeps_the_smallest_set_that_holds_its_mass() -> None:
    logits = log_of([0.5, 0.2, 0.2, 0.06, 0.04])
    assert set(draws(logits, 2000, top_p=0.45).tolist()) == {0}
    assert set(draws(logits, 2000, top_p=0.65).tolist()) == {0, 1, 2}  # a tie is kept as a whole
    assert set(draws(logits, 4000, top_p=0.95).tolist()) == {0, 1, 2, 3}


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 500), top_p=st.floats(0.01, 0.999), spread=st.floats(0.0, 8.0))
def test_top_p_agrees_with_a_full_sort(seed: int, top_p: float, spread: float) -> None:
    logits = logits_of(1, seed, spread=spread)[0].numpy()
    scaled = logits - logits.max()
    threshold = keep_threshold(scaled, SamplingParams(max_tokens=1, top_p=top_p))
    ordered = np.sort(scaled)[::-1].astype(np.float64)
    mass = np.cumsum(np.exp(ordered)) / np.exp(ordered).sum()
    num_kept = int((scaled >= threshold).sum())
    assert mass[num_kept - 1] >= top_p - 1e-6
    num_above = int((scaled > threshold).sum())
    assert num_above == 0 or mass[num_above - 1] < top_p + 1e-6


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logits = log_of([0.4, 0.3, 0.2, 0.1])
    # of the two that top-k leaves the first holds 4/7 = 0.57
    assert set(draws(logits, 500, top_k=2, top_p=0.55).tolist()) == {0}
    assert set(draws(logits, 500, top_k=2, top_p=0.6).tolist()) == {0, 1}


def test_s1_min_p_and_bias_hold_in_every_draw() -> None:
    logits = log_of([0.5, 0.3, 0.1, 0.05, 0.05])
    assert set(draws(logits, 4_000, min_p=0.3).tolist()) == {0, 1}
    assert 1 not in draws(logits, 4_000, logit_bias={1: -100.0})


def test_a_bias_can_force_a_token() -> None:
    assert one(logits_of(1)[0], row(temperature=0.0, logit_bias={77: 100.0})) == 77


# --- penalties --------------------------------------------------------------------------------------------------------


def dense_penalties(logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> torch.Tensor:
    """The definition, token by token."""
    result = logits.clone()
    for token in range(len(logits)):
        value, count = float(logits[token]), output.count(token)
        if token in prompt or count:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        result[token] = value - params.frequency_penalty * count - params.presence_penalty * (count > 0)
    return result


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 19), min_size=1, max_size=30),
    output=st.lists(st.integers(0, 19), max_size=30),
    presence=st.sampled_from([-2.0, 0.0, 1.5]),
    frequency=st.sampled_from([-2.0, 0.0, 0.3]),
    repetition=st.sampled_from([0.5, 1.0, 1.8]),
)
def test_penalties_follow_their_definition(
    prompt: list[int], output: list[int], presence: float, frequency: float, repetition: float
) -> None:
    params = SamplingParams(
        max_tokens=1, temperature=0.0, presence_penalty=presence, frequency_penalty=frequency,
        repetition_penalty=repetition, logprobs=0,
    )  # fmt: skip
    logits = logits_of(1, seed=len(prompt), vocab=20)
    adjusted = logits.clone()
    state = SamplerState(params, len(prompt))
    history = np.array(prompt + output, dtype=np.int32)
    for end in range(len(prompt), len(history) + 1):  # step by step, as a request grows
        adjusted = logits.clone()
        sample(adjusted, [SampleRow(state, history[:end], end - len(prompt))])
    torch.testing.assert_close(adjusted[0], dense_penalties(logits[0], prompt, output, params))


def test_s2_a_frequency_penalty_changes_a_greedy_answer() -> None:
    logits = log_of([0.6, 0.4])
    assert one(logits, row([0, 0, 0], 2, temperature=0.0, frequency_penalty=2.0)) == 1
    assert one(logits, row([0, 0, 0], 0, temperature=0.0, frequency_penalty=2.0)) == 0  # the prompt does not count
    assert one(logits, row([1, 1], 1, temperature=0.0, frequency_penalty=-2.0)) == 1


def test_many_distinct_tokens_outgrow_the_first_capacity() -> None:
    logits = torch.zeros(1, VOCAB)
    history = list(range(500))
    assert one(logits[0], row(history, 499, temperature=0.0, presence_penalty=1.0)) == 0  # token 0 is the prompt
    assert one(logits[0], row(history, 500, temperature=0.0, presence_penalty=1.0)) == 500


def test_min_tokens_keeps_the_stop_token_out_until_then() -> None:
    logits = log_of([0.1, 0.9])
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (1,)}
    assert [one(logits, row([0] * (1 + done), done, **params)) for done in range(4)] == [0, 0, 1, 1]


# --- log-probabilities ------------------------------------------------------------------------------------------------


def sample_one(logits: torch.Tensor, sample_row: SampleRow) -> Samples:
    return sample(logits[None].clone(), [sample_row])


def test_a6_logprobs_zero_gives_the_chosen_token_only() -> None:
    logits = logits_of(1)[0]
    got = sample_one(logits, row(temperature=0.0, logprobs=0)).logprobs[0]
    assert got.top == ()
    assert got.chosen.token_id == int(logits.argmax())
    assert got.chosen.logprob == pytest.approx(float(torch.log_softmax(logits, 0).max()), abs=1e-5)
    assert got.chosen.rank == 1


def test_s15_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = logits_of(1, seed=8)[0]
    sample_row = row(temperature=0.3, top_k=2, logit_bias={5: 100.0}, presence_penalty=2.0, logprobs=3)
    got = sample_one(logits, sample_row).logprobs[0]
    want = torch.log_softmax(logits, 0)
    assert got.chosen.token_id == 5
    assert got.chosen.logprob == pytest.approx(float(want[5]), abs=1e-5)
    assert got.chosen.rank == int((want > want[5]).sum()) + 1
    assert [top.token_id for top in got.top] == want.topk(3).indices.tolist()
    assert [top.rank for top in got.top] == [1, 2, 3]
    assert sum(np.exp(top.logprob) for top in got.top) <= 1


def test_only_rows_that_ask_get_logprobs() -> None:
    got = sample(logits_of(3), [row(), row(logprobs=2), row(temperature=0.0, logprobs=0)])
    assert sorted(got.logprobs) == [1, 2]
    assert [len(got.logprobs[index].top) for index in (1, 2)] == [2, 0]


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_q14_a_poisoned_row_fails_alone(poison: float, temperature: float) -> None:
    logits = logits_of(3)
    healthy = sample(logits.clone(), [row(temperature=temperature)] * 3)
    logits[1, 17] = poison
    got = sample(logits.clone(), [row(temperature=temperature)] * 3)
    assert list(got.failed) == [1]
    assert got.token_ids[[0, 2]].tolist() == healthy.token_ids[[0, 2]].tolist()


def test_q14_a_row_without_any_token_left_fails_alone() -> None:
    logits = logits_of(2)
    logits[0] = -torch.inf
    assert list(sample(logits, [row(), row()]).failed) == [0]


def test_logits_made_in_inference_mode_may_be_penalised() -> None:
    with torch.inference_mode():
        logits = torch.zeros(1, 8)
        logits[0, 3] = 5.0
    assert sample(logits, [row(temperature=0.0, logit_bias={3: -100.0, 5: 1.0})]).token_ids.tolist() == [5]


# --- tokens that a request forbids ------------------------------------------------------------------------------------


def test_only_allowed_tokens_are_drawn_with_the_probabilities_that_they_have_among_each_other() -> None:
    logits = log_of([0.5, 0.2, 0.2, 0.1])
    drawn = draws(logits, 4_000, allowed_token_ids=(1, 3))
    counts = np.bincount(drawn, minlength=4)
    assert counts[0] == counts[2] == 0
    assert abs(counts[1] / 4_000 - 2 / 3) < 0.03
    greedy = row(temperature=0.0, allowed_token_ids=(3, 1))
    assert one(logits, greedy) == 1


def test_a_bad_word_of_one_token_never_comes_and_one_of_several_not_behind_its_beginning() -> None:
    logits = log_of([0.1, 0.2, 0.3, 0.4])
    assert one(logits, row(temperature=0.0, bad_words=((3,),))) == 2
    words = ((1, 2, 3), (0, 2))
    for generated, expected in (([1, 2], 3 - 1), ([0, 1, 2], 3 - 1), ([2], 3), ([1, 2, 1], 3), ([], 3)):
        token_ids = [1, 2, *generated]  # the prompt ends with the beginning of the first word
        at = row(token_ids, num_generated=len(generated), temperature=0.0, bad_words=words)
        assert one(logits, at) == expected, generated
    both = row([0, 1], num_generated=1, temperature=0.0, bad_words=((1, 3), (2,)), allowed_token_ids=(0, 2, 3))
    assert one(logits, both) == 0


def test_limits_count_drafts_as_generated_and_never_change_what_comes_after() -> None:
    logits = log_of([0.1, 0.2, 0.3, 0.4])
    state = SamplerState(SamplingParams(max_tokens=64, temperature=0.0, bad_words=((1, 2, 3),)), 1)
    drafted = SampleRow(state, np.array([0, 1, 2], dtype=np.int32), 2, num_drafts=2)
    other = SampleRow(state, np.array([0, 2, 2], dtype=np.int32), 2, num_drafts=2)
    assert [one(logits, drafted), one(logits, other), one(logits, drafted)] == [2, 3, 2]


def test_a_row_whose_limits_leave_nothing_fails_alone_and_says_why() -> None:
    logits = logits_of(2)
    stuck = row([0, 5], num_generated=1, temperature=0.0, allowed_token_ids=(5,), bad_words=((5, 5),))
    samples = sample(logits.clone(), [stuck, row(temperature=0.0)])
    assert samples.failed == {0: "allowed_token_ids and bad_words leave nothing to choose"}
    assert int(samples.token_ids[1]) == int(logits[1].argmax())


def test_a_mask_does_not_hide_a_broken_model() -> None:
    logits = logits_of(1)
    logits[0, 7] = float("nan")
    samples = sample(logits, [row(temperature=0.0, allowed_token_ids=(1, 2))])
    assert list(samples.failed) == [0]
