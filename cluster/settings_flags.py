"""Frozen pydantic settings as command-line flags, both ways: each field is one flag, `num_threads` is `--num-threads`.

A launcher builds a settings value and turns it into arguments; the process parses them back into an equal value. So the
two sides cannot disagree about a name, a type or a default, and `--help` is made from the fields' descriptions.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from cluster.errors import StartupError, shown

Settings = TypeVar("Settings", bound=BaseModel)


def settings_to_arguments(settings: BaseModel) -> list[str]:
    """The flags that `parse_settings` turns back into an equal value. Fields at their default are left out."""
    arguments: list[str] = []
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if field.is_required() or value != field.get_default(call_default_factory=True):
            arguments.append(_as_argument(name, value))
    return arguments


def parse_settings(kind: type[Settings], program: str, arguments: Sequence[str]) -> Settings:
    """The settings that the flags describe. Raises `StartupError` (one line) for a wrong, unknown or missing flag."""
    parser = _Parser(prog=program, description=_summary(kind), allow_abbrev=False)
    for name, field in kind.model_fields.items():
        _add_flag(parser, name, field)
    given = {name: value for name, value in vars(parser.parse_args(list(arguments))).items() if value is not None}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise StartupError(f"{program}: {describe_validation_error(error)}") from None


def describe_validation_error(error: ValidationError) -> str:
    """The first thing that is wrong, naming its flag and the value that was given."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "settings"
    return f"{_flag(name)} is {shown(first.get('input'))}: {first['msg']}"


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing the usage and exiting, so that every process reports its errors alike."""

    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{self.prog}: {message}; `{self.prog} --help` lists the flags")


def _add_flag(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    description = (field.description or name.replace("_", " ")).replace("%", "%%")
    default = "" if field.is_required() else f" [{_as_text(field.get_default(call_default_factory=True))}]"
    options: dict[str, Any] = {"dest": name, "help": description + default, "required": field.is_required()}
    kind = _without_none(field.annotation)
    if kind is bool:
        parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, default=None, **options)
    elif get_origin(kind) is Literal:
        parser.add_argument(_flag(name), choices=[str(choice) for choice in get_args(kind)], **options)
    elif get_origin(kind) is tuple:
        parser.add_argument(_flag(name), type=_split, metavar="A,B", **options)
    else:
        parser.add_argument(_flag(name), metavar=getattr(kind, "__name__", "value").upper(), **options)


def _as_argument(name: str, value: object) -> str:
    """One word with `=`, so that a value may start with a dash."""
    if isinstance(value, bool):
        return _flag(name) if value else f"--no-{name.replace('_', '-')}"
    return f"{_flag(name)}={_as_text(value)}"


def _as_text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return str(value)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _without_none(annotation: Any) -> Any:
    """`Path` of `Path | None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(part for part in get_args(annotation) if part is not type(None))
    return annotation


def _summary(kind: type[BaseModel]) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]
