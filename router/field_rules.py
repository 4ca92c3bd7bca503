"""Rules for single fields of a request: each checks a value, and describes itself for the OpenAPI document.

A value of another JSON type is an error: `true` is no number, `"1"` and `1.0` are no integers. Messages name the
parameter and show at most 64 characters of the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.errors import InvalidRequest, shown


class Rule(Protocol):
    """What a field may hold."""

    def check(self, value: Any, param: str) -> Any:
        """The value as the router uses it. Raises `InvalidRequest` with `param`."""
        ...

    def schema(self) -> dict[str, Any]:
        """The same as JSON Schema."""
        ...


@dataclass(frozen=True, slots=True)
class Integer:
    low: int
    high: int
    also: tuple[int, ...] = ()  # values outside the range with a meaning of their own

    def check(self, value: Any, param: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid_value(param, value, "an integer")
        if value not in self.also and not self.low <= value <= self.high:
            others = "".join(f", or {other}" for other in self.also)
            raise invalid_value(param, value, f"in [{self.low}, {self.high}]{others}")
        return value

    def schema(self) -> dict[str, Any]:
        span = {"type": "integer", "minimum": self.low, "maximum": self.high}
        return {"anyOf": [span, {"enum": list(self.also)}]} if self.also else span


@dataclass(frozen=True, slots=True)
class TokenId:
    vocab_size: int

    def check(self, value: Any, param: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self.vocab_size:
            raise invalid_value(param, value, f"a token id in [0, {self.vocab_size})", code="invalid_token_id")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": 0, "maximum": self.vocab_size - 1}


@dataclass(frozen=True, slots=True)
class Number:
    low: float
    high: float
    excludes_low: bool = False

    def check(self, value: Any, param: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid_value(param, value, "a number")
        is_above = value > self.low if self.excludes_low else value >= self.low
        if not (math.isfinite(value) and is_above and value <= self.high):
            raise invalid_value(param, value, f"in {'(' if self.excludes_low else '['}{self.low}, {self.high}]")
        return float(value)

    def schema(self) -> dict[str, Any]:
        return {
            "type": "number",
            "exclusiveMinimum" if self.excludes_low else "minimum": self.low,
            "maximum": self.high,
        }


@dataclass(frozen=True, slots=True)
class Flag:
    def check(self, value: Any, param: str) -> bool:
        if not isinstance(value, bool):
            raise invalid_value(param, value, "true or false")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Text:
    min_chars: int = 0
    max_chars: int = 0  # 0: bounded by the body alone

    def check(self, value: Any, param: str) -> str:
        if not isinstance(value, str):
            raise invalid_value(param, value, "a string")
        if len(value) < self.min_chars or (self.max_chars and len(value) > self.max_chars):
            raise invalid_value(param, value, f"a string of {self.min_chars} to {self.max_chars} characters")
        return value

    def schema(self) -> dict[str, Any]:
        longest = {"maxLength": self.max_chars} if self.max_chars else {}
        return {"type": "string", "minLength": self.min_chars, **longest}


@dataclass(frozen=True, slots=True)
class OneOf:
    names: tuple[str, ...]

    def check(self, value: Any, param: str) -> str:
        if not isinstance(value, str) or value not in self.names:
            raise invalid_value(param, value, f"one of {', '.join(self.names)}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.names)}


@dataclass(frozen=True, slots=True)
class ListOf:
    item: Rule
    max_items: int
    min_items: int = 0
    accepts_single: bool = False  # one item alone stands for a list of it
    names_items: bool = False  # an error says which entry it is about: `tools[1]`

    def check(self, value: Any, param: str) -> tuple[Any, ...]:
        if self.accepts_single and not isinstance(value, list):
            return (self.item.check(value, param),)
        if not isinstance(value, list):
            raise invalid_value(param, value, "an array")
        if not self.min_items <= len(value) <= self.max_items:
            raise InvalidRequest(
                f"{param} has {len(value)} entries, must have {self.min_items} to {self.max_items}", param=param
            )
        names = (f"{param}[{index}]" if self.names_items else param for index in range(len(value)))
        return tuple(self.item.check(item, name) for item, name in zip(value, names, strict=True))

    def schema(self) -> dict[str, Any]:
        array = {
            "type": "array",
            "items": self.item.schema(),
            "minItems": self.min_items,
            "maxItems": self.max_items,
        }
        return {"anyOf": [array, self.item.schema()]} if self.accepts_single else array


@dataclass(frozen=True, slots=True)
class LogitBias:
    """`{"token id": bias}`: JSON's keys are strings."""

    vocab_size: int
    max_entries: int
    bias: Number

    def check(self, value: Any, param: str) -> dict[int, float]:
        if not isinstance(value, dict):
            raise invalid_value(param, value, "an object of token id to bias")
        if len(value) > self.max_entries:
            raise InvalidRequest(f"{param} has {len(value)} entries, at most {self.max_entries}", param=param)
        rule = TokenId(self.vocab_size)
        return {rule.check(_decimal(key), param): self.bias.check(bias, param) for key, bias in value.items()}

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "additionalProperties": self.bias.schema(),
            "maxProperties": self.max_entries,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        }


@dataclass(frozen=True, slots=True)
class Record:
    """An object with these fields only. Absent and null fields are left out of the result."""

    fields: Mapping[str, Rule]
    required: Sequence[str] = ()

    def check(self, value: Any, param: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise invalid_value(param, value, "an object")
        for name in value:
            if name not in self.fields:
                raise unknown_parameter(f"{param}.{name}")
        for name in self.required:
            if value.get(name) is None:
                raise InvalidRequest(f"{param}.{name} is missing", param=f"{param}.{name}")
        return {
            name: self.fields[name].check(item, f"{param}.{name}") for name, item in value.items() if item is not None
        }

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {name: rule.schema() for name, rule in self.fields.items()},
            "required": list(self.required),
            "additionalProperties": False,
        }


@dataclass(frozen=True, slots=True)
class OnlyValue:
    """A field of OpenAI's that has one value here; any other asks for something that is not offered."""

    accepted: Any
    instead: str  # what the message says about other values

    def check(self, value: Any, param: str) -> Any:
        if type(value) is not type(self.accepted) or value != self.accepted:
            raise unsupported_parameter(param, self.instead)
        return value

    def schema(self) -> dict[str, Any]:
        return {"enum": [self.accepted]}


@dataclass(frozen=True, slots=True)
class NotOffered:
    """A field that asks for something that is not there, whatever its value."""

    reason: str

    def check(self, value: Any, param: str) -> None:
        raise unsupported_parameter(param, self.reason)

    def schema(self) -> dict[str, Any]:
        return {"type": "null"}


@dataclass(frozen=True, slots=True)
class AnyValue:
    """A field whose shape is checked where it is read."""

    def check(self, value: Any, param: str) -> Any:
        return value

    def schema(self) -> dict[str, Any]:
        return {}


def invalid_value(param: str, value: object, wanted: str, code: str = "") -> InvalidRequest:
    return InvalidRequest(f"{param} is {shown(value)}, must be {wanted}", param=param, code=code)


def unknown_parameter(param: str) -> InvalidRequest:
    return InvalidRequest(f"unknown parameter {shown(param)}", param=param[:64], code="unknown_parameter")


def unsupported_parameter(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is not supported: {reason}", param=param, code="unsupported_parameter")


def _decimal(key: str) -> object:
    """The number that a key spells, or the key itself, which no rule for numbers accepts."""
    return int(key) if key.isascii() and key.isdigit() and len(key) <= 9 else key
