"""Fields that constrain an answer, each a rule that gives a `Guide`: OpenAI's `response_format`, and vLLM's two ways.

    {"type": "json_object"}                        any JSON object
    {"type": "json_schema", "json_schema": {...}}  that schema; `strict` or not, the answer follows it
    guided_json, guided_regex, guided_choice, guided_grammar (llguidance's Lark), as older vLLM has them
    structured_outputs: {"json" | "regex" | "choice" | "grammar" | "json_object": ...}, as newer vLLM has them

Whether a guide can be followed is asked later, of `grammar_checker`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequest, shown
from cluster.sampling_params import MAX_GUIDE_BYTES
from router.api_types import Guide
from router.field_rules import Flag, ListOf, OnlyValue, Record, Rule, Text, invalid_value, unsupported_parameter
from router.json_schema_rules import check_schema, invalid_schema

MAX_CHOICES = 256
MAX_CHOICE_CHARS = 1_024
MAX_REGEX_CHARS = 8_192
MAX_NAME_CHARS = 64
ANY_OBJECT = '{"type":"object"}'
GUIDE_FIELDS = (
    "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
)  # fmt: skip
FORMATS = ("text", "json_object", "json_schema")


class ResponseFormat:
    """OpenAI's field."""

    def check(self, value: Any, param: str) -> Guide | None:
        if not isinstance(value, dict):
            raise invalid_value(param, value, "an object with a type")
        kind = value.get("type")
        if kind not in FORMATS:
            raise unsupported_parameter(f"{param}.type", f"{shown(kind)} is none of {', '.join(FORMATS)}")
        allowed: dict[str, Rule] = {"type": Text()}
        if kind == "json_schema":
            allowed["json_schema"] = NamedSchema()
        values = Record(allowed, required=tuple(allowed)).check(value, param)
        if kind == "text":
            return None
        return values.get("json_schema") or Guide("json_schema", ANY_OBJECT, param)

    def schema(self) -> dict[str, Any]:
        plain = {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}}
        named = {
            "type": "object",
            "properties": {"type": {"enum": ["json_schema"]}, "json_schema": NamedSchema().schema()},
        }
        return {"anyOf": [{**one, "required": list(one["properties"]), **CLOSED} for one in (plain, named)]}


class NamedSchema:
    """`{"name", "schema", "strict", "description"}`. Without a schema any object will do, as at OpenAI."""

    def check(self, value: Any, param: str) -> Guide:
        if not isinstance(value, dict):
            raise invalid_value(param, value, "an object with name and schema")
        rest = {name: item for name, item in value.items() if name != "schema"}
        _SCHEMA_NAMES.check(rest, param)
        place = f"{param}.schema"
        schema = value.get("schema")
        return Guide("json_schema", ANY_OBJECT if schema is None else check_schema(schema, place), place)

    def schema(self) -> dict[str, Any]:
        described = _SCHEMA_NAMES.schema()
        return {**described, "properties": {**described["properties"], "schema": {"type": "object"}}}


class GuidedJson:
    """A schema, as an object or as its text."""

    def check(self, value: Any, param: str) -> Guide:
        return Guide("json_schema", check_schema(_object_of(value, param), param), param)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"type": "object"}, {"type": "string", "minLength": 2, "maxLength": MAX_GUIDE_BYTES}]}


@dataclass(frozen=True, slots=True)
class GuidedText:
    """A constraint that is a text: a regex or a grammar."""

    kind: str
    text: Text

    def check(self, value: Any, param: str) -> Guide:
        return Guide(self.kind, self.text.check(value, param), param)

    def schema(self) -> dict[str, Any]:
        return self.text.schema()


class GuidedChoice:
    """One of these texts, as a grammar of literals."""

    _rule = ListOf(Text(1, MAX_CHOICE_CHARS), MAX_CHOICES, 1)

    def check(self, value: Any, param: str) -> Guide:
        choices = self._rule.check(value, param)
        grammar = "start: " + " | ".join(lark_literal(choice) for choice in choices)
        return Guide("grammar", grammar, param)

    def schema(self) -> dict[str, Any]:
        return self._rule.schema()


_SCHEMA_NAMES = Record({"name": Text(1, MAX_NAME_CHARS), "description": Text(), "strict": Flag()}, required=("name",))
CLOSED = {"additionalProperties": False}
GUIDED_REGEX = GuidedText("regex", Text(1, MAX_REGEX_CHARS))
GUIDED_GRAMMAR = GuidedText("grammar", Text(1, MAX_GUIDE_BYTES))


class StructuredOutputs:
    """vLLM's one object for the `guided_*` fields: exactly one of its constraints."""

    def check(self, value: Any, param: str) -> Guide:
        checked = _STRUCTURED.check(value, param)
        given = [name for name in _STRUCTURED.fields if name in checked]
        if len(given) != 1:
            names = ", ".join(_STRUCTURED.fields)
            raise InvalidRequest(f"{param} has {' and '.join(given) or 'none'} of {names}: give one", param=param)
        guide = checked[given[0]]
        return guide if isinstance(guide, Guide) else Guide("json_schema", ANY_OBJECT, f"{param}.json_object")

    def schema(self) -> dict[str, Any]:
        return {**_STRUCTURED.schema(), "minProperties": 1, "maxProperties": 1}


_STRUCTURED = Record(
    {
        "json": GuidedJson(),
        "regex": GUIDED_REGEX,
        "choice": GuidedChoice(),
        "grammar": GUIDED_GRAMMAR,
        "json_object": OnlyValue(True, "an answer is constrained, or the field is left out"),
    }
)


def the_guide(values: Mapping[str, Any]) -> Guide | None:
    """The one guide among a request's fields. Raises `InvalidRequest` when there are two."""
    guides = [(name, guide) for name in GUIDE_FIELDS if (guide := values.get(name)) is not None]
    if len(guides) > 1:
        names = " and ".join(name for name, _ in guides)
        raise InvalidRequest(f"{names} both constrain the answer: give one of them", param=guides[1][0])
    return guides[0][1] if guides else None


def lark_literal(text: str) -> str:
    """A text as a literal of llguidance's Lark: JSON's way of writing strings."""
    return json.dumps(text, ensure_ascii=False)


def _object_of(value: Any, param: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise invalid_schema(param, f"is not JSON: {error}") from None
