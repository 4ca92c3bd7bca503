"""YAML files as strict pydantic settings: every problem with its file, line, key and reason.

Knows nothing of what the settings mean. A key that is not known gets the nearest known one as a suggestion; a key that
stands twice is a problem too, as YAML readers silently keep the last.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

Settings = TypeVar("Settings", bound=BaseModel)
KeyPath = tuple[str, ...]
MAX_SHOWN_INPUT_CHARS = 60


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, where an editor can jump to."""

    file: str
    line: int  # from 1
    key: str  # dotted, empty for the whole file
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.key + ': ' if self.key else ''}{self.reason}"


class YamlSettingsError(Exception):
    """The file cannot be used. `problems` is never empty."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def load_yaml_settings(kind: type[Settings], path: Path) -> Settings:
    """The settings in the file. Raises `YamlSettingsError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise YamlSettingsError((Problem(str(path), 1, "", f"cannot be read: {error.strerror}"),)) from None
    except UnicodeDecodeError:
        raise YamlSettingsError((Problem(str(path), 1, "", "cannot be read: it is not UTF-8 text"),)) from None
    return parse_yaml_settings(kind, text, str(path))


def parse_yaml_settings(kind: type[Settings], text: str, file: str) -> Settings:
    """The settings in `text`; `file` is for messages. Raises `YamlSettingsError` with all problems at once."""
    root, values = _read(text, file)
    repeated = tuple(
        Problem(file, line, ".".join(path), "stands twice; keep one") for path, line in _repeated_keys(root, ())
    )
    if repeated:
        raise YamlSettingsError(repeated)
    try:
        # By way of JSON, where a list is how a tuple and a string is how a path is written; otherwise strict.
        return kind.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise YamlSettingsError(tuple(_problem(detail, kind, root, file) for detail in error.errors())) from None


def suggestion(kind: type[BaseModel], path: KeyPath) -> str:
    """`; did you mean 'decode'?` for an unknown key, empty when nothing is near."""
    section: Any = kind
    for part in path[:-1]:
        field = getattr(section, "model_fields", {}).get(part)
        section = field.annotation if field else None
    names = list(getattr(section, "model_fields", {}))
    close = difflib.get_close_matches(path[-1], names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _read(text: str, file: str) -> tuple[yaml.Node | None, dict[str, Any]]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        reason = getattr(error, "problem", None) or str(error)
        raise YamlSettingsError((Problem(file, line, "", f"is not YAML: {reason}"),)) from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise YamlSettingsError((Problem(file, 1, "", "must be a mapping of keys to values"),))
    return root, values


def _problem(detail: Any, kind: type[BaseModel], root: yaml.Node | None, file: str) -> Problem:
    path = tuple(str(part) for part in detail["loc"])
    reason = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        reason = "unknown key" + suggestion(kind, path)
    elif path and detail["type"] != "value_error":
        reason = f"{reason}, not {_short(detail['input'])}"
    return Problem(file, _line(root, path), ".".join(path), reason)


def _line(node: yaml.Node | None, path: KeyPath) -> int:
    """The line of the deepest key of `path` that the file has."""
    line = node.start_mark.line + 1 if node is not None else 1
    for part in path:
        if not isinstance(node, yaml.MappingNode):
            break
        found = next(((key, value) for key, value in node.value if key.value == part), None)
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def _repeated_keys(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        name = str(key.value)
        if name in seen:
            yield (*path, name), key.start_mark.line + 1
        seen.add(name)
        yield from _repeated_keys(value, (*path, name))


def _short(value: object) -> str:
    text = json.dumps(value, default=str) if isinstance(value, Mapping | list) else repr(value)
    return text if len(text) <= MAX_SHOWN_INPUT_CHARS else text[:MAX_SHOWN_INPUT_CHARS] + "…"
