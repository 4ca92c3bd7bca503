"""Sampling of requests that say nothing of it: OpenAI's, or the checkpoint's where the operator says so."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cluster.errors import StartupError
from router.limits import ServingLimits
from router.sampling_defaults import defaults_of_model
from tests.router.byte_tokenizer import GENERATION_CONFIG
from tests.router.conftest import MODEL, StartRouter

LIMITS = ServingLimits(model_name=MODEL, vocab_size=300, max_model_len=512)
OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def test_what_a_checkpoint_says_is_checked_like_a_request() -> None:
    assert defaults_of_model(GENERATION_CONFIG, LIMITS) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert defaults_of_model({"top_k": 0, "temperature": None}, LIMITS) == {"top_k": -1}
    for wrong in ({"temperature": "hot"}, {"top_p": 0}, {"top_k": 301}):
        (name,) = wrong
        with pytest.raises(StartupError, match=rf"generation_config\.json: {name} is .*--sampling-defaults openai"):
            defaults_of_model(wrong, LIMITS)


@pytest.mark.parametrize(
    ("chosen", "expected"), [("openai", {}), ("model", {"temperature": 0.6, "top_p": 0.95, "top_k": 20})]
)
async def test_requests_that_name_none_get_the_chosen_ones_over_every_api(
    start_router: StartRouter, chosen: str, expected: dict[str, Any]
) -> None:
    router = await start_router(sampling_defaults=chosen)
    worker = await router.add_worker(router.new_worker("decode-a"))
    messages = [{"role": "user", "content": "hi"}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 1}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": messages, "max_tokens": 1}),
    ]
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        for path, body in bodies:
            answer = await http.post(path, json={"model": MODEL, **body})
            assert answer.status_code == 200, answer.text
            sampling = worker.submits[-1].sampling
            got = {name: getattr(sampling, name) for name in OPENAI}
            assert got == pytest.approx(OPENAI | expected), path
        own = {"model": MODEL, "prompt": "x", "max_tokens": 1, "temperature": 0, "top_p": 1, "top_k": -1}
        await http.post("/v1/completions", json=own)
    sampling = worker.submits[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 1, -1), "what a request says counts"
