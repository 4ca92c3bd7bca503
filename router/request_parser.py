"""A decoded body as a `GenerationRequest`: the one path of checks for HTTP and gRPC.

It knows the limits, not the workers: what depends on the prompt's tokens is checked after tokenising.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from cluster.errors import InvalidRequest, ModelNotFound, shown
from cluster.sampling_params import NO_LOGPROBS
from router.api_types import ApiKind, ChatPrompt, GenerationRequest, Prompt, TextPrompt, TokenPrompt, ToolUse
from router.chat_messages import check_messages
from router.field_rules import TokenId, invalid_value
from router.guided_output import the_guide
from router.limits import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_SEQUENCES_PER_REQUEST,
    ServingLimits,
    chat_fields,
    check_fields,
    check_num_sequences,
    check_prompt_text,
    completion_fields,
)
from router.tool_fields import tool_use
from router.tool_format import ToolFormat, call_guide

# Fields that mean the same in the request and here.
_SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "prompt_logprobs", "echo", "user",
    "cache_salt", "priority", "speculation", "num_drafts", "include_stop_str_in_output", "skip_special_tokens",
    "truncate_prompt_tokens", "allowed_token_ids", "bad_words", "return_token_ids", "return_tokens_as_token_ids",
)  # fmt: skip


class AroundBody(NamedTuple):
    """What a request says beside its body: in HTTP's headers, in gRPC's metadata and deadline."""

    timeout_s: float | None = None
    wants_timeline: bool = False
    traceparent: str = ""
    client_request_id: str = ""


NOTHING_AROUND = AroundBody()
MAX_CLIENT_ID_CHARS = 128


def client_request_id(value: str) -> str:
    """The client's own id of a request, when it is harmless to say again: else nothing."""
    return value if len(value) <= MAX_CLIENT_ID_CHARS and all("!" <= char <= "~" for char in value) else ""


class RequestParser:
    """Checks bodies against one model's limits."""

    def __init__(
        self,
        limits: ServingLimits,
        default_max_tokens: int | None,
        tool_format: ToolFormat,
        sampling_defaults: Mapping[str, Any],
    ) -> None:
        """`default_max_tokens` None: what fits for a chat, OpenAI's 16 for a completion.

        `sampling_defaults`: other values than OpenAI's for fields that a request leaves out.
        """
        self.limits = limits
        self._chat_fields = chat_fields(limits)
        self._completion_fields = completion_fields(limits)
        self._default_max_tokens = default_max_tokens
        self._tool_format = tool_format
        self._sampling_defaults = dict(sampling_defaults)

    def parse_chat(self, body: Mapping[str, Any], around: AroundBody = NOTHING_AROUND) -> GenerationRequest:
        """Raises `InvalidRequest`, `ContextLengthExceeded` or `ModelNotFound`."""
        values = check_fields(body, self._chat_fields, frozenset({"messages"}))
        self.check_model(values)
        if "messages" not in body:
            raise InvalidRequest("messages is missing", param="messages")
        return self.chat_request(ApiKind.CHAT, values, check_messages(body["messages"], self.limits), around)

    def chat_request(
        self,
        kind: ApiKind,
        values: Mapping[str, Any],
        messages: tuple[Mapping[str, Any], ...],
        around: AroundBody,
    ) -> GenerationRequest:
        """From checked values under the names of `chat_fields`, whichever API's body they come from.

        Raises `InvalidRequest` for values that contradict each other.
        """
        use = tool_use(values)
        is_continued = _is_continued(values, messages)
        prompt = ChatPrompt(
            messages,
            () if use is None else use.tools,
            values.get("chat_template_kwargs"),
            is_continued,
            values.get("add_generation_prompt", not is_continued),
        )
        request = GenerationRequest(
            kind=kind,
            prompts=(prompt,),
            max_tokens=_chat_max_tokens(values, self._default_max_tokens),
            logprobs=_chat_logprobs(values),
            tool_use=use,
            **_shared_values({**self._sampling_defaults, **values}, 1, around),
        )
        return request if use is None else self._with_calls(request, use)

    def parse_completion(self, body: Mapping[str, Any], around: AroundBody = NOTHING_AROUND) -> GenerationRequest:
        """Raises `InvalidRequest`, `ContextLengthExceeded` or `ModelNotFound`."""
        values = check_fields(body, self._completion_fields, frozenset({"prompt"}))
        self.check_model(values)
        if body.get("prompt") is None:
            raise InvalidRequest("prompt is missing", param="prompt")
        prompts = self._check_prompt(body["prompt"])
        default = self._default_max_tokens or DEFAULT_COMPLETION_TOKENS
        return GenerationRequest(
            kind=ApiKind.COMPLETION,
            prompts=prompts,
            max_tokens=values.get("max_tokens", default),
            logprobs=values.get("logprobs", NO_LOGPROBS),
            **_shared_values({**self._sampling_defaults, **values}, len(prompts), around),
        )

    def _with_calls(self, request: GenerationRequest, use: ToolUse) -> GenerationRequest:
        """The request with what its tools say of the answer."""
        guide = call_guide(use, self._tool_format)
        if request.guide is not None:
            raise InvalidRequest(
                f"{request.guide.param} and tools both constrain the answer: set tool_choice to none, or leave one out",
                param=request.guide.param,
            )
        described = tuple(tool.check(is_followed=guide is not None) for tool in use.tools)
        return dataclasses.replace(request, guide=guide, described=described)

    def check_model(self, values: Mapping[str, Any]) -> None:
        """Raises `InvalidRequest` without a name and `ModelNotFound` for another one's."""
        name = values.get("model")
        served = self.limits.names
        if name is None:
            raise InvalidRequest(f"model is missing; served: {', '.join(served)}", param="model")
        if name not in served:
            raise ModelNotFound(f"no model {shown(name)}; served: {', '.join(served)}", param="model")

    def _check_prompt(self, value: Any) -> tuple[Prompt, ...]:
        """A text, token ids, or a list of either."""
        if isinstance(value, str):
            check_prompt_text(len(value), self.limits, "prompt")
            return (TextPrompt(value),)
        if not isinstance(value, list):
            raise invalid_value("prompt", value, "a string, an array of strings, of token ids, or of those arrays")
        if not value:
            raise InvalidRequest("prompt is empty", param="prompt")
        if not isinstance(value[0], str | list):
            return (self._token_prompt(value),)
        if len(value) > MAX_SEQUENCES_PER_REQUEST:
            raise InvalidRequest(
                f"prompt has {len(value)} entries, at most {MAX_SEQUENCES_PER_REQUEST}", param="prompt"
            )
        if isinstance(value[0], str):
            texts = [item for item in value if isinstance(item, str)]
            if len(texts) != len(value):
                raise InvalidRequest("prompt mixes strings with other values", param="prompt")
            check_prompt_text(max(map(len, texts)), self.limits, "prompt")
            return tuple(TextPrompt(text) for text in texts)
        return tuple(self._token_prompt(item) for item in value)

    def _token_prompt(self, value: Any) -> TokenPrompt:
        if not isinstance(value, list) or not value:
            raise invalid_value("prompt", value, "a non-empty array of token ids")
        check_prompt_text(len(value), self.limits, "prompt")
        vocab_size = self.limits.vocab_size
        # At the speed of C: a prompt may have a million ids.
        if set(map(type, value)) != {int} or min(value) < 0 or max(value) >= vocab_size:
            rule = TokenId(vocab_size)
            for item in value:
                rule.check(item, "prompt")
        return TokenPrompt(tuple(value))


def _shared_values(values: Mapping[str, Any], num_prompts: int, around: AroundBody) -> dict[str, Any]:
    num_choices = values.get("n", 1)
    check_num_sequences(num_prompts, num_choices)
    is_streamed = values.get("stream", False)
    options = values.get("stream_options")
    if options is not None and not is_streamed:
        raise InvalidRequest("stream_options is set and stream is not", param="stream_options")
    options = options or {}
    if is_streamed and "prompt_logprobs" in values:
        raise InvalidRequest("prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs")
    return {
        **{name: values[name] for name in _SAME_NAME if name in values},
        "guide": the_guide(values),
        "num_choices": num_choices,
        "is_streamed": is_streamed,
        "includes_usage": options.get("include_usage", False),
        "has_continuous_usage": options.get("continuous_usage_stats", False),
        "timeout_s": around.timeout_s,
        "wants_timeline": around.wants_timeline,
        "traceparent": around.traceparent,
        "client_request_id": around.client_request_id,
    }


def _is_continued(values: Mapping[str, Any], messages: tuple[Mapping[str, Any], ...]) -> bool:
    """Raises `InvalidRequest` where there is nothing to go on with."""
    if not values.get("continue_final_message", False):
        return False
    if values.get("add_generation_prompt", False):
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt contradict each other: leave one of them out",
            param="continue_final_message",
        )
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or not last["content"]:
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant's, with text and without calls",
            param="continue_final_message",
        )
    return True


def _chat_max_tokens(values: Mapping[str, Any], default: int | None) -> int | None:
    """OpenAI renamed the field; both with different values contradict each other."""
    old, new = values.get("max_tokens"), values.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_tokens is {old} and max_completion_tokens is {new}: give one of them", param="max_completion_tokens"
        )
    chosen = new if new is not None else old
    return default if chosen is None else int(chosen)


def _chat_logprobs(values: Mapping[str, Any]) -> int:
    """`logprobs: true` alone is the chosen token only."""
    num_top = values.get("top_logprobs")
    if not values.get("logprobs", False):
        if num_top:
            raise InvalidRequest("top_logprobs is set and logprobs is not true", param="top_logprobs")
        return NO_LOGPROBS
    return int(num_top or 0)
