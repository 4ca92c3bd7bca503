"""Answers over HTTP as the official `openai` client sees them, from scripted workers."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from tandem.v1 import common_pb2, worker_pb2

from tests.router.byte_tokenizer import END_ID
from tests.router.conftest import MODEL, RunningRouter
from tests.router.scripted_worker import Step, expected_token

QUESTION: Any = [{"role": "user", "content": "hi"}]


def _expected_text(router: RunningRouter, submission: int, num_tokens: int) -> str:
    submit = router.workers[-1].submits[submission]
    return "".join(chr(expected_token(submit, position)) for position in range(num_tokens))


async def test_chat_whole_and_streamed_are_the_same_text(router: RunningRouter) -> None:
    async with router.client() as client:
        whole = await client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=12, temperature=0)
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = whole.choices[0].message.content
    assert text == _expected_text(router, 0, 12)
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert whole.usage.prompt_tokens == len(router.workers[-1].submits[0].token_ids)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


async def test_sync_client_streams_completions(router: RunningRouter) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(model=MODEL, prompt="x", max_tokens=6, temperature=0, stream=True)
            return "".join(chunk.choices[0].text for chunk in stream)

    text = await asyncio.to_thread(ask)
    assert text == _expected_text(router, 0, 6)


async def test_request_reaches_the_worker_as_it_was_asked(router: RunningRouter) -> None:
    async with router.client() as client:
        await client.completions.create(
            model=MODEL,
            prompt=[104, 105],
            max_tokens=3,
            temperature=0.5,
            top_p=0.9,
            seed=-7,
            presence_penalty=0.25,
            logit_bias={"97": -2},
            user="someone",
            extra_body={"top_k": 40, "min_p": 0.1, "stop_token_ids": [10], "min_tokens": 2, "priority": 3},
        )
    submit = router.workers[-1].submits[0]
    sampling = submit.sampling
    assert list(submit.token_ids) == [104, 105]
    assert submit.prefill[0].worker_id == "prefill-0"
    assert submit.allow_local_prefill
    assert (sampling.seed, sampling.top_k, sampling.min_tokens) == (2**64 - 7, 40, 2)
    assert list(sampling.stop_token_ids) == [10, END_ID]
    assert dict(sampling.logit_bias) == {97: -2.0}
    assert submit.priority == 3
    assert 0 < submit.deadline_ms <= 600_000
    assert len(submit.scope.scope_key) == 16


async def test_end_of_sequence_is_counted_and_not_shown(router: RunningRouter) -> None:
    def script(submit: worker_pb2.SubmitRequest) -> list[Step]:
        end = worker_pb2.RequestEvent(
            request_id=submit.request_id,
            finish_reason=common_pb2.FINISH_REASON_STOP,
            has_stop_token=True,
            stop_token_id=END_ID,
        )
        return [Step([*b"hi"]), Step([ord("!"), END_ID], end)]

    router.workers[-1].script = script
    async with router.client() as client:
        answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=9)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hi!", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
