"""Grammars by themselves: what they allow next, along guesses, after a restart; and how hostile ones end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from cluster.errors import EngineFailure, InvalidRequest
from cluster.sampling_params import SamplingParams
from engine.grammar import CompiledGrammar, GrammarState
from engine.grammar_compiler import MAX_BYTES, MAX_ENTRIES, GrammarCompiler
from tests.router.byte_tokenizer import END_ID, VOCAB_SIZE, byte_tokenizer

PROMPT = [1, 2, 3]
WAIT_S = 60.0
NAME_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(byte_tokenizer, VOCAB_SIZE)
    yield made
    made.close()


def compiled(compiler: GrammarCompiler, **guide: str) -> CompiledGrammar:
    future: Future[CompiledGrammar] | None = compiler.compile(SamplingParams(max_tokens=8, **guide))  # type: ignore[arg-type]
    assert future is not None
    return future.result(WAIT_S)


def begun(compiler: GrammarCompiler, **guide: str) -> GrammarState:
    return compiled(compiler, **guide).begin(len(PROMPT))


def allowed(state: GrammarState, generated: bytes | list[int], guesses: bytes = b"") -> set[int] | None:
    token_ids = np.array([*PROMPT, *generated, *guesses], dtype=np.int32)
    forbidden = state.forbidden(token_ids, len(guesses))
    return None if forbidden is None else set(np.flatnonzero(~forbidden).tolist())


def test_regex_allows_what_may_follow_and_then_the_end(compiler: GrammarCompiler) -> None:
    state = begun(compiler, regex="a[bc]+d")
    assert allowed(state, b"") == {ord("a")}
    assert allowed(state, b"a") == {ord("b"), ord("c")}
    assert allowed(state, b"abb") == {ord("b"), ord("c"), ord("d")}
    assert allowed(state, b"abbd") == {END_ID}
    assert allowed(state, [*b"abbd", END_ID]) == {END_ID}


def test_guesses_are_followed_and_taken_back(compiler: GrammarCompiler) -> None:
    state = begun(compiler, regex="a[bc]+d")
    assert allowed(state, b"a", b"bb") == {ord("b"), ord("c"), ord("d")}
    assert allowed(state, b"a", b"bbd") == {END_ID}
    assert allowed(state, b"a", b"bx") is None, "a row behind a guess outside the grammar is never reached"
    assert allowed(state, [*b"a"], bytes([])) == {ord("b"), ord("c")}
    assert allowed(state, b"acd") == {END_ID}


def test_rows_of_the_logits_without_a_token_are_never_allowed(compiler: GrammarCompiler) -> None:
    state = begun(compiler, json_schema=json.dumps({"type": "string"}))
    inside = allowed(state, b'"')
    assert inside is not None
    assert not inside & {256, 257, END_ID, *range(END_ID + 1, VOCAB_SIZE)}
    assert {ord("a"), ord('"'), 0xC3} <= inside


def test_q_json_schema_is_followed_byte_by_byte(compiler: GrammarCompiler) -> None:
    text = b'{"name": "Bob", "age": 42}'
    state = begun(compiler, json_schema=json.dumps(NAME_SCHEMA))
    for index in range(len(text)):
        may_follow = allowed(state, text[:index])
        assert may_follow is not None
        assert text[index] in may_follow, text[: index + 1]
    assert END_ID in (allowed(state, text) or set())
    fresh = begun(compiler, json_schema=json.dumps(NAME_SCHEMA))
    assert ord("x") not in (allowed(fresh, b'{"') or set())


def test_white_space_between_tokens_ends(compiler: GrammarCompiler) -> None:
    state = begun(compiler, json_schema=json.dumps({"type": "object"}))
    assert ord(" ") in (allowed(state, b"{" + b" " * 10) or set())
    assert ord(" ") not in (allowed(state, b"{" + b" " * 40) or set())


def test_s_b61_a_state_begun_later_stands_where_the_first_one_stands(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, json_schema=json.dumps({"type": "array", "items": {"type": "object"}}))
    text = b'[{"a": {"b": [1, 2'
    followed, moved = grammar.begin(len(PROMPT)), grammar.begin(len(PROMPT))
    for index in range(len(text)):
        allowed(followed, text[:index])
    assert allowed(followed, text) == allowed(moved, text)


def test_tokens_outside_the_grammar_are_an_error(compiler: GrammarCompiler) -> None:
    with pytest.raises(EngineFailure, match="does not follow the constraint"):
        allowed(begun(compiler, regex="ab"), b"xy")


HOSTILE: dict[str, dict[str, str]] = {
    "unknown type": {"json_schema": '{"type": "something"}'},
    "broken pattern": {"json_schema": '{"type": "string", "pattern": "("}'},
    "remote reference": {"json_schema": '{"$ref": "http://example.com/schema"}'},
    "file reference": {"json_schema": '{"$ref": "file:///etc/passwd"}'},
    "no JSON": {"json_schema": "{"},
    "no schema": {"json_schema": "[1]"},
    "unsupported keyword": {"json_schema": '{"not": {"type": "string"}}'},
    "broken regex": {"regex": "(a"},
    "look-around": {"regex": "(?=a)b"},
    "broken grammar": {"grammar": "start: missing_rule"},
    "huge repetition": {"regex": "((a{1,1000}){1,1000}){1,1000}b(((c{1,1000}){1,1000}){1,1000})"},
    "explosive schema": {
        "json_schema": json.dumps(
            {"anyOf": [{"properties": {f"k{i}{j}": {"minLength": 99} for i in range(30)}} for j in range(40)]}
        )
    },
}
MAY_BE_ACCEPTED = ("huge repetition", "explosive schema")


@pytest.mark.parametrize("name", HOSTILE)
def test_s_b20_hostile_guides_are_refused_or_bounded(compiler: GrammarCompiler, name: str) -> None:
    started = time.process_time()
    is_refused = False
    try:
        allowed(begun(compiler, **HOSTILE[name]), b"")
    except (InvalidRequest, EngineFailure):
        is_refused = True
    assert is_refused or name in MAY_BE_ACCEPTED
    assert time.process_time() - started < 20


def test_s_b21_bad_after_good_after_bad(compiler: GrammarCompiler) -> None:
    good = {"json_schema": '{"type": "integer"}'}
    for guide in (good, {"json_schema": '{"type": "something"}'}, {"grammar": "start: ("}, {"regex": "["}):
        if guide is not good:
            with pytest.raises(InvalidRequest):
                compiled(compiler, **guide)
        assert ord("7") in (allowed(begun(compiler, **good), b"") or set())


def test_s_b22_thousands_of_unique_schemas_leave_a_bounded_cache(compiler: GrammarCompiler) -> None:
    for number in range(300):
        compiled(compiler, json_schema=json.dumps({"type": "integer", "maximum": number}))
        assert compiler.num_cached <= MAX_ENTRIES
    large = {"enum": ["x" * 40_000]}
    for number in range(40):
        compiled(compiler, json_schema=json.dumps({**large, "title": str(number)}))
        assert compiler.num_cached_bytes <= MAX_BYTES


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a*)*b", "([a-z]+)*[0-9]"])
def test_s_b23_catastrophic_patterns_take_linear_time(compiler: GrammarCompiler, pattern: str) -> None:
    state = begun(compiler, regex=pattern)
    allowed(state, b"")
    started = time.process_time()
    assert ord("!") not in (allowed(state, b"a" * 20_000) or set())
    assert time.process_time() - started < 10, "a token takes longer the more stand before it"


def test_the_same_constraint_is_compiled_once(compiler: GrammarCompiler) -> None:
    assert compiled(compiler, regex="ab*") is compiled(compiler, regex="ab*")
    assert compiled(compiler, regex="ab*") is not compiled(compiler, grammar='start: "a" "b"*')
    assert compiler.compile(SamplingParams(max_tokens=1)) is None
