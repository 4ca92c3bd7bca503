"""The child process that compiles a client's constraint before any worker sees it.

    standard input   one JSON line each: {"kind": "json_schema", "text": "..."}
    standard output  one JSON line each: {} when it can be followed, else {"place": ".properties.a", "reason": "..."}

The parent kills it when a check takes too long. It holds no model and no tokenizer; memory is bounded by the kernel.
"""

from __future__ import annotations

import json
import resource
import sys
from functools import cache
from typing import Any

import llguidance

from cluster.errors import InvalidRequest
from cluster.guided_grammar import compile_guide
from router.json_schema_rules import DEFINITION_KEYS, walk

MAX_MEMORY_BYTES = 1024 * 1024 * 1024
MAX_PARTS = 200  # of a schema that are tried one by one, to name the one that is wrong


def check(kind: str, text: str) -> dict[str, str]:
    """What is wrong with a constraint, and where; empty when nothing is."""
    reason = _reason(kind, text)
    if not reason:
        return {}
    place, reason = _locate(text, reason) if kind == "json_schema" else ("", reason)
    return {"place": place, "reason": reason}


def _reason(kind: str, text: str) -> str:
    try:
        compile_guide(_bytes_tokenizer(), kind, text)
    except InvalidRequest as error:
        return error.message
    return ""


def _locate(text: str, reason: str) -> tuple[str, str]:
    """The innermost part of a schema that is wrong by itself, with what is wrong there."""
    root = json.loads(text)
    definitions = {key: root[key] for key in DEFINITION_KEYS if isinstance(root, dict) and key in root}
    parts = list(walk(root, ""))[1 : 1 + MAX_PARTS]
    for part in sorted(parts, key=lambda part: -part.depth):
        if not isinstance(part.value, dict):
            continue
        own_reason = _reason("json_schema", json.dumps({**definitions, **part.value}))
        if own_reason and not _is_definitions_fault(definitions, part.value):
            return part.path, own_reason
    return "", reason


def _is_definitions_fault(definitions: dict[str, Any], part: dict[str, Any]) -> bool:
    """A part without references is wrong by itself whatever the definitions are."""
    return bool(definitions) and "$ref" in part


@cache
def _bytes_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


def main() -> None:
    """`python -m router.grammar_check_process`, until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # nothing of a client's is ever written to disk
    print("{}", flush=True)  # noqa: T201  ready
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(check(request["kind"], request["text"])), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
