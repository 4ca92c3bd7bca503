"""What is refused, as one table: field, value, and what the answer says. HTTP and gRPC tests run the same rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.router.byte_tokenizer import MAX_MODEL_LEN, VOCAB_SIZE

BIG = 2**63


@dataclass(frozen=True)
class Row:
    """One field with one wrong value, in an otherwise good completion request."""

    field: str
    value: Any
    code: str = "invalid_request"
    status: int = 400
    param: str = ""

    @property
    def named(self) -> str:
        return self.param or self.field

    def __str__(self) -> str:
        return f"{self.field}={self.value!r}"[:60]


def _numbers(field: str, low: float, high: float, step: float, *, excludes_low: bool = False) -> list[Row]:
    below = low if excludes_low else low - step
    wrong: list[Any] = [below, high + step, -1e308, 1e308, True, False, "1", [], {}]
    return [Row(field, value) for value in wrong]


def _integers(field: str, low: int, high: int) -> list[Row]:
    wrong: list[Any] = [low - 1, high + 1, 1.5, 1.0, True, False, "1", [], {}, BIG]
    return [Row(field, value) for value in wrong]


BAD_SCHEMA = "invalid_json_schema"
DEEP_SCHEMA: dict[str, Any] = {"type": "string"}
for _ in range(11):
    DEEP_SCHEMA = {"type": "array", "items": DEEP_SCHEMA}


def _named(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


# Constraints that are wrong: field, value, code, and the place that the error names.
WRONG_GUIDES: list[tuple[str, Any, str, str]] = [
    ("response_format", "json", "invalid_request", "response_format"),
    ("response_format", {}, "unsupported_parameter", "response_format.type"),
    ("response_format", {"type": "xml"}, "unsupported_parameter", "response_format.type"),
    ("response_format", {"type": "json_object", "schema": {}}, "unknown_parameter", "response_format.schema"),
    ("response_format", {"type": "json_schema"}, "invalid_request", "response_format.json_schema"),
    ("response_format", _named([]), BAD_SCHEMA, "response_format.json_schema.schema"),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}, "invalid_request",
     "response_format.json_schema.name"),
    ("response_format", _named({"type": "something"}), BAD_SCHEMA, "response_format.json_schema.schema"),
    ("response_format", _named({"properties": {"a": {"pattern": "("}}}), BAD_SCHEMA,
     "response_format.json_schema.schema.properties.a"),
    ("response_format", _named({"properties": {"a": {"anyOf": [{}, {"not": {}}]}}}), BAD_SCHEMA,
     "response_format.json_schema.schema.properties.a.anyOf[1]"),
    ("response_format", _named({"$ref": "http://127.0.0.1:1/s"}), BAD_SCHEMA,
     "response_format.json_schema.schema.$ref"),
    ("response_format", _named({"items": {"$ref": "file:///etc/passwd"}}), BAD_SCHEMA,
     "response_format.json_schema.schema.items.$ref"),
    ("response_format", _named({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), BAD_SCHEMA,
     "response_format.json_schema.schema"),
    ("response_format", _named({"maxLength": 10**9}), BAD_SCHEMA, "response_format.json_schema.schema.maxLength"),
    ("response_format", _named({"pattern": "a" * 2000}), BAD_SCHEMA, "response_format.json_schema.schema.pattern"),
    ("response_format", _named({"enum": ["x" * 70_000]}), BAD_SCHEMA, "response_format.json_schema.schema"),
    ("response_format", _named(DEEP_SCHEMA), BAD_SCHEMA, "response_format.json_schema.schema" + ".items" * 10),
    ("guided_json", "{", BAD_SCHEMA, "guided_json"),
    ("guided_json", 7, BAD_SCHEMA, "guided_json"),
    ("guided_json", {"enum": []}, BAD_SCHEMA, "guided_json"),
    ("guided_regex", "(a", "invalid_regex", "guided_regex"),
    ("guided_regex", "(?=a)b", "invalid_regex", "guided_regex"),
    ("guided_regex", "", "invalid_request", "guided_regex"),
    ("guided_regex", "a" * 9000, "invalid_request", "guided_regex"),
    ("guided_grammar", "start: nothing", "invalid_grammar", "guided_grammar"),
    ("guided_grammar", "(", "invalid_grammar", "guided_grammar"),
    ("guided_choice", [], "invalid_request", "guided_choice"),
    ("guided_choice", ["a", 1], "invalid_request", "guided_choice"),
    ("guided_choice", ["a"] * 300, "invalid_request", "guided_choice"),
    ("guided_choice", "a", "invalid_request", "guided_choice"),
]  # fmt: skip

# The whole of `limits`, at one below, one above, and with the wrong types.
WRONG_VALUES: list[Row] = [
    *_numbers("temperature", 0, 2, 0.001),
    *_numbers("top_p", 0, 1, 0.001, excludes_low=True),
    *_numbers("min_p", 0, 1, 0.001),
    *_numbers("presence_penalty", -2, 2, 0.001),
    *_numbers("frequency_penalty", -2, 2, 0.001),
    *_numbers("repetition_penalty", 0, 2, 0.001, excludes_low=True),
    *_integers("n", 1, 8),
    Row("n", 129),
    Row("n", 10**9),
    Row("n", -1),
    *_integers("max_tokens", 1, 2**31 - 1),
    *_integers("top_k", 1, VOCAB_SIZE),
    Row("top_k", -2),
    *_integers("logprobs", 0, 20),
    Row("prompt_logprobs", -1),
    Row("prompt_logprobs", 21),
    Row("prompt_logprobs", VOCAB_SIZE - 1),
    Row("prompt_logprobs", True),
    Row("seed", BIG),
    Row("seed", 1.0),
    Row("seed", True),
    Row("seed", "1"),
    *_integers("min_tokens", 0, MAX_MODEL_LEN),
    *_integers("priority", -100, 100),
    Row("ignore_eos", 0),
    Row("ignore_eos", 1),
    Row("ignore_eos", "true"),
    *[Row("echo", value) for value in (0, "yes")],
    *[Row("stream", value) for value in (0, 1, "true")],
    Row("stop", ""),
    Row("stop", ["a", ""]),
    Row("stop", ["a"] * 5),
    Row("stop", "a" * 257),
    Row("stop", [1]),
    Row("stop", True),
    Row("stop", {"a": 1}),
    Row("stop_token_ids", [VOCAB_SIZE], "invalid_token_id"),
    Row("stop_token_ids", [-1], "invalid_token_id"),
    Row("stop_token_ids", [True], "invalid_token_id"),
    Row("stop_token_ids", [1.0], "invalid_token_id"),
    Row("stop_token_ids", [1] * 17),
    Row("stop_token_ids", 1),
    Row("allowed_token_ids", [VOCAB_SIZE], "invalid_token_id"),
    Row("allowed_token_ids", [-1], "invalid_token_id"),
    Row("allowed_token_ids", [True], "invalid_token_id"),
    Row("allowed_token_ids", []),
    Row("allowed_token_ids", 1),
    Row("allowed_token_ids", [1] * (VOCAB_SIZE + 1)),
    Row("bad_words", [1]),
    Row("bad_words", "a"),
    Row("bad_words", ["a", ""]),
    *_integers("truncate_prompt_tokens", 1, MAX_MODEL_LEN),
    *[
        Row(field, value)
        for field in ("include_stop_str_in_output", "skip_special_tokens", "return_token_ids")
        for value in (0, 1, "true")
    ],
    Row("logit_bias", {str(VOCAB_SIZE): 1}, "invalid_token_id"),
    Row("logit_bias", {"-1": 1}, "invalid_token_id"),
    Row("logit_bias", {"a": 1}, "invalid_token_id"),
    Row("logit_bias", {"1.0": 1}, "invalid_token_id"),
    Row("logit_bias", {"1": 100.5}),
    Row("logit_bias", {"1": True}),
    Row("logit_bias", {"1": "1"}),
    Row("logit_bias", [1]),
    Row("logit_bias", {str(key % VOCAB_SIZE) + " " * (key // VOCAB_SIZE): 0 for key in range(1025)}),
    Row("user", 1),
    Row("user", "u" * 257),
    Row("cache_salt", ""),
    Row("prompt", None),
    Row("prompt", 7),
    Row("prompt", []),
    Row("prompt", {}),
    Row("prompt", [[]]),
    Row("prompt", ["a", 1]),
    Row("prompt", ["a"] * 129),
    Row("prompt", [VOCAB_SIZE], "invalid_token_id"),
    Row("prompt", [-1], "invalid_token_id"),
    Row("prompt", [1, True], "invalid_token_id"),
    Row("prompt", [1, 2.0], "invalid_token_id"),
    Row("prompt", [BIG], "invalid_token_id"),
    Row("prompt", [[1], "a"]),
    Row("prompt", ""),
    Row("prompt", "a" * (MAX_MODEL_LEN), "context_length_exceeded"),
    Row("prompt", "a" * (16 * MAX_MODEL_LEN + 1), "context_length_exceeded"),
    Row("prompt", [1] * 400_000, "context_length_exceeded"),
    Row("max_tokens", MAX_MODEL_LEN, "context_length_exceeded", param="prompt"),
    Row("model", "gpt-9", "model_not_found", 404),
    Row("model", "m" * 300),
    Row("model", 7),
    Row("model", None),
    Row("stream_options", {"include_usage": True}),
    Row("stream_options", []),
    Row("unheard_of", 1, "unknown_parameter"),
    Row("Temperature", 1, "unknown_parameter"),
    Row("speculation", "made up"),
    Row("speculation", 1),
    *_integers("num_drafts", 1, 15),
    Row("best_of", 1_000_000, "unsupported_parameter"),
    Row("suffix", "x", "unsupported_parameter"),
    *[Row(field, value, code, param=param) for field, value, code, param in WRONG_GUIDES],
    Row("tools", [{"type": "function"}], "unsupported_parameter"),
    *[
        Row(field, value, "unsupported_parameter")
        for field, value in (
            ("kv_transfer_params", {"remote_host": "evil"}),
            ("remote_block_ids", [1, 2]),
            ("bootstrap_host", "evil"),
            ("block_hashes", ["00"]),
            ("prompt_embeds", "AAAA"),
            ("chat_template", "{% for i in range(10**9) %}x{% endfor %}"),
            ("chat_template_kwargs", {"tokenize": True}),
            ("generated_token_ids", [1]),
            ("data_parallel_rank", 0),
        )
    ],
]
