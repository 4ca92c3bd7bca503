"""Each feature of OpenAI's API with the official client on a real cluster, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.integration.conftest import RunningCluster

pytestmark = [pytest.mark.model, pytest.mark.cluster]

MODEL = "SmolLM2-135M-Instruct"
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name a fruit."}],
    "max_tokens": 12,
    "seed": 7,
}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "The three primary colours are", "max_tokens": 16, "seed": 3}


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    return start_cluster("--prefill", "1", "--decode", "1", "--dtype", "float32", "--speculation", "ngram")


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_choices_differ_and_repeat_with_their_seed(client: openai.OpenAI) -> None:
    first, again = (client.chat.completions.create(**CHAT, n=4) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert len(set(texts)) > 1
    assert [choice.message.content for choice in again.choices] == texts
    assert first.usage is not None
    assert first.usage.completion_tokens <= 4 * 12


def test_logprobs_of_a_chat_and_of_a_completion(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3).choices[0]
    entries = chat.logprobs.content if chat.logprobs else None
    assert entries is not None
    assert "".join(entry.token for entry in entries) == chat.message.content
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
    text = client.completions.create(**TEXT, logprobs=2).choices[0]
    assert text.logprobs is not None
    assert "".join(text.logprobs.tokens or []) == text.text


def test_echo_gives_the_prompt_with_its_logprobs(client: openai.OpenAI) -> None:
    choice = client.completions.create(**TEXT, echo=True, logprobs=1).choices[0]
    assert choice.text.startswith(TEXT["prompt"])
    assert choice.logprobs is not None
    assert (choice.logprobs.token_logprobs or [0])[0] is None
    assert "".join(choice.logprobs.tokens or []) == choice.text


def test_stop_cuts_before_the_string(client: openai.OpenAI) -> None:
    whole = client.completions.create(**TEXT).choices[0].text
    stop = whole[4:7]
    cut = client.completions.create(**TEXT, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_a10_after_a_stop_in_mid_run_the_text_goes_on_as_without_speculation(client: openai.OpenAI) -> None:
    def complete(prompt: list[int], mode: str, **options: Any) -> list[int]:
        body = {**TEXT, "prompt": prompt, "temperature": 0.7, "logprobs": 0}
        answer = client.completions.create(**(body | options), extra_body={"speculation": mode})
        choice = answer.choices[0]
        assert choice.logprobs is not None
        return _tokenize(client, choice.text) if choice.text else []

    prompt = _tokenize(client, "one two three one two three one two three one")
    for mode_of_first in ("off", "ngram"):
        first = complete(prompt, mode_of_first, max_tokens=6)
        rest = [complete([*prompt, *first], mode, max_tokens=8) for mode in ("off", "ngram")]
        assert rest[0] == rest[1]


def test_stream_options(client: openai.OpenAI) -> None:
    for includes_usage in (True, False):
        chunks = list(
            client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": includes_usage})
        )
        assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [includes_usage]


def test_models_and_what_is_not_offered(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="not offered"):
        client.embeddings.create(model=MODEL, input="a")
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.completions.create(model="gpt-9", prompt="a")


def test_tokenize_and_detokenize(cluster: RunningCluster, client: openai.OpenAI) -> None:
    with httpx.Client(base_url=cluster.url, trust_env=False, timeout=60) as http:
        tokens = http.post("/tokenize", json={"prompt": "Grüße, 世界 🌍"}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "Grüße, 世界 🌍"
        chat = http.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    answer = client.chat.completions.create(**CHAT)
    assert answer.usage is not None
    assert chat["count"] == answer.usage.prompt_tokens


async def test_async_client_at_once(cluster: RunningCluster, client: openai.OpenAI) -> None:
    expected = client.chat.completions.create(**CHAT, temperature=0).choices[0].message.content
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as asynchronous:

        async def streamed() -> str:
            stream = await asynchronous.chat.completions.create(**CHAT, temperature=0, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

        whole, *pieces = await asyncio.gather(
            asynchronous.chat.completions.create(**CHAT, temperature=0, n=2), *(streamed() for _ in range(4))
        )
    assert {choice.message.content for choice in whole.choices} == {expected}
    assert set(pieces) == {expected}


def test_a_drafter_that_does_not_run_there_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(**TEXT, extra_body={"speculation": "medusa"})
    assert raised.value.param == "speculation"


def _tokenize(client: openai.OpenAI, text: str) -> list[int]:
    url = str(client.base_url).removesuffix("/v1/")
    tokens: list[int] = httpx.post(f"{url}/tokenize", json={"prompt": text}, trust_env=False, timeout=60).json()[
        "tokens"
    ]
    return tokens
