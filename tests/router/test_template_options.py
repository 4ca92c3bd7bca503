"""The one switch of a chat template that a request may set, and everything else that it may not."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cluster.chat_template import ChatTemplate
from cluster.errors import InvalidRequest
from router.api_types import ChatPrompt
from router.prompt_encoder import PromptEncoder
from tests.router.byte_tokenizer import CHATML, byte_tokenizer
from tests.router.conftest import MODEL, RunningRouter

# As in Qwen 3's: an empty thought tells the model that it has thought already.
THINKING = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
MESSAGES = ({"role": "user", "content": "hi"},)


async def written(enables_thinking: bool | None, template: str = THINKING) -> str:
    encoder = PromptEncoder(byte_tokenizer(), ChatTemplate(template, {}))
    try:
        token_ids = await encoder.encode(ChatPrompt(MESSAGES, enables_thinking=enables_thinking), b"owner")
    finally:
        encoder.close()
    return bytes(token for token in token_ids if token < 256).decode()


async def test_the_switch_reaches_the_template() -> None:
    assert (await written(False)).endswith("<think></think>")
    assert await written(True) == await written(None)
    assert "<think>" not in await written(None)


async def test_a_template_without_the_switch_refuses_it_by_name() -> None:
    with pytest.raises(InvalidRequest, match="no thinking to switch") as refused:
        await written(False, CHATML)
    assert refused.value.param == "chat_template_kwargs.enable_thinking"


WRONG: list[tuple[Any, str]] = [
    ({"enable_thinking": False}, "chat_template_kwargs.enable_thinking"),  # the model here has none
    ({"enable_thinking": "no"}, "chat_template_kwargs.enable_thinking"),
    ({"enable_thinking": True, "tokenize": True}, "chat_template_kwargs"),
    ({"messages": []}, "chat_template_kwargs"),
    ("enable_thinking", "chat_template_kwargs"),
]


async def test_s_b18_what_a_request_may_not_set_is_named(router: RunningRouter, http: httpx.AsyncClient) -> None:
    bodies: dict[str, Any] = {"/v1/chat/completions": {"messages": [*MESSAGES]}, "/v1/responses": {"input": "hi"}}
    for path, body in bodies.items():
        for options, param in WRONG:
            answer = await http.post(path, json={"model": MODEL, **body, "chat_template_kwargs": options})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (path, answer.text)
    assert router.workers[-1].submits == []


async def test_options_that_set_nothing_change_nothing(router: RunningRouter, http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": [*MESSAGES], "max_tokens": 2, "chat_template_kwargs": {"enable_thinking": None}}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert len(router.workers[-1].submits) == 1
