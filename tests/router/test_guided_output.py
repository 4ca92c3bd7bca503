"""Constrained output at the fronts: what reaches the workers, what is refused and where, and how checks are bounded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio
from tandem.v1 import inference_pb2, inference_pb2_grpc

from cluster.errors import InvalidRequest, ServerOverloaded
from router import grammar_checker
from router.grammar_checker import GrammarChecker
from router.json_schema_rules import check_schema
from tests.router.conftest import MODEL, RunningRouter
from tests.router.requests_table import DEEP_SCHEMA

BODY: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 2}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest_asyncio.fixture(loop_scope="session")
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(check_timeout_s=60.0)
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
         "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ({"guided_regex": "a+b"}, "regex", "a+b"),
        ({"guided_grammar": 'start: "x"'}, "grammar", 'start: "x"'),
        ({"guided_choice": ['say "yes"', "no\n", "ő"]}, "grammar", 'start: "say \\"yes\\"" | "no\\n" | "ő"'),
        ({"response_format": {"type": "text"}}, "json_schema", ""),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ({"structured_outputs": {"regex": "a+b", "json": None}}, "regex", "a+b"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "grammar", 'start: "a" | "b"'),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, "grammar", 'start: "x"'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
    ],
)  # fmt: skip
async def test_each_form_reaches_the_worker_as_one_guide(
    router: RunningRouter, http: httpx.AsyncClient, fields: dict[str, Any], kind: str, text: str
) -> None:
    answer = await http.post("/v1/completions", json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    sampling = router.workers[-1].submits[-1].sampling
    guides = {"json_schema": "", "regex": "", "grammar": "", kind: text}
    assert {name: getattr(sampling, name) for name in guides} == guides


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 1}, {"guided_regex": "a"}])
async def test_contradictions_are_named(http: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    answer = await http.post("/v1/completions", json={**BODY, "response_format": {"type": "json_object"}, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs.json_object"),
        ({"structural_tag": "x"}, "structured_outputs.structural_tag"),
        ({"regex": "("}, "structured_outputs.regex"),
        ({"json": {"not": {}}}, "structured_outputs.json"),
    ],
)
async def test_structured_outputs_takes_one_constraint_and_names_what_is_wrong(
    http: httpx.AsyncClient, value: dict[str, Any], param: str
) -> None:
    answer = await http.post("/v1/completions", json={**BODY, "structured_outputs": value})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


async def test_s_b26_grpc_takes_and_refuses_the_same_guides(router: RunningRouter) -> None:
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)

        async def generate(**guide: str) -> None:
            request = inference_pb2.GenerateRequest(text="abc", max_tokens=2, **guide)  # type: ignore[arg-type]
            async for _ in stub.Generate(request, timeout=60):
                pass

        for good in ({"json_schema": json.dumps(SCHEMA)}, {"regex": "a+"}, {"grammar": 'start: "x"'}):
            await generate(**good)
        bad: dict[str, tuple[dict[str, str], str]] = {
            "broken text": ({"json_schema": "{"}, "json_schema is not JSON"),
            "broken pattern": (
                {"json_schema": '{"properties": {"a": {"pattern": "("}}}'},
                "json_schema.properties.a: regex parse error",
            ),
            "too deep": ({"json_schema": json.dumps(DEEP_SCHEMA)}, "json_schema" + ".items" * 10),
            "regex": ({"regex": "(a"}, "regex: "),
            "grammar": ({"grammar": "start: x"}, "grammar: "),
            "two": ({"regex": "a", "grammar": 'start: "x"'}, "both constrain the answer"),
        }  # fmt: skip
        for name, (guide, message) in bad.items():
            num_submits = len(router.workers[-1].submits)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await generate(**guide)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert message in str(raised.value.details()), name
            assert len(router.workers[-1].submits) == num_submits


async def test_s_b21_good_after_bad_after_good(checker: GrammarChecker) -> None:
    await checker.check("json_schema", json.dumps(SCHEMA), "p")
    for kind, text in (("json_schema", '{"type": 1}'), ("regex", "["), ("grammar", "start: (")):
        for _ in range(2):  # the second answer is the remembered one
            with pytest.raises(InvalidRequest):
                await checker.check(kind, text, "p")
        await checker.check("regex", "a+", "p")


async def test_s_b20_a_check_that_takes_too_long_ends_and_the_next_one_is_served() -> None:
    impatient = GrammarChecker(check_timeout_s=0.01)
    parts = [{"properties": {f"{i}{j}": {"minLength": 9} for i in range(50)}} for j in range(40)]
    try:
        with pytest.raises(InvalidRequest, match="takes more than"):
            await impatient.check("json_schema", json.dumps({"anyOf": parts}), "p")
        impatient._check_timeout_s = 60.0
        await impatient.check("regex", "a+", "p")
    finally:
        await impatient.close()


async def test_a_child_that_dies_is_replaced(checker: GrammarChecker) -> None:
    await checker.check("regex", "a+", "p")
    child = checker._child
    assert child is not None
    child.kill()
    await child.wait()
    await checker.check("regex", "b+", "p")


async def test_a_client_that_leaves_does_not_shift_the_answers(checker: GrammarChecker) -> None:
    await checker.check("regex", "a+", "p")
    leaving = asyncio.create_task(checker.check("regex", "(bad", "p"))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await checker.check("regex", "fine", "p")


async def test_s_b22_remembered_answers_and_waiting_checks_are_bounded(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_REMEMBERED", 10)
    for number in range(30):
        await checker.check("regex", f"a{number}", "p")
    assert checker.num_remembered == 10
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 2)
    asked = [asyncio.create_task(checker.check("regex", f"b{number}", "p")) for number in range(8)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(result, ServerOverloaded) for result in results) == 6


def test_places_are_shown_short_and_escaped() -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_schema({"properties": {"\u202e" + "x" * 500: {"$ref": "http://h"}}}, "p")
    assert raised.value.param.isprintable()
    assert len(raised.value.message) < 400
