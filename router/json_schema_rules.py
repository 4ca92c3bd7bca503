"""What a JSON schema of a client may look like, before any compiler sees it: size, depth, references, patterns.

It is about what costs much or reaches outside. Whether the schema means something is the compiler's to say
(`grammar_checker`); both name the place as `param.properties.name.pattern`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from cluster.errors import InvalidRequest, shown
from cluster.sampling_params import MAX_GUIDE_BYTES

MAX_DEPTH = 10  # schemas within schemas
MAX_SUBSCHEMAS = 2_000
MAX_PATTERN_CHARS = 1_024
MAX_REPETITION = 100_000  # minLength, maxItems and their like
INVALID_JSON_SCHEMA = "invalid_json_schema"

_SCHEMA_KEYS = frozenset(
    {
        "items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames",
        "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
_LIST_KEYS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAP_KEYS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# What a reference may point at: kept beside every part of a schema that is looked at alone.
DEFINITION_KEYS = ("$defs", "definitions")
_COUNT_KEYS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


class Subschema(NamedTuple):
    """A schema within a schema, and where it stands."""

    path: str
    value: Any
    depth: int


def check_schema(schema: Any, param: str) -> str:
    """The schema as compact JSON. Raises `InvalidRequest` that names the place."""
    if not isinstance(schema, dict):
        raise invalid_schema(param, f"is {shown(schema)}, must be a JSON schema (an object)")
    text = json.dumps(schema, separators=(",", ":"))
    if len(text) > MAX_GUIDE_BYTES:
        raise invalid_schema(param, f"has {len(text)} bytes, at most {MAX_GUIDE_BYTES}")
    for number, (path, value, depth) in enumerate(walk(schema, param)):
        if number >= MAX_SUBSCHEMAS:
            raise invalid_schema(param, f"has more than {MAX_SUBSCHEMAS} schemas in it")
        if depth > MAX_DEPTH:
            raise invalid_schema(path, f"is nested deeper than {MAX_DEPTH} schemas")
        if isinstance(value, dict):
            _check_keywords(value, path)
        elif not isinstance(value, bool):
            raise invalid_schema(path, f"is {shown(value)}, must be a JSON schema")
    return text


def walk(schema: Any, path: str, depth: int = 1) -> Iterator[Subschema]:
    """The schema and all within it, outer ones first."""
    pending = [Subschema(path, schema, depth)]
    while pending:
        here = pending.pop()
        yield here
        if isinstance(here.value, dict) and here.depth <= MAX_DEPTH:
            pending.extend(reversed(list(_children(here))))


def invalid_schema(path: str, reason: str) -> InvalidRequest:
    """`path` names parts of the client's own schema: it is shown escaped and shortened."""
    place = path if len(path) <= 200 and path.isprintable() else shown(path)
    return InvalidRequest(f"{place} {reason}", param=place, code=INVALID_JSON_SCHEMA)


def _children(parent: Subschema) -> Iterator[Subschema]:
    for key, value in parent.value.items():
        here = f"{parent.path}.{key}"
        if (key in _SCHEMA_KEYS and not isinstance(value, list)) or (key == "items" and isinstance(value, dict)):
            yield Subschema(here, value, parent.depth + 1)
        elif (key in _LIST_KEYS or key == "items") and isinstance(value, list):
            for index, item in enumerate(value):
                yield Subschema(f"{here}[{index}]", item, parent.depth + 1)
        elif key in _MAP_KEYS and isinstance(value, dict):
            for name, item in value.items():
                yield Subschema(f"{here}.{name}", item, parent.depth + 1)


def _check_keywords(schema: dict[str, Any], path: str) -> None:
    for key in ("$ref", "$dynamicRef", "$recursiveRef"):
        reference = schema.get(key, "#")
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise invalid_schema(
                f"{path}.{key}", f"is {shown(reference)}: only references into the schema are followed"
            )
    for key in ("$id", "id"):
        if isinstance(schema.get(key), str) and "$ref" in schema:
            raise invalid_schema(f"{path}.{key}", "stands beside $ref: references are followed within the schema only")
    pattern = schema.get("pattern", "")
    patterns = schema.get("patternProperties", {})
    for one in (pattern, *(patterns if isinstance(patterns, dict) else ())):
        if not isinstance(one, str) or len(one) > MAX_PATTERN_CHARS:
            raise invalid_schema(f"{path}.pattern", f"must be a string of at most {MAX_PATTERN_CHARS} characters")
    for key in _COUNT_KEYS:
        count = schema.get(key, 0)
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_REPETITION:
            raise invalid_schema(f"{path}.{key}", f"is {shown(count)}, must be an integer in [0, {MAX_REPETITION}]")
