"""What guides constrained output, as the text that `llguidance` takes: the same in the router, which checks it, and in
the workers, which follow it.

    json_schema   JSON Schema; white space between tokens is free, in short runs: a model must not pad for ever
    regex         a whole answer that matches; derivatives of regular expressions, so never exponential
    grammar       a context-free grammar in llguidance's dialect of Lark

The library compiles lazily, under limits of its own (sizes, states, "fuel"), so no grammar can take a thread hostage.
"""

from __future__ import annotations

import json
from typing import Any

import llguidance

from cluster.errors import InvalidRequest
from cluster.sampling_params import MAX_GUIDE_BYTES

# Between two JSON tokens: a line break and an indentation.
JSON_WHITE_SPACE = r"[ \t\n\r]{0,40}"
# Quieter than the library's default, which prints warnings to standard error.
LOG_LEVEL = 0
MAX_REASON_CHARS = 300
UNSATISFIABLE = ("NoExtension", "NoExtensionBias")  # the library's words for "nothing may come next"
INVALID_GUIDE_CODES = {
    "json_schema": "invalid_json_schema",
    "regex": "invalid_regex",
    "grammar": "invalid_grammar",
}


def compile_guide(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> llguidance.LLMatcher:
    """A constraint at its start, its first tokens worked out. Raises `InvalidRequest` for what cannot be followed."""
    matcher = llguidance.LLMatcher(tokenizer, guide_text(kind, text), log_level=LOG_LEVEL, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # what is too large to follow shows here
    if matcher.stop_reason() in UNSATISFIABLE and not matcher.is_accepting():
        raise InvalidRequest("no text can satisfy it", param=kind, code=INVALID_GUIDE_CODES[kind])
    if matcher.is_error():  # the library's message may be followed by a dump of its state
        reason = matcher.get_error().partition("\n<state>")[0].strip()
        raise InvalidRequest(reason[:MAX_REASON_CHARS], param=kind, code=INVALID_GUIDE_CODES[kind])
    return matcher


def guide_text(kind: str, text: str) -> str:
    """llguidance's own form of a constraint. Raises `InvalidRequest` for JSON that is none or far too long a text.

    Whether the library can compile it is not looked at here.
    """
    if len(text.encode()) > MAX_GUIDE_BYTES:
        raise InvalidRequest(
            f"{kind} has {len(text.encode())} bytes, at most {MAX_GUIDE_BYTES}",
            param=kind,
            code=INVALID_GUIDE_CODES[kind],
        )
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if kind == "grammar":
        return llguidance.LLMatcher.grammar_from_lark(text)
    return llguidance.LLMatcher.grammar_from_json_schema(
        _parsed(text), overrides={"whitespace_flexible": True, "whitespace_pattern": JSON_WHITE_SPACE}
    )


def parser_limits() -> llguidance.LLParserLimits:
    """The library's defaults, but for sizes: an answer's grammar is small, and every worker compiles it."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 0.2 s
        step_lexer_fuel=200_000,  # about 40 ms for one token, a hundred times what schemas take
        max_lexer_states=100_000,
        max_grammar_size=200_000,
    )


def _parsed(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"json_schema is not JSON: {error}", param="json_schema", code="invalid_json_schema"
        ) from None
    if isinstance(schema, bool):  # `true` allows any value, `false` none
        return {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise InvalidRequest("json_schema is no object", param="json_schema", code="invalid_json_schema")
    return schema
