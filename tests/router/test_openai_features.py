"""OpenAI's features over HTTP: choices, usage, log-probabilities, echo, stop strings, timelines, deadlines."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from tandem.v1 import common_pb2, worker_pb2

from tests.router.byte_tokenizer import END_ID
from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.scripted_worker import Step, expected_token, position_logprobs

COMPLETION = {"model": MODEL, "prompt": "abc", "max_tokens": 5}


def says(*pieces: bytes) -> Any:
    """A script: these bytes, a step for each piece, then the end."""

    def script(submit: worker_pb2.SubmitRequest) -> list[Step]:
        steps = []
        for number, piece in enumerate(pieces):
            event = worker_pb2.RequestEvent(request_id=submit.request_id, fence=submit.fence)
            if submit.sampling.logprobs >= 0:
                event.logprobs.extend(position_logprobs(token, submit.sampling.logprobs) for token in piece)
            if number == len(pieces) - 1:
                event.finish_reason = common_pb2.FINISH_REASON_LENGTH
            steps.append(Step(list(piece), event))
        return steps

    return script


async def _events(http: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    """The JSON of each event; checks that `[DONE]` comes last, once."""
    async with http.stream("POST", path, json={**body, "stream": True}, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        text = (await response.aread()).decode()
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def _text(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)


# --- several choices --------------------------------------------------------------------------------------------------


async def test_a1_usage_of_two_streamed_choices_is_their_sum_once(http: httpx.AsyncClient) -> None:
    body = {**COMPLETION, "n": 2, "stream_options": {"include_usage": True}}
    events = await _events(http, "/v1/completions", body)
    assert [event["choices"] for event in events if event["usage"] is not None] == [[]]
    assert events[-1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 10,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
async def test_a2_usage_comes_once_before_done_and_only_when_asked_for(
    options: dict[str, bool] | None, http: httpx.AsyncClient
) -> None:
    body = COMPLETION if options is None else {**COMPLETION, "stream_options": options}
    events = await _events(http, "/v1/completions", body)
    if options is None or not options["include_usage"]:
        assert all("usage" not in event for event in events)
    else:
        assert [event["usage"] is None for event in events] == [*[True] * (len(events) - 1), False]
        assert events[-1]["choices"] == []


async def test_continuous_usage_counts_up(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await _events(http, "/v1/completions", {**COMPLETION, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5


async def test_a3_a4_choices_differ_are_all_there_and_repeat_with_their_seed(
    router: RunningRouter, http: httpx.AsyncClient
) -> None:
    body = {**COMPLETION, "n": 8, "temperature": 1, "seed": 1, "max_tokens": 12}
    answers = [(await http.post("/v1/completions", json=body)).json() for _ in range(2)]
    texts = [[choice["text"] for choice in answer["choices"]] for answer in answers]
    assert [choice["index"] for choice in answers[0]["choices"]] == list(range(8))
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 8
    streamed = await _events(http, "/v1/completions", body)
    assert [_text(streamed, index) for index in range(8)] == texts[0]
    assert {submit.sampling.seed for submit in router.workers[-1].submits} == {1}
    assert [submit.sampling.choice_index for submit in router.workers[-1].submits[:8]] == list(range(8))


async def test_requests_without_a_seed_get_different_ones_and_the_same_after_a_restart(
    start_router: StartRouter,
) -> None:
    seeds = []
    for name in ("a", "b"):
        router = await start_router(seed=5)
        worker = await router.add_worker(router.new_worker(name))
        async with router.client() as client:
            for _ in range(3):
                await client.completions.create(model=MODEL, prompt="x", max_tokens=1)
        seeds.append([submit.sampling.seed for submit in worker.submits])
    assert len(set(seeds[0])) == 3
    assert seeds[0] == seeds[1]


async def test_several_prompts_are_answered_in_order_with_n_choices_each(
    router: RunningRouter, http: httpx.AsyncClient
) -> None:
    body = {**COMPLETION, "prompt": ["one", "two"], "n": 2, "temperature": 0}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert [bytes(submit.token_ids) for submit in router.workers[-1].submits] == [b"one", b"one", b"two", b"two"]
    expected = [
        "".join(chr(expected_token(submit, position)) for position in range(5)) for submit in router.workers[-1].submits
    ]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 20


# --- log-probabilities and echo ---------------------------------------------------------------------------------------


async def test_a6_logprobs_zero_is_the_chosen_token_only(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/completions", json={**COMPLETION, "logprobs": 0})).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 5
    assert logprobs["token_logprobs"][0] == -0.25
    assert logprobs["top_logprobs"] is None
    assert "".join(logprobs["tokens"]) == answer["choices"][0]["text"]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]


async def test_chat_logprobs_have_openais_shape_whole_and_streamed(router: RunningRouter) -> None:
    question: Any = [{"role": "user", "content": "x"}]
    async with router.client() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=question, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=question, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert content[0].bytes == [ord(content[0].token)]
    assert [top.token for top in content[0].top_logprobs] == ["a", "b"]
    streamed = [
        entry for chunk in chunks for c in chunk.choices if c.logprobs is not None for entry in c.logprobs.content or []
    ]
    assert streamed == content


async def test_a7_echo_returns_the_prompt_and_its_logprobs(http: httpx.AsyncClient) -> None:
    body = {**COMPLETION, "echo": True, "logprobs": 1, "temperature": 0}
    answer = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    assert answer["text"].startswith("abc")
    logprobs = answer["logprobs"]
    assert logprobs["tokens"][:3] == ["a", "b", "c"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == [-0.25] * 7
    assert logprobs["text_offset"] == list(range(8))
    assert "".join(logprobs["tokens"]) == answer["text"]
    events = await _events(http, "/v1/completions", body)
    assert _text(events) == answer["text"]
    tokens = [token for e in events for c in e["choices"] if c["logprobs"] for token in c["logprobs"]["tokens"]]
    assert tokens == logprobs["tokens"]


async def test_s_b25_prompt_logprobs_have_an_entry_for_each_prompt_token(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/completions", json={**COMPLETION, "prompt_logprobs": 1})).json()["choices"][0]
    rows = answer["prompt_logprobs"]
    assert rows[0] is None
    assert rows[1][str(ord("b"))] == {"logprob": -0.25, "rank": 1, "decoded_token": "b"}
    assert len(rows) == 3
    streamed = await http.post("/v1/completions", json={**COMPLETION, "prompt_logprobs": 1, "stream": True})
    assert streamed.json()["error"]["param"] == "prompt_logprobs"


# --- stop strings -----------------------------------------------------------------------------------------------------


async def test_d5_stop_string_over_several_tokens_never_shows_and_ends_the_request_at_the_worker(
    router: RunningRouter, http: httpx.AsyncClient
) -> None:
    worker = router.workers[-1]
    worker.script = says(b"ABC", b"DEF", b"G", b"HI", b"J", b"KLM", b"NOP")
    body = {**COMPLETION, "stop": ["DEFGHIJ"], "max_tokens": 50}
    events = await _events(http, "/v1/completions", body)
    assert _text(events) == "ABC"
    last = events[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "DEFGHIJ")
    whole = (await http.post("/v1/completions", json=body)).json()
    assert whole["choices"][0]["text"] == "ABC"
    assert whole["usage"]["completion_tokens"] == 10
    assert router.bookings() == [(0, 0, 0)] * 2


async def test_a_stop_token_of_the_client_is_named_and_not_shown(
    router: RunningRouter, http: httpx.AsyncClient
) -> None:
    def script(submit: worker_pb2.SubmitRequest) -> list[Step]:
        end = worker_pb2.RequestEvent(
            request_id=submit.request_id,
            finish_reason=common_pb2.FINISH_REASON_STOP,
            has_stop_token=True,
            stop_token_id=ord("."),
        )
        return [Step([*b"hi."], end)]

    router.workers[-1].script = script
    body = {**COMPLETION, "stop_token_ids": [ord(".")]}
    choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hi", "stop", ord("."))


async def test_special_tokens_have_no_text(router: RunningRouter, http: httpx.AsyncClient) -> None:
    def script(submit: worker_pb2.SubmitRequest) -> list[Step]:
        end = worker_pb2.RequestEvent(request_id=submit.request_id, finish_reason=common_pb2.FINISH_REASON_LENGTH)
        return [Step([ord("a"), 257, END_ID, ord("b"), 299], end)]

    router.workers[-1].script = script
    answer = (await http.post("/v1/completions", json={**COMPLETION, "ignore_eos": True})).json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["usage"]["completion_tokens"] == 5
    assert list(router.workers[-1].submits[-1].sampling.stop_token_ids) == []


# --- ids, timeline, usage, other routes -------------------------------------------------------------------------------


async def test_s_b39_ids_are_made_by_the_server_and_the_clients_is_only_sent_back(
    router: RunningRouter, http: httpx.AsyncClient
) -> None:
    evil = "abc___decode_addr_evil:1234"
    answer = await http.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": evil})
    assert answer.headers["x-client-request-id"] == evil
    assert answer.headers["x-request-id"] == answer.json()["id"]
    assert "evil" not in str(router.workers[-1].submits)
    split = await http.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": "a" * 300})
    assert "x-client-request-id" not in split.headers


async def test_timeline_comes_in_the_json_and_in_the_last_event_before_done(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/completions", json=COMPLETION, headers={"X-Tandem-Timeline": "1"})).json()
    timeline = answer["tandem"]["timeline"]
    assert timeline["decode_worker_id"] == "decode-0"
    assert timeline["prefill_worker_id"] == "prefill-0"
    assert timeline["first_token_us"] == 1234
    assert timeline["placed_us"] > 0
    assert timeline["router_first_token_us"] >= timeline["placed_us"]
    events = await _events(http, "/v1/completions", COMPLETION, **{"X-Tandem-Timeline": "1"})
    assert events[-1]["choices"] == []
    assert events[-1]["tandem"]["timeline"]["transport"] == "shm"
    assert "tandem" not in (await http.post("/v1/completions", json=COMPLETION)).json()


async def test_models_tokenize_detokenize(router: RunningRouter, http: httpx.AsyncClient) -> None:
    async with router.client() as client:
        models = await client.models.list()
        assert [model.id for model in models.data] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-9")
    tokens = (await http.post("/tokenize", json={"model": MODEL, "prompt": "hi <|im_end|>"})).json()
    assert tokens == {"tokens": [*b"hi ", END_ID], "count": 4, "max_model_len": 512}
    chat = (await http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})).json()
    assert chat["tokens"][0] == 257
    assert (await http.post("/detokenize", json={"tokens": [*b"hi ", END_ID]})).json() == {"prompt": "hi <|im_end|>"}
    wrong = await http.post("/detokenize", json={"tokens": [300]})
    assert wrong.json()["error"]["code"] == "invalid_token_id"


async def test_statusz_shows_workers_pools_bookings_and_conservation(http: httpx.AsyncClient) -> None:
    status = (await http.get("/statusz")).json()
    assert status["pools"] == {"decode": 1, "prefill": 1}
    assert status["ready"] is True
    assert status["block_conservation_error"] == 0
    decode = next(worker for worker in status["workers"] if worker["role"] == "decode")
    assert decode["state"] == "ready"
    assert decode["counters"] == {"max_batch_size": 3.0}
    assert decode["load"]["total_blocks"] == 64
    assert decode["block_conservation_error"] == 0
    assert decode["booked"] == {"requests": 0, "prefill_tokens": 0, "kv_tokens": 0}


async def test_metrics_count_requests_tokens_and_failures(http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json=COMPLETION)
    await http.post("/v1/completions", json={**COMPLETION, "model": "x"})
    await http.post("/v1/completions", json={**COMPLETION, "prompt": "x" * 510})
    text = (await http.get("/metrics")).text
    assert f'tandem_generation_tokens_total{{model="{MODEL}"}} 5.0' in text
    assert f'tandem_request_success_total{{finished_reason="length",model="{MODEL}"}} 1.0' in text
    assert f'tandem_num_requests_running{{model="{MODEL}"}} 0.0' in text
    assert f'tandem_request_time_per_output_token_seconds_count{{model="{MODEL}"}} 1.0' in text
    assert f'tandem_build_info{{version="{(await http.get("/version")).json()["version"]}"}} 1.0' in text
    assert "_created" not in text
    assert f'tandem_request_refused_total{{code="context_length_exceeded",model="{MODEL}"}} 1.0' in text


async def test_a_model_is_asked_for_by_any_of_its_names_and_answers_by_its_own(start_router: StartRouter) -> None:
    router = await start_router(model_aliases=("gpt-4o-mini", "chat"))
    await router.add_worker(router.new_worker("decode-a"))
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["root"]) for model in listed] == [
            (name, MODEL) for name in (MODEL, "gpt-4o-mini", "chat")
        ]
        assert (await http.get("/v1/models/chat")).json()["id"] == "chat"
        answer = (await http.post("/v1/completions", json={**COMPLETION, "model": "chat"})).json()
        assert answer["model"] == MODEL
        other = await http.post("/v1/completions", json={**COMPLETION, "model": "gpt-4o"})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


async def test_unknown_paths_and_methods_have_openais_error_shape(http: httpx.AsyncClient) -> None:
    for method, path, status, code in (
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/livez", 405, "method_not_allowed"),
    ):
        answer = await http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_openapi_document_speaks_of_the_same_limits(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 8}
    assert schema["additionalProperties"] is False
