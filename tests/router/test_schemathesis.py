"""The OpenAPI document against the router: whatever it allows or forbids, each answer is one that the document has, and
no 5xx but 503 and 504."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis import Case, GenerationMode
from schemathesis.checks import content_type_conformance
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from tests.router.conftest import RunningRouter, StartRouter

ALLOWED_5XX = (503, 504)
NUM_EXAMPLES = 12  # of each operation and mode
TIMEOUT_S = 60.0
OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/livez"),
    ("GET", "/readyz"),
    ("GET", "/statusz"),
]
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
async def test_each_answer_is_one_that_the_document_has(
    method: str, path: str, mode: GenerationMode, router: RunningRouter, http: httpx.AsyncClient
) -> None:
    document = (await http.get("/openapi.json")).json()
    if mode is GenerationMode.NEGATIVE and method == "GET":
        pytest.skip("a GET without parameters cannot be malformed")
    # The requests come from blocking code: it runs beside this loop, which serves them.
    await asyncio.to_thread(_drive, document, router.url, method, path, mode)
    golden = {"model": "test-model", "prompt": "golden", "max_tokens": 2}
    assert (await http.post("/v1/completions", json=golden)).status_code == 200


def _drive(document: dict[str, Any], url: str, method: str, path: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(document)
    operation = schema[path][method]
    statuses: list[int] = []

    @hypothesis.settings(
        max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate],
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Case[Any]) -> None:
        case.body = _with_integers(case.body)
        response = case.call(base_url=url, timeout=TIMEOUT_S)
        statuses.append(response.status_code)
        assert response.status_code < 500 or response.status_code in ALLOWED_5XX, response.text
        if not response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
            case.validate_response(response, checks=CHECKS)

    check()
    if mode is GenerationMode.POSITIVE:
        assert 200 in statuses, f"nothing that the document allows was accepted: {statuses}"


def _with_integers(value: Any) -> Any:
    """JSON Schema takes 3.0 for an integer, the router does not."""
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


async def test_without_workers_the_answer_is_a_documented_503(start_router: StartRouter) -> None:
    router = await start_router()
    async with httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=60) as http:
        answer = await http.post("/v1/completions", json={"model": "test-model", "prompt": "a"})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_workers_available"
