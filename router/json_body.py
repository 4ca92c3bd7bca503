"""A request body as a JSON object, strictly: what two parsers could read differently is refused.

UTF-8 without a byte order mark, no NaN or Infinity, no lone surrogates, no key twice, depth at most 64, integers of 64
bits. The checks that need a walk through the values run only where a glance at the bytes says they could matter.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from cluster.errors import InvalidRequest, shown

MAX_DEPTH = 64
# A conversation of a hundred thousand tokens has fewer messages than this; looking at a million takes a second.
MAX_CONTAINERS = 50_000
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1
# A lone surrogate needs an escape, a wide integer or an infinite float many digits. Every digit is a 0 for this look:
# a search for fixed bytes takes a fiftieth of a regular expression's time.
_SHAPE = bytes.maketrans(b"123456789ED", b"000000000ed")
_NEED_WALK = (b"\\ud", b"0" * 19, b"e000", b"e+000", b"e-000")


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Raises `InvalidRequest` with the code `invalid_json`."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8 (byte {error.start})") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object_without_duplicates)
    except json.JSONDecodeError as error:
        raise _invalid(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _invalid(f"the body is nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:  # an integer of thousands of digits
        raise _invalid(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _invalid(f"the body must be a JSON object, not {_name_of_kind(value)}")
    num_containers = body.count(b"[") + body.count(b"{")
    if num_containers > MAX_DEPTH or _may_need_walk(body):
        if num_containers > MAX_CONTAINERS:  # brackets within strings count too, but nobody writes as many
            raise _invalid(f"the body has more than {MAX_CONTAINERS} arrays and objects")
        _check_values(value)
    return value


def _may_need_walk(body: bytes) -> bool:
    shape = body.translate(_SHAPE)
    return any(marks in shape for marks in _NEED_WALK)


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid(f"{name} is not JSON")


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _invalid(f"the key {shown(twice)} stands twice in one object")
    return value


def _check_values(root: dict[str, Any]) -> None:
    pending: list[tuple[Any, int]] = [(root, 1)]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, str):
            _check_text(value)
        elif isinstance(value, int):
            if not MIN_INTEGER <= value <= MAX_INTEGER:
                raise _invalid(f"the integer {shown(value)} does not fit in 64 bits")
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise _invalid("a number is too large")
        elif isinstance(value, dict | list):
            if depth > MAX_DEPTH:
                raise _invalid(f"the body is nested deeper than {MAX_DEPTH}")
            if isinstance(value, dict):
                pending.extend((key, depth + 1) for key in value)
                pending.extend((item, depth + 1) for item in value.values())
            else:
                pending.extend((item, depth + 1) for item in value)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _invalid(f"a string holds half of a surrogate pair (character {error.start})") from None


def _name_of_kind(value: object) -> str:
    kinds = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_json")
