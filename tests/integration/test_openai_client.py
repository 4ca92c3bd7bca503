"""The official `openai` client, unchanged, against a real cluster; and what bad input gets."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.integration.conftest import RunningCluster

pytestmark = [pytest.mark.model, pytest.mark.cluster]

MODEL = "SmolLM2-135M-Instruct"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    # float32: in bfloat16 the first token of the answer is a near tie.
    return start_cluster("--prefill", "1", "--decode", "1", "--dtype", "float32")


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat_answers_sensibly(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in str(answer.choices[0].message.content)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_chat_equals_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


async def test_async_client_streams_completions(cluster: RunningCluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model=MODEL, prompt="One, two, three,", temperature=0, max_tokens=8, stream=True
        )
        text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
    assert " four" in text


def test_seeded_sampling_repeats(client: openai.OpenAI) -> None:
    texts = {
        client.completions.create(model=MODEL, prompt="Once upon a time", seed=seed, max_tokens=16).choices[0].text
        for seed in (7, 7, 8)
    }
    assert len(texts) == 2


BAD_BODIES: dict[str, tuple[str, int, str]] = {
    "unknown model": ('{"model": "gpt-9", "prompt": "a"}', 404, "model"),
    "over-long prompt": (json.dumps({"model": MODEL, "prompt": "a b c d e " * 5000}), 400, "prompt"),
    "negative max_tokens": (json.dumps({"model": MODEL, "prompt": "a", "max_tokens": -1}), 400, "max_tokens"),
    "malformed JSON": ('{"model": ', 400, ""),
    "NaN": (f'{{"model": "{MODEL}", "prompt": "a", "temperature": NaN}}', 400, ""),
    "boolean for a number": (json.dumps({"model": MODEL, "prompt": "a", "temperature": True}), 400, "temperature"),
    "unknown field": (json.dumps({"model": MODEL, "prompt": "a", "colour": 1}), 400, "colour"),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_bad_input_names_its_parameter_and_reaches_no_worker(case: str, cluster: RunningCluster) -> None:
    body, status, param = BAD_BODIES[case]
    before = _settled_counters(cluster)
    request = urllib.request.Request(  # noqa: S310
        f"{cluster.url}/v1/completions", data=body.encode(), headers={"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as failure:
        urllib.request.urlopen(request, timeout=30)  # noqa: S310
    with failure.value as answer:
        error = json.load(answer)["error"]
    assert answer.code == status
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"] or "") == param
    assert _settled_counters(cluster) == before


def test_a_good_request_shows_in_the_counters_that_bad_ones_leave_alone(
    client: openai.OpenAI, cluster: RunningCluster
) -> None:
    before = _settled_counters(cluster)
    client.completions.create(model=MODEL, prompt="One, two,", temperature=0, max_tokens=2)
    cluster.wait_for(
        lambda status: all(counters != before[role] for role, counters in _counters_of(status).items()),
        60,
        "both workers counted the request",
    )


def _settled_counters(cluster: RunningCluster) -> dict[str, dict[str, float]]:
    """What each worker has counted when nothing moves any more: a request's last steps come after its answer."""
    seen: list[dict[str, dict[str, float]]] = []

    def is_settled(status: dict[str, Any]) -> bool:
        seen.append(_counters_of(status))
        return status["running_requests"] == 0 and seen[-3:] == [seen[-1]] * 3

    return _counters_of(cluster.wait_for(is_settled, 60, "the counters stand still"))


def _counters_of(status: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Everything that each worker counts: a request that reaches one changes it."""
    return {worker["role"]: worker["counters"] for worker in status["workers"] if worker["state"] == "ready"}
