"""Constrained requests in the engine: valid whatever the model wants, and the same however the engine runs them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cluster.errors import InvalidRequest
from cluster.identity import RequestId
from cluster.sampling_params import SamplingParams
from decode_worker.speculation.ngram import NgramDrafter
from decode_worker.speculation.speculator import DraftingSpeculator
from engine.draft import ROOT, Draft
from engine.grammar_compiler import GrammarCompiler
from engine.request import FinishReason
from tests.engine.engine_bench import EngineBench
from tests.engine.hash_runner import VOCAB
from tests.engine.letter_tokenizer import END_IDS, letter_tokenizer, text_of

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "bc": {"type": "array", "items": {"enum": ["ab", "cd"]}, "maxItems": 4},
        },
        "required": ["a", "bc"],
        "additionalProperties": False,
    }
)
REGEX = "(ab|c[0-9]{2,6}){3,9}"
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "json_schema": SCHEMA},
    {"seed": 3, "json_schema": SCHEMA},
    {"seed": 4, "top_k": 4, "frequency_penalty": 1.0, "json_schema": SCHEMA, "logprobs": 2},
    {"temperature": 0.0, "regex": REGEX},
    {"temperature": 0.8, "top_p": 0.9, "seed": 5, "regex": REGEX},
    {"seed": 6, "grammar": 'start: "[" item ("," item)~2..5 "]"\nitem: /[1-9][0-9]{0,2}/ | "true" | "null"'},
]
PROMPTS = [[index + 1, 7, 9, index] for index in range(len(KINDS))]


def sampling(max_tokens: int = 120) -> list[SamplingParams]:
    ends = tuple(sorted(END_IDS))
    return [SamplingParams(**{"max_tokens": max_tokens, "stop_token_ids": ends, **kind}) for kind in KINDS]


@pytest.fixture
def grammars() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(letter_tokenizer, VOCAB)
    yield made
    made.close()


@pytest.fixture
def plain(grammars: GrammarCompiler) -> list[list[int]]:
    """Each request alone: no batch, no preemption, no drafts."""
    answers = []
    for prompt, params in zip(PROMPTS, sampling(), strict=True):
        with EngineBench(grammars=grammars) as bench:
            answers += bench.run([prompt], [params])
    return answers


def check_texts(answers: Sequence[list[int]]) -> None:
    for answer, kind in zip(answers, KINDS, strict=True):
        assert answer[-1] in END_IDS, "it did not end by itself"
        text = text_of(answer)
        if "json_schema" in kind:
            value = json.loads(text)
            assert set(value) == {"a", "bc"}
            assert isinstance(value["a"], int)
            assert set(value["bc"]) <= {"ab", "cd"}
        elif "regex" in kind:
            assert re.fullmatch(REGEX, text), text
        else:
            assert 3 <= len(json.loads(text)) <= 6


def test_every_answer_follows_its_constraint(plain: list[list[int]]) -> None:
    check_texts(plain)


def test_s_b59_a_batch_gives_each_request_what_it_gets_alone(grammars: GrammarCompiler, plain: list[list[int]]) -> None:
    free = SamplingParams(max_tokens=30, seed=9)
    with EngineBench(grammars=grammars) as bench:
        alone = bench.run([[5, 6, 7]], [free])
    with EngineBench(grammars=grammars) as bench:
        mixed = bench.run([*PROMPTS, [5, 6, 7]], [*sampling(), free])
    assert mixed == [*plain, *alone]


def test_preempted_requests_go_on_where_they_stood(grammars: GrammarCompiler, plain: list[list[int]]) -> None:
    with EngineBench(grammars=grammars, num_blocks=18, max_batch_tokens=16) as bench:
        assert bench.run(PROMPTS, sampling(max_tokens=64)) == plain
        assert len(bench.runner.batch_sizes) > max(map(len, plain)), "nobody was preempted"


@pytest.mark.parametrize("num_done", [1, 4, 9])
def test_s_b61_a_moved_request_goes_on_where_it_stood(
    grammars: GrammarCompiler, plain: list[list[int]], num_done: int
) -> None:
    with EngineBench(grammars=grammars) as bench:
        for index, (prompt, params) in enumerate(zip(PROMPTS, sampling(), strict=True)):
            begun = [*prompt, *plain[index][:num_done]]
            bench.submit(f"m{index}", begun, sampling=params, num_generated=num_done)
        for index in range(len(PROMPTS)):
            bench.sink.end(f"m{index}")
            assert bench.sink.tokens(f"m{index}") == plain[index][num_done:]


@pytest.mark.parametrize("drafter", [NgramDrafter()], ids=["ngram"])
def test_drafts_are_verified_under_the_constraint(
    grammars: GrammarCompiler, plain: list[list[int]], drafter: NgramDrafter
) -> None:
    guessing = DraftingSpeculator({"ngram": drafter}, ("ngram",), 4, None)
    with EngineBench(grammars=grammars, speculator=guessing) as bench:
        assert bench.run(PROMPTS, sampling()) == plain
    assert guessing.counters()["speculation_drafts_proposed"] > 0
    assert guessing.counters()["speculation_drafts_accepted"] > 0


class AnswerDrafter:
    """Guesses each request's answer, as a chain or with wrong siblings first, past its end; or something else."""

    name = "answers"

    def __init__(self, answers: list[list[int]], kind: str) -> None:
        self._kind = kind
        self._all = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)]
        self._known: dict[str, int] = {}

    def begin(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        self._known[request_id] = len(token_ids)

    def extend(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        self._known[request_id] += len(token_ids)

    def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        right = self._all[int(request_id.removeprefix("r"))][self._known[request_id] :]
        if self._kind == "always the same":
            return Draft.chain([5] * num_drafts)
        if self._kind == "right, then past the end":
            return Draft.chain([*right, *[9] * num_drafts][:num_drafts])
        if not right:
            return Draft()
        if self._kind == "rejected at a value":
            return Draft.chain([right[0], *((token + 1) % VOCAB for token in right[1:num_drafts])])
        wrong = [(right[0] + 1 + index) % VOCAB for index in range(2)]
        return Draft(
            (*wrong, *right[: num_drafts - 2]), (ROOT, ROOT, ROOT, *range(2, num_drafts - 1))[: len(right) + 2]
        )

    def forget(self, request_id: RequestId) -> None:
        self._known.pop(request_id, None)


@pytest.mark.parametrize("kind", ["rejected at a value", "right, then past the end", "always the same", "trees"])
def test_s20_s21_s22_rejected_drafts_leave_no_trace_in_a_constraint(
    grammars: GrammarCompiler, plain: list[list[int]], kind: str
) -> None:
    guessing = DraftingSpeculator({"answers": AnswerDrafter(plain, kind)}, ("answers",), 8, None)
    with EngineBench(grammars=grammars, speculator=guessing) as bench:
        assert bench.run(PROMPTS, sampling()) == plain
    counters = guessing.counters()
    assert counters["speculation_drafts_proposed"] > 50
    assert (counters["speculation_drafts_accepted"] > 50) == (kind != "always the same")


def test_max_tokens_ends_a_constrained_answer_by_length(grammars: GrammarCompiler, plain: list[list[int]]) -> None:
    with EngineBench(grammars=grammars) as bench:
        assert bench.run(PROMPTS, sampling(max_tokens=2)) == [answer[:2] for answer in plain]
        assert bench.sink.end("r0").finish_reason is FinishReason.LENGTH


def test_a_constraint_that_cannot_be_compiled_ends_its_request_alone(grammars: GrammarCompiler) -> None:
    bad = SamplingParams(max_tokens=4, json_schema='{"type": "something"}')
    with EngineBench(grammars=grammars) as bench:
        bench.submit("bad", [1, 2], sampling=bad)
        bench.submit("good", [1, 2])
        end = bench.sink.end("bad")
        assert end.finish_reason is FinishReason.ERROR
        assert "invalid_json_schema" in end.error
        assert bench.sink.end("good").finish_reason is FinishReason.LENGTH


def test_q14_a_constrained_row_without_numbers_fails_alone(grammars: GrammarCompiler) -> None:
    with EngineBench(grammars=grammars) as bench:
        bench.runner.nan_after_token = 2
        bench.submit("nan", [1, 2], sampling=SamplingParams(max_tokens=4, regex="a+"))
        bench.submit("good", [1, 3], sampling=SamplingParams(max_tokens=4, regex="a{9}"))
        assert "no valid distribution" in bench.sink.end("nan").error
        bench.sink.end("good")
        assert text_of(bench.sink.tokens("good")) == "aaaa"


def test_an_engine_without_a_compiler_refuses(grammars: GrammarCompiler) -> None:
    with EngineBench() as bench, pytest.raises(InvalidRequest, match="no constrained decoding"):
        bench.submit("r", [1], sampling=SamplingParams(max_tokens=4, regex="a"))


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_what_keeps_an_answer_from_ending_contradicts_a_constraint(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="contradicts regex"):
        SamplingParams(max_tokens=4, regex="a", **fields).checked(VOCAB)
