"""What a request may ask for: one rule for each field, the same for HTTP and gRPC, checked before anything is placed.

    fields     `chat_fields`, `completion_fields`: name -> rule (also the source of the OpenAPI document)
    refused    names that only our own processes use, and those of OpenAI's that are not offered: a 400 that says so
    lengths    `check_prompt_text` before tokenising, `fit_max_tokens` after

Bodies, headers and receipt times are bounded in `http_protocol` and `http_body`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import ContextLengthExceeded, InvalidRequest, RequestExceedsKvCapacity
from cluster.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_NUM_DRAFTS,
    MAX_STOP_TOKEN_IDS,
    SPECULATION_MODES,
    TOP_K_OFF,
)
from router.api_types import WHAT_FITS
from router.field_rules import (
    Flag,
    Integer,
    ListOf,
    LogitBias,
    NotOffered,
    Number,
    OneOf,
    OnlyValue,
    Record,
    Rule,
    Text,
    TokenId,
    unknown_parameter,
    unsupported_parameter,
)
from router.guided_output import (
    GUIDED_GRAMMAR,
    GUIDED_REGEX,
    GuidedChoice,
    GuidedJson,
    ResponseFormat,
    StructuredOutputs,
)
from router.template_options import TemplateOptions
from router.tool_fields import TOOLS, ToolChoice

# More characters than this for each token of context cannot fit: no tokenizer's average piece is longer.
MAX_CHARS_PER_TOKEN = 16
MAX_SEQUENCES_PER_REQUEST = 128  # prompts times choices
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 256
MAX_NAME_CHARS = 256
MIN_TIMEOUT_MS, MAX_TIMEOUT_MS = 100, 600_000
# OpenAI's default for /v1/completions; chats get what fits.
DEFAULT_COMPLETION_TOKENS = 16

# Fields by which one serving process steers another in other systems: from a client they would forge blocks or peers.
INTERNAL_FIELDS = frozenset(
    {
        "kv_transfer_params", "do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_host", "remote_port",
        "remote_block_ids", "bootstrap_host", "bootstrap_port", "bootstrap_room", "disaggregated_params",
        "data_parallel_rank", "dp_rank", "tp_rank", "block_ids", "block_hashes", "hash_ids", "prefill", "placement",
        "generated_token_ids", "fence", "scope_key", "traceparent", "request_id", "transfer_id", "prompt_embeds",
        "input_embeds", "embeddings", "chat_template_kwargs", "documents", "mm_processor_kwargs",
    }
)  # fmt: skip
# OpenAI's and vLLM's fields that are known and not offered.
UNSUPPORTED_FIELDS = frozenset(
    {
        "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call",
        "guided_decoding_backend", "guided_whitespace_pattern", "suffix", "best_of", "modalities",
        "audio", "prediction", "reasoning_effort", "web_search_options", "store", "metadata",
        "verbosity", "use_beam_search", "length_penalty",
        "add_special_tokens", "logits_processors", "add_generation_prompt", "continue_final_message", "chat_template",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What the model, the cluster and the operator allow."""

    model_name: str
    vocab_size: int
    max_model_len: int
    max_choices: int = 8
    aliases: tuple[str, ...] = ()  # answers carry `model_name`, whichever of them was asked for
    max_priority: int = 100

    @property
    def names(self) -> tuple[str, ...]:
        """All that requests may ask for, the model's own first."""
        return (self.model_name, *self.aliases)

    @property
    def max_prompt_chars(self) -> int:
        return MAX_CHARS_PER_TOKEN * self.max_model_len


def chat_fields(limits: ServingLimits) -> dict[str, Rule]:
    # The messages' own shape is checked by `chat_messages`.
    return {
        **_shared_fields(limits),
        "max_completion_tokens": _max_tokens(limits),
        "logprobs": Flag(),
        "top_logprobs": Integer(0, MAX_LOGPROBS),
        "tools": TOOLS,
        "tool_choice": ToolChoice(),
        "parallel_tool_calls": Flag(),
        **accepted_hints(),
        "chat_template_kwargs": TemplateOptions(),
        "add_generation_prompt": Flag(),
        "continue_final_message": Flag(),
    }


def accepted_hints() -> dict[str, Rule]:
    """OpenAI's fields that clients send of their own accord, and that ask for no other answer."""
    return {
        "service_tier": OneOf(("auto", "default")),
        # A hint where a prompt's KV may lie: the router knows it from the prompt itself.
        "prompt_cache_key": Text(0, MAX_NAME_CHARS),
        "safety_identifier": Text(0, MAX_NAME_CHARS),
    }


def completion_fields(limits: ServingLimits) -> dict[str, Rule]:
    return {**_shared_fields(limits), "logprobs": Integer(0, MAX_LOGPROBS), "echo": Flag()}


def check_fields(body: Mapping[str, Any], rules: Mapping[str, Rule], unchecked: frozenset[str]) -> dict[str, Any]:
    """The body's fields as their rules give them; null means absent. `unchecked` names are left to the caller.

    Raises `InvalidRequest` for a wrong value, and `unknown_parameter` or `unsupported_parameter`.
    """
    values: dict[str, Any] = {}
    for name, value in body.items():
        if name in rules:
            if value is not None:
                values[name] = rules[name].check(value, name)
        elif name not in unchecked:
            _refuse(name, value, rules)
    return values


def check_prompt_text(num_chars: int, limits: ServingLimits, param: str) -> None:
    """Before tokenising: what cannot fit costs nothing."""
    if num_chars > limits.max_prompt_chars:
        raise ContextLengthExceeded(
            f"{param} has {num_chars} characters; more than {limits.max_prompt_chars} cannot fit into the model's "
            f"{limits.max_model_len} tokens",
            param=param,
        )


def fit_max_tokens(
    asked: int | None, num_prompt_tokens: int, limits: ServingLimits, kv_capacity_tokens: int, param: str
) -> int:
    """The number of tokens to generate: what was asked for, else all that fits.

    `kv_capacity_tokens`: the largest pool of a decode worker; 0 is not known. Raises when it does not fit.
    """
    room = limits.max_model_len - num_prompt_tokens
    if room < 1 or (asked is not None and asked > room):
        wanted = f" and {asked} were asked for" if asked is not None else ""
        raise ContextLengthExceeded(
            f"the model's context is {limits.max_model_len} tokens: {param} has {num_prompt_tokens}{wanted}",
            param=param,
        )
    if not kv_capacity_tokens:
        return room if asked is None else asked
    kv_room = kv_capacity_tokens - num_prompt_tokens
    if kv_room < (1 if asked is None else asked):
        raise RequestExceedsKvCapacity(
            f"{param} has {num_prompt_tokens} tokens; with {asked or 1} more they do not fit into the "
            f"{kv_capacity_tokens} tokens of KV cache of any decode worker",
            param=param,
        )
    return min(room, kv_room) if asked is None else asked


def check_num_sequences(num_prompts: int, num_choices: int) -> None:
    if num_prompts * num_choices > MAX_SEQUENCES_PER_REQUEST:
        raise InvalidRequest(
            f"{num_prompts} prompts with n = {num_choices} are {num_prompts * num_choices} sequences, "
            f"at most {MAX_SEQUENCES_PER_REQUEST} in one request",
            param="n" if num_prompts == 1 else "prompt",
        )


def _shared_fields(limits: ServingLimits) -> dict[str, Rule]:
    penalty = Number(-2.0, 2.0)
    return {
        "model": Text(1, MAX_NAME_CHARS),
        "stream": Flag(),
        "stream_options": Record({"include_usage": Flag(), "continuous_usage_stats": Flag()}),
        "max_tokens": _max_tokens(limits),
        "n": Integer(1, limits.max_choices),
        "temperature": Number(0.0, 2.0),
        "top_p": Number(0.0, 1.0, excludes_low=True),
        "top_k": Integer(1, limits.vocab_size, also=(TOP_K_OFF,)),
        "min_p": Number(0.0, 1.0),
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        "repetition_penalty": Number(0.0, 2.0, excludes_low=True),
        "logit_bias": LogitBias(limits.vocab_size, MAX_LOGIT_BIAS_ENTRIES, Number(-100.0, 100.0)),
        "prompt_logprobs": Integer(0, MAX_LOGPROBS),
        "seed": Integer(-(2**63), 2**63 - 1),
        "stop": ListOf(Text(1, MAX_STOP_CHARS), MAX_STOP_STRINGS, accepts_single=True),
        "stop_token_ids": ListOf(TokenId(limits.vocab_size), MAX_STOP_TOKEN_IDS),
        "allowed_token_ids": ListOf(TokenId(limits.vocab_size), limits.vocab_size, min_items=1),
        "bad_words": ListOf(Text(1, MAX_STOP_CHARS), MAX_BAD_WORDS // 2),
        "min_tokens": Integer(0, limits.max_model_len),
        "ignore_eos": Flag(),
        "include_stop_str_in_output": Flag(),
        "skip_special_tokens": Flag(),
        # Text is the tokens' bytes one after the other: no spaces are put between any, which either value asks for.
        "spaces_between_special_tokens": Flag(),
        "truncate_prompt_tokens": Integer(1, limits.max_model_len, also=(WHAT_FITS,)),
        "return_token_ids": Flag(),
        "return_tokens_as_token_ids": Flag(),
        "response_format": ResponseFormat(),
        "guided_json": GuidedJson(),
        "guided_regex": GUIDED_REGEX,
        "guided_choice": GuidedChoice(),
        "guided_grammar": GUIDED_GRAMMAR,
        "structured_outputs": StructuredOutputs(),
        "user": Text(0, MAX_NAME_CHARS),
        "cache_salt": Text(1, MAX_NAME_CHARS),
        "speculation": OneOf(SPECULATION_MODES),
        "num_drafts": Integer(1, MAX_NUM_DRAFTS),
        "priority": Integer(-limits.max_priority, limits.max_priority),
    }


def _max_tokens(limits: ServingLimits) -> Rule:
    return Integer(1, 2**31 - 1)


def _refuse(name: str, value: object, rules: Mapping[str, Rule]) -> None:
    """OpenAI clients send some fields as null, which asks for nothing."""
    if name in INTERNAL_FIELDS:
        raise unsupported_parameter(name, "it is internal to the server")
    if name in UNSUPPORTED_FIELDS:
        if value is None:
            return
        neutral = _NEUTRAL_VALUES.get(name)
        if neutral is None:
            raise unsupported_parameter(name, "this server does not offer it")
        neutral.check(value, name)
        return
    raise unknown_parameter(name)


# Values that ask for what happens anyhow: libraries write defaults of their own into every request.
_NEUTRAL_VALUES: dict[str, Rule] = {
    "tool_choice": OnlyValue("none", "tools belong to a chat"),
    "tools": OnlyValue([], "tools belong to a chat"),
    "best_of": OnlyValue(1, "this server returns every choice it generates; use n"),
    "store": OnlyValue(False, "this server stores nothing"),
    "add_generation_prompt": OnlyValue(True, "it belongs to a chat"),
    "continue_final_message": OnlyValue(False, "it belongs to a chat"),
    "chat_template": NotOffered("templates are the operator's: --chat-template-file"),
    "use_beam_search": OnlyValue(False, "this server samples"),
    "length_penalty": OnlyValue(1.0, "it belongs to beam search"),
    "logits_processors": OnlyValue([], "no code of clients runs here"),
    "modalities": OnlyValue(["text"], "only text is generated"),
    "reasoning_effort": OnlyValue("none", "chat_template_kwargs has enable_thinking, where the model has it"),
    "verbosity": OnlyValue("medium", "ask for it in the prompt"),
}
