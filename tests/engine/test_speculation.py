"""Speculation in the engine: whatever is guessed, the tokens are those of the model alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.errors import InvalidRequest
from cluster.identity import RequestId
from cluster.sampling_params import SamplingParams
from decode_worker.speculation.draft import Drafter
from decode_worker.speculation.draft_model import DraftModelDrafter
from decode_worker.speculation.gate import StepCosts
from decode_worker.speculation.ngram import NgramDrafter
from decode_worker.speculation.speculator import DraftingSpeculator
from decode_worker.speculation.step_costs import measure_step_costs
from decode_worker.speculation.suffix import SuffixDrafter
from engine.draft import ROOT, Draft
from engine.drafting import NoDraftReason, verify_match
from engine.request import FinishReason, LandedPrompt
from tests.engine.engine_bench import EngineBench
from tests.engine.hash_runner import VOCAB, HashRunner, expected_tokens, fingerprints

GREEDY: dict[str, Any] = {"temperature": 0.0}
NUM_DRAFTS = 4
GUESSING = ("always right", "junk", "sometimes right", "trees", "draft")
KINDS: list[dict[str, Any]] = [
    GREEDY,
    {"seed": 11},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2},
    {"top_k": 5, "presence_penalty": 0.8, "frequency_penalty": 1.4, "seed": 3},
    {"min_p": 0.05, "repetition_penalty": 1.3, "logit_bias": {3: 2.0}, "seed": 4},
    {"temperature": 0.0, "frequency_penalty": 2.0},
    {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": (0, 7, 21, 33)},
    {"temperature": 0.8, "seed": 9, "stop_token_ids": (1, 2, 3)},
    {"temperature": 0.9, "seed": 5, "allowed_token_ids": tuple(range(0, 40, 3))},
    {"temperature": 0.0, "allowed_token_ids": (4, 8, 15, 16, 23), "bad_words": ((4, 8), (15, 15), (8, 16, 4), (23,))},
]


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, num_tokens)]


class OracleDrafter:
    """Knows each request's answer; `is_wrong_at(position)` tells where it guesses something else."""

    name = "draft"  # one that a request may ask for

    def __init__(self, answers: dict[str, list[int]], is_wrong_at: Any = lambda position: False) -> None:
        self._answers = answers
        self._is_wrong_at = is_wrong_at
        self._known: dict[RequestId, list[int]] = {}

    def begin(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        assert request_id not in self._known, "begun twice"
        self._known[request_id] = list(token_ids)

    def extend(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        self._known[request_id] += token_ids

    def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        known, answer = self._known[request_id], self._answers[request_id]
        assert known == answer[: len(known)], "the drafter saw a token that the model did not say"
        end = len(known) + num_drafts
        guesses = (answer[len(known) : end] + [0] * num_drafts)[:num_drafts]
        return Draft.chain(
            [(guess + self._is_wrong_at(len(known) + index)) % VOCAB for index, guess in enumerate(guesses)]
        )

    def forget(self, request_id: RequestId) -> None:
        self._known.pop(request_id, None)


class Constant(NgramDrafter):
    """Always guesses one token, and nothing else."""

    name = "constant"

    def __init__(self, token_id: int) -> None:
        super().__init__()
        self._token_id = token_id

    def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        return Draft.chain([self._token_id] * num_drafts)


class TreeDrafter(OracleDrafter):
    """Trees whose right branch, when there is one, is anywhere: each node has wrong siblings before or after it."""

    name = "tree"

    def __init__(self, answers: dict[str, list[int]], randomness: random.Random) -> None:
        super().__init__(answers)
        self._randomness = randomness

    def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        right = super().propose(request_id, num_drafts).token_ids
        token_ids: list[int] = []
        parents: list[int] = []
        on_branch = [ROOT]  # the rows of what is right so far
        while len(token_ids) < num_drafts:
            parent = (
                on_branch[-1] if self._randomness.random() < 0.6 else self._randomness.randint(ROOT, len(parents) - 1)
            )
            depth = len(on_branch) - 1
            token_id = self._randomness.randrange(VOCAB)
            if parent == on_branch[-1] and self._randomness.random() < 0.7:
                token_id = right[depth]
            if (parent, token_id) in zip(parents, token_ids, strict=True):
                continue
            if parent == on_branch[-1] and token_id == right[depth]:
                on_branch.append(len(token_ids))
            token_ids.append(token_id)
            parents.append(parent)
        return Draft(tuple(token_ids), tuple(parents))


def speculator(drafter: Drafter, costs: StepCosts | None = None, num_drafts: int = NUM_DRAFTS) -> DraftingSpeculator:
    return DraftingSpeculator({drafter.name: drafter}, (drafter.name,), num_drafts, costs)


def oracle(
    prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], is_wrong_at: Any = lambda position: False
) -> DraftingSpeculator:
    pairs = zip(prompts, sampling, strict=True)
    answers = {f"r{index}": [*tokens, *expected_tokens(tokens, params)] for index, (tokens, params) in enumerate(pairs)}
    return speculator(OracleDrafter(answers, is_wrong_at))


def cases(num: int, max_tokens: int = 24) -> tuple[list[list[int]], list[SamplingParams]]:
    lengths = [1, 3, 15, 16, 17, 33, 40, 64]
    prompts = [prompt(lengths[index % 8], index) for index in range(num)]
    # Stop tokens are rare enough in 24 of 50 tokens that runs of every length end inside of a draft somewhere.
    return prompts, [SamplingParams(max_tokens=max_tokens, **KINDS[index % len(KINDS)]) for index in range(num)]


def drafter_named(name: str, prompts: list[list[int]], sampling: list[SamplingParams]) -> DraftingSpeculator | None:
    randomness = random.Random(5)
    if name == "off":
        return None
    if name == "draft":  # the model itself
        return speculator(DraftModelDrafter(HashRunner(48, 4), 48, 4, 256))
    if name == "draft, small pool":  # of another block size: contexts lose their blocks to each other
        return speculator(DraftModelDrafter(HashRunner(36, 3), 36, 3, 90))
    if name == "ngram":
        return speculator(NgramDrafter(min_ngram=1))
    if name == "suffix":
        return speculator(SuffixDrafter(min_match=1))
    if name == "trees":
        pairs = zip(prompts, sampling, strict=True)
        answers = {f"r{index}": [*tokens, *expected_tokens(tokens, each)] for index, (tokens, each) in enumerate(pairs)}
        return speculator(TreeDrafter(answers, randomness), num_drafts=15)
    if name == "always right":
        return oracle(prompts, sampling)
    if name == "junk":
        return oracle(prompts, sampling, lambda position: 1)
    return oracle(prompts, sampling, lambda position: randomness.random() < 0.3)


@pytest.mark.parametrize(
    "name", ["off", "ngram", "suffix", "always right", "junk", "sometimes right", "trees", "draft", "draft, small pool"]
)
@pytest.mark.parametrize("max_sequences", [1, 8])
@pytest.mark.parametrize("chunk", [1, 16, 17])
def test_tokens_do_not_depend_on_the_drafter(name: str, max_sequences: int, chunk: int) -> None:
    prompts, sampling = cases(8)
    drafter = drafter_named(name, prompts, sampling)
    with EngineBench(
        num_blocks=256, max_sequences=max_sequences, long_prefill_token_threshold=chunk, speculator=drafter
    ) as bench:
        assert bench.run(prompts, sampling) == [expected_tokens(*pair) for pair in zip(prompts, sampling, strict=True)]
    if drafter is None:
        return
    counters = drafter.counters()
    assert counters["speculation_drafts_proposed"] > 0
    assert (counters["speculation_drafts_accepted"] > 0) == (name not in ("junk",))


@pytest.mark.parametrize(
    "name", ["suffix", "always right", "junk", "sometimes right", "trees", "draft", "draft, small pool"]
)
@pytest.mark.parametrize(("num_blocks", "block_tokens", "max_batch_tokens"), [(10, 4, 16), (12, 3, 9), (45, 1, 64)])
def test_s23_a_preempted_request_has_no_drafts(
    name: str, num_blocks: int, block_tokens: int, max_batch_tokens: int
) -> None:
    prompts = [prompt(1 + index % 12, index) for index in range(24)]
    sampling = [SamplingParams(max_tokens=16, **KINDS[index % len(KINDS)]) for index in range(24)]
    drafter = drafter_named(name, prompts, sampling)
    with EngineBench(
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        max_sequences=8,
        max_batch_tokens=max_batch_tokens,
        speculator=drafter,
    ) as bench:
        assert bench.run(prompts, sampling) == [expected_tokens(*pair) for pair in zip(prompts, sampling, strict=True)]
    assert drafter is not None
    assert drafter.counters()["speculation_drafts_proposed"] > 0


def test_s30_after_full_acceptance_the_draft_model_has_read_what_the_target_has() -> None:
    request_id = RequestId("r0")
    params = SamplingParams(max_tokens=40, seed=3)
    tokens = prompt(5)
    answer = [*tokens, *expected_tokens(tokens, params)]
    drafter = DraftModelDrafter(HashRunner(16, 4), 16, 4, 64)
    drafter.starts(request_id, params, len(tokens))
    drafter.begin(request_id, answer[:6])
    assert drafter.propose(request_id, 4) == Draft.chain(answer[6:10])
    assert drafter.num_forward_tokens == 6 + 3
    drafter.extend(request_id, answer[6:11])  # all of them, and the target's own
    assert drafter.propose(request_id, 4) == Draft.chain(answer[11:15])
    assert drafter.num_forward_tokens == 9 + 2 + 3  # the last guess and the target's token were unread
    wrong = (answer[11] + 1) % VOCAB
    drafter.extend(request_id, [wrong])  # the target rejects all: what is behind is written anew
    guesses = drafter.propose(request_id, 1)
    assert guesses == Draft.chain(expected_tokens([*answer[:11], wrong], replace(params, max_tokens=7), 6)[:1])
    assert drafter.num_cached(request_id) == 12
    drafter.forget(request_id)


def test_the_draft_model_reads_its_weights_once_for_all_requests() -> None:
    """Prompts of different lengths, one of them longer than a step, and a pool that not all fit into at once."""
    prompts = [prompt(5, 1), prompt(300, 2), prompt(9, 3)]
    params = [SamplingParams(max_tokens=40, seed=seed) for seed in range(3)]
    answers = [expected_tokens(*pair) for pair in zip(prompts, params, strict=True)]
    for num_blocks, num_steps in ((100, 6), (78, 9)):
        runner = HashRunner(num_blocks, 4)
        drafter = DraftModelDrafter(runner, num_blocks, 4, 512)
        for index, tokens in enumerate(prompts):
            drafter.starts(RequestId(f"r{index}"), params[index], len(tokens))
            drafter.begin(RequestId(f"r{index}"), tokens)
        drafts = drafter.propose_all([(RequestId(f"r{index}"), 4) for index in range(3)])
        assert [list(draft.token_ids) for draft in drafts] == [answer[:4] for answer in answers]
        assert len(runner.batch_sizes) <= num_steps, "one after the other it would be 13"


def test_a_drafter_that_cannot_pay_in_so_large_a_batch_is_not_asked() -> None:
    """And no hidden state is kept for it: at 16 streams the gate costs one look at its table in a step."""
    prompts, sampling = [prompt(5, index) for index in range(8)], [SamplingParams(max_tokens=30, **GREEDY)] * 8

    class Counting(NgramDrafter):
        num_calls = 0

        def begin(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
            self.num_calls += 1
            super().begin(request_id, token_ids)

    drafter = Counting(min_ngram=1)
    gated = speculator(drafter, StepCosts((1, 8, 16), (1.0, 8.0, 16.0), 0.01))
    with EngineBench(speculator=gated) as bench:
        assert bench.run(prompts, sampling) == [expected_tokens(*pair) for pair in zip(prompts, sampling, strict=True)]
    assert drafter.num_calls == 0
    assert gated.counters()["speculation_no_draft_does_not_pay"] > 200


def test_s26_the_draft_model_stops_at_its_own_context() -> None:
    request_id, params = RequestId("r0"), SamplingParams(max_tokens=40, **GREEDY)
    drafter = DraftModelDrafter(HashRunner(16, 4), 16, 4, 12)
    drafter.starts(request_id, params, 10)
    drafter.begin(request_id, prompt(10))
    assert len(drafter.propose(request_id, 4)) == 2
    drafter.extend(request_id, [1, 2])
    assert len(drafter.propose(request_id, 4)) == 0


def test_s13_an_end_that_is_only_guessed_ends_the_guessing_alone() -> None:
    tokens = prompt(6)
    plain = expected_tokens(tokens, SamplingParams(max_tokens=20, **GREEDY))
    stop = next(token for token in range(VOCAB) if token not in plain)
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(stop,), **GREEDY)
    answers = {"r0": [*tokens, *(stop if index % 5 == 1 else token for index, token in enumerate(plain))]}

    class Ends(OracleDrafter):
        def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
            known = self._known[request_id]
            return Draft.chain(answers["r0"][len(known) : len(known) + num_drafts])

    with EngineBench(speculator=speculator(Ends(answers))) as bench:
        assert bench.run([tokens], [sampling]) == [plain]
        assert bench.sink.of("r0")[-1].finish_reason is FinishReason.LENGTH


def test_s5_temperatures_of_zero_next_to_zero_and_one_share_a_verified_batch() -> None:
    prompts = [prompt(6, index) for index in range(3)]
    sampling = [SamplingParams(max_tokens=20, temperature=value, seed=7) for value in (0.0, 1e-6, 1.0)]
    for name in ("always right", "junk", "trees"):
        drafter = drafter_named(name, prompts, sampling)
        with EngineBench(speculator=drafter) as bench:
            answers = bench.run(prompts, sampling)
        assert answers == [expected_tokens(*pair) for pair in zip(prompts, sampling, strict=True)]


def test_s1_s4_what_filters_forbid_is_never_accepted_however_often_it_is_guessed() -> None:
    tokens = prompt(6)
    kinds: list[dict[str, Any]] = [{"min_p": 0.3}, {"top_k": 2, "temperature": 0.1}, {"logit_bias": {17: -100.0}}]
    for kind in kinds:
        params = [SamplingParams(max_tokens=60, seed=seed, **kind) for seed in range(6)]
        junk = speculator(Constant(17), num_drafts=3)
        with EngineBench(num_blocks=256, speculator=junk) as bench:
            answers = bench.run([tokens] * 6, params)
        assert answers == [expected_tokens(tokens, each) for each in params]
        if "logit_bias" in kind:
            assert junk.counters()["speculation_drafts_accepted"] == 0


def test_s17_prompt_logprobs_are_those_without_drafts() -> None:
    prompts = [prompt(30 + 7 * index, index) for index in range(6)]
    sampling = [SamplingParams(max_tokens=12, prompt_logprobs=1, logprobs=1, **GREEDY)] * 6
    given = []
    for drafter in (None, drafter_named("sometimes right", prompts, sampling)):
        with EngineBench(num_blocks=256, long_prefill_token_threshold=16, speculator=drafter) as bench:
            bench.run(prompts, sampling)
            given.append([bench.sink.of(f"r{index}")[0].prompt_logprobs for index in range(6)])
    assert given[0] == given[1]
    assert [len(row) for row in given[0]] == [len(tokens) - 1 for tokens in prompts]


@pytest.mark.parametrize("name", ["draft", "suffix"])
def test_s31_a_cached_prefix_changes_no_acceptance(name: str) -> None:
    tokens, params = prompt(64), SamplingParams(max_tokens=24, seed=4)
    drafter = drafter_named(name, [tokens], [params])
    assert drafter is not None
    accepted = []
    with EngineBench(speculator=drafter) as bench:
        for request_id in ("cold", "warm"):
            before = drafter.counters()["speculation_drafts_accepted"]
            bench.submit(request_id, tokens, sampling=params)
            bench.sink.end(request_id)
            accepted.append(drafter.counters()["speculation_drafts_accepted"] - before)
        assert bench.sink.of("warm")[0].cached_tokens > 48
    assert accepted[0] == accepted[1]


def test_choices_of_one_prompt_are_guessed_for_each_by_itself() -> None:
    tokens = prompt(21)
    sampling = [SamplingParams(max_tokens=20, seed=5, choice_index=index) for index in range(4)]
    prompts = [tokens] * 4
    for name in ("sometimes right", "trees", "draft", "junk"):
        with EngineBench(speculator=drafter_named(name, prompts, sampling)) as bench:
            answers = bench.run(prompts, sampling)
        assert answers == [expected_tokens(tokens, params) for params in sampling]
        assert len({tuple(answer) for answer in answers}) == 4


def test_s18_k18_drafts_take_no_token_from_a_prompt_and_preempt_nobody() -> None:
    first = [prompt(4, 1), prompt(30, 2)]
    sampling = [SamplingParams(max_tokens=24, **GREEDY)] * 2
    drafter = oracle(first, sampling)
    with EngineBench(max_sequences=4, max_batch_tokens=4, speculator=drafter, num_blocks=64) as bench:
        assert bench.run(first, sampling) == [expected_tokens(*pair) for pair in zip(first, sampling, strict=True)]
        # 30 prompt tokens at 3 a step beside the decode: the prompt is never slowed down by drafts.
        assert drafter.counters()["speculation_no_draft_no_budget"] >= 30 // 3 - 2


def test_s24_a_request_without_budget_for_drafts_goes_on_plainly() -> None:
    prompts = [prompt(5, index) for index in range(4)]
    sampling = [SamplingParams(max_tokens=20, **GREEDY)] * 4
    drafter = oracle(prompts, sampling)
    with EngineBench(max_sequences=4, max_batch_tokens=5, speculator=drafter) as bench:
        assert bench.run(prompts, sampling) == [expected_tokens(*pair) for pair in zip(prompts, sampling, strict=True)]
    counters = drafter.counters()
    assert counters["speculation_no_draft_no_budget"] > 0
    assert counters["speculation_drafts_accepted"] > 0


def test_s25_all_drafts_rejected_still_gives_one_token_a_step() -> None:
    prompts, sampling = [prompt(5)], [SamplingParams(max_tokens=12, **GREEDY)]
    drafter = oracle(prompts, sampling, lambda position: 1)
    with EngineBench(speculator=drafter) as bench:
        assert bench.run(prompts, sampling) == [expected_tokens(prompts[0], sampling[0])]
        assert all(len(output.token_ids) == 1 for output in bench.sink.of("r0"))
    assert drafter.counters()["speculation_drafts_accepted"] == 0
    assert drafter.counters()["speculation_steps"] > 0


def test_accepted_drafts_give_several_tokens_in_one_step() -> None:
    prompts, sampling = [prompt(5)], [SamplingParams(max_tokens=21, **GREEDY)]
    with EngineBench(speculator=oracle(prompts, sampling)) as bench:
        assert bench.run(prompts, sampling) == [expected_tokens(prompts[0], sampling[0])]
        assert [len(output.token_ids) for output in bench.sink.of("r0")] == [1, 5, 5, 5, 5]


def test_s11_a_stop_inside_an_accepted_run_comes_before_the_cap() -> None:
    tokens = prompt(6)
    plain = expected_tokens(tokens, SamplingParams(max_tokens=12, **GREEDY))
    stop = next(index for index in range(3, 5) if plain[index] not in plain[:index])
    for max_tokens in (stop + 1, stop + 2, 12):  # the cap right at the stop, behind it, far away
        sampling = [SamplingParams(max_tokens=max_tokens, stop_token_ids=(plain[stop],), **GREEDY)]
        with EngineBench(speculator=oracle([tokens], [SamplingParams(max_tokens=12, **GREEDY)])) as bench:
            assert bench.run([tokens], sampling) == [plain[: stop + 1]]
            end = bench.sink.of("r0")[-1]
            assert (end.finish_reason, end.stop_token_id) == (FinishReason.STOP, plain[stop])


def test_s12_nothing_after_a_stop_is_given_or_cached() -> None:
    tokens = prompt(6)
    plain = expected_tokens(tokens, SamplingParams(max_tokens=12, **GREEDY))
    sampling = SamplingParams(max_tokens=12, stop_token_ids=(plain[2],), logprobs=1, **GREEDY)
    with EngineBench(speculator=oracle([tokens], [SamplingParams(max_tokens=12, **GREEDY)])) as bench:
        (answer,) = bench.run([tokens], [sampling])
        assert answer == plain[: plain.index(plain[2]) + 1]
        assert sum(len(output.logprobs) for output in bench.sink.of("r0")) == len(answer)
        bench.submit("again", [*tokens, *plain[:7]], max_tokens=1)
        bench.sink.end("again")
        num_cached = bench.sink.of("again")[0].cached_tokens
        assert num_cached <= len(tokens) + len(answer) - 1, "KV of dropped tokens was published"


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_s26_no_draft_passes_the_end(max_tokens: int) -> None:
    prompts, sampling = [prompt(5)], [SamplingParams(max_tokens=max_tokens, **GREEDY)]
    longer = [SamplingParams(max_tokens=40, **GREEDY)]
    with EngineBench(speculator=oracle(prompts, longer)) as bench:
        assert bench.run(prompts, sampling) == [expected_tokens(prompts[0], sampling[0])]
        assert bench.sink.of("r0")[-1].finish_reason is FinishReason.LENGTH


def test_s26_no_draft_slot_at_or_behind_the_context() -> None:
    prompts, sampling = [prompt(60)], [SamplingParams(max_tokens=100, **GREEDY)]
    with EngineBench(max_model_len=64, num_blocks=16, speculator=oracle(prompts, sampling)) as bench:
        (answer,) = bench.run(prompts, sampling)
        assert answer == expected_tokens(prompts[0], replace(sampling[0], max_tokens=4))


@pytest.mark.parametrize(("num_tokens", "num_drafts", "num_extra"), [(15, 3, 1), (14, 19, 2)])
def test_s28_drafts_take_all_blocks_that_they_need(num_tokens: int, num_drafts: int, num_extra: int) -> None:
    tokens = prompt(num_tokens)
    sampling = SamplingParams(max_tokens=num_drafts + 2, **GREEDY)
    answers = {"r0": [*tokens, *expected_tokens(tokens, sampling)]}
    drafter = speculator(OracleDrafter(answers), num_drafts=num_drafts)
    with EngineBench(block_tokens=16, speculator=drafter) as bench:
        assert bench.run([tokens], [sampling]) == [answers["r0"][num_tokens:]]
        assert [len(output.token_ids) for output in bench.sink.of("r0")] == [1, num_drafts + 1]
        assert -(-(num_tokens + 1 + num_drafts) // 16) == 1 + num_extra


def test_s15_and_s16_logprobs_are_those_without_drafts() -> None:
    prompts, sampling = cases(8)
    sampling = [replace(params, logprobs=index % 4) for index, params in enumerate(sampling)]
    given = []
    for drafter in (None, *(drafter_named(name, prompts, sampling) for name in ("sometimes right", "trees"))):
        with EngineBench(num_blocks=256, long_prefill_token_threshold=16, speculator=drafter) as bench:
            bench.run(prompts, sampling)
            given.append([[each for output in bench.sink.of(f"r{n}") for each in output.logprobs] for n in range(8)])
    assert given[0] == given[1] == given[2]
    assert all(len(row) > 0 for row in given[0])


def test_s2_s35_rejected_drafts_do_not_count_for_penalties() -> None:
    prompts = [prompt(8, index) for index in range(6)]
    sampling = [
        SamplingParams(max_tokens=32, frequency_penalty=1.9, presence_penalty=1.0, seed=index) for index in range(6)
    ]
    for name in ("junk", "sometimes right", "always right", "trees"):
        with EngineBench(num_blocks=128, speculator=drafter_named(name, prompts, sampling)) as bench:
            expected = [expected_tokens(*pair) for pair in zip(prompts, sampling, strict=True)]
            assert bench.run(prompts, sampling) == expected


def test_the_prefix_cache_holds_accepted_tokens_only() -> None:
    prompts, sampling = [prompt(6)], [SamplingParams(max_tokens=24, **GREEDY)]
    with EngineBench(speculator=drafter_named("sometimes right", prompts, sampling)) as bench:
        (answer,) = bench.run(prompts, sampling)
        turn = [*prompts[0], *answer, 1]
        bench.submit("turn", turn, sampling=SamplingParams(max_tokens=8, speculation="off", **GREEDY))
        bench.sink.end("turn")
        assert bench.sink.of("turn")[0].cached_tokens == 28
        assert bench.sink.tokens("turn") == expected_tokens(turn, SamplingParams(max_tokens=8, **GREEDY))


def test_s33_a_landed_prompt_is_guessed_for_and_a_held_one_is_not() -> None:
    prompts, sampling = [prompt(6)], [SamplingParams(max_tokens=11, speculation="draft", **GREEDY)]
    answer = expected_tokens(prompts[0], sampling[0])
    drafter = oracle(prompts, sampling)
    with EngineBench(speculator=drafter) as bench:
        blocks = bench.pool.allocate(2)
        assert blocks is not None
        slots = [ref.block * 4 + offset for ref in blocks for offset in range(4)][:6]
        bench.runner.kv[slots] = fingerprints(np.array(prompts[0]), np.arange(6))
        landed = LandedPrompt(tuple(blocks), answer[0], None, 0)
        bench.submit("r0", prompts[0], sampling=sampling[0], landed=landed)
        bench.sink.end("r0")
        assert bench.sink.tokens("r0") == answer[1:]
        assert drafter.counters()["speculation_drafts_accepted"] > 0
    with EngineBench() as prefill_side:  # has no drafter, and must not mind that the decode side has
        prefill_side.submit("r0", prompts[0], sampling=sampling[0], hold_blocks=True)
        prefill_side.sink.end("r0")
        assert prefill_side.sink.tokens("r0") == answer[:1]
        prefill_side.engine.release(RequestId("r0"))


def test_k2_a_prompt_that_landed_whole_still_has_its_first_token_computed_here() -> None:
    """48 tokens in whole blocks, every one of them from elsewhere: the decode side computes what follows, no more."""
    tokens, params = prompt(48), SamplingParams(max_tokens=2, **GREEDY)
    answer = expected_tokens(tokens, params)
    with EngineBench(block_tokens=16) as bench:
        blocks = bench.pool.allocate(3)
        assert blocks is not None
        slots = [ref.block * 16 + offset for ref in blocks for offset in range(16)]
        bench.runner.kv[slots] = fingerprints(np.array(tokens), np.arange(48))
        landed = LandedPrompt(tuple(blocks), answer[0], None, 0)
        bench.submit("r0", tokens, sampling=params, landed=landed)
        bench.sink.end("r0")
        assert bench.sink.tokens("r0") == answer[1:]
        assert bench.runner.num_computed_tokens == 1


def test_a_request_may_turn_it_off_or_name_a_drafter_that_is_here() -> None:
    drafter = DraftingSpeculator({"ngram": NgramDrafter(), "suffix": SuffixDrafter()}, ("suffix",), NUM_DRAFTS, None)
    with EngineBench(speculator=drafter) as bench:
        off = SamplingParams(max_tokens=8, speculation="off", **GREEDY)
        bench.run([prompt(5)], [off])
        counters = drafter.counters()
        assert counters["speculation_drafts_proposed"] == 0
        assert counters["speculation_no_draft_off"] > 0
        for name in ("", "auto", "ngram", "suffix"):
            drafter.check(replace(off, speculation=name))
        with pytest.raises(InvalidRequest, match="medusa"):
            bench.submit("m", prompt(5), speculation="medusa")


def test_the_gate_stops_a_drafter_that_is_always_wrong() -> None:
    prompts, sampling = [prompt(5)], [SamplingParams(max_tokens=120, **GREEDY)]
    answers = {"r0": [*prompts[0], *expected_tokens(prompts[0], sampling[0])]}
    costs = StepCosts((1, 16), (1.0, 2.0), 0.01)
    gated = speculator(OracleDrafter(answers, lambda position: 1), costs)
    with EngineBench(speculator=gated) as bench:
        assert bench.run(prompts, sampling) == [answers["r0"][5:]]
    counters = gated.counters()
    assert 0 < counters["speculation_steps"] < 60
    assert counters["speculation_no_draft_does_not_pay"] > 60
    assert counters["speculation_accepted_at_1"] == 0


def test_counters_add_up() -> None:
    prompts, sampling = [prompt(5)], [SamplingParams(max_tokens=40, **GREEDY)]
    drafter = drafter_named("sometimes right", prompts, sampling)
    assert drafter is not None
    with EngineBench(speculator=drafter) as bench:
        bench.run(prompts, sampling)
        num_decode_steps = len(bench.sink.of("r0")) - 1
    counters = drafter.counters()
    num_without = sum(counters[f"speculation_no_draft_{reason.value}"] for reason in NoDraftReason)
    assert counters["speculation_steps"] + num_without == num_decode_steps
    assert counters["speculation_drafts_accepted"] == 39 - num_decode_steps
    proposed_at = [counters[f"speculation_proposed_at_{index + 1}"] for index in range(NUM_DRAFTS)]
    accepted_at = [counters[f"speculation_accepted_at_{index + 1}"] for index in range(NUM_DRAFTS)]
    assert proposed_at == sorted(proposed_at, reverse=True)
    assert accepted_at == sorted(accepted_at, reverse=True)


@pytest.mark.parametrize(
    ("drafts", "target", "failed", "run"),
    [
        ([], [7], set(), [7]),
        ([1, 2], [9, 8, 7], set(), [9]),
        ([1, 2], [1, 8, 7], set(), [1, 8]),
        ([1, 2], [1, 2, 7], set(), [1, 2, 7]),
        ([1, 2], [1, 2, 7], {2}, [1, 2]),
        ([1, 2], [1, 2, 7], {0}, []),
        ([1, 2], [9, 2, 7], {1}, [9]),
    ],
)
def test_an_accepted_run(drafts: list[int], target: list[int], failed: set[int], run: list[int]) -> None:
    accepted = verify_match(Draft.chain(drafts), target, failed)
    assert (list(accepted.token_ids), accepted.rows) == (run, tuple(range(len(run))))


def test_step_costs_are_measured_on_the_runner() -> None:
    ticks = iter(range(1000))
    costs = measure_step_costs(HashRunner(2, 4), 2, 4, clock=lambda: float(next(ticks)))
    assert costs.rows == (1, 2, 3, 4, 5, 6, 8)
    assert costs.step_ms == (1000.0,) * 7
