"""Reading a policy file: YAML in, a `Policy` out, or every problem with its file, line, key and reason."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deploy.autoscaler.policy import Policy


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, where an editor can jump to."""

    file: str
    line: int  # from 1
    key: str  # dotted, empty for the whole file
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.key + ': ' if self.key else ''}{self.reason}"


class PolicyFileError(Exception):
    """The file cannot be used. `problems` is never empty."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def load_policy(path: Path) -> Policy:
    """The policy in `path`. Raises `PolicyFileError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyFileError((Problem(str(path), 1, "", f"cannot be read: {error}"),)) from error
    return parse_policy(text, str(path))


def parse_policy(text: str, file: str) -> Policy:
    """The policy in `text`; `file` is for messages. Raises `PolicyFileError` with all problems at once."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        reason = getattr(error, "problem", None) or str(error)
        raise PolicyFileError((Problem(file, line, "", f"is not YAML: {reason}"),)) from error
    if not isinstance(values, dict):
        raise PolicyFileError((Problem(file, 1, "", "must be a mapping of keys to values"),))
    try:
        return Policy.model_validate(values, strict=True)
    except ValidationError as error:
        problems = tuple(_problem(detail, root, file) for detail in error.errors())
        raise PolicyFileError(problems) from error


def policy_schema() -> str:
    """The JSON Schema that editors use, as it is published in `deploy/policies/schema.json`."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Policy.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


def _problem(detail: Mapping[str, Any], root: yaml.Node | None, file: str) -> Problem:
    path = tuple(str(part) for part in detail["loc"])
    reason = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        reason = "unknown key" + _suggestion(path)
    elif path:
        reason = f"{reason}, not {detail['input']!r}"[:200]
    return Problem(file, _line(root, path), ".".join(path), reason)


def _line(node: yaml.Node | None, path: tuple[str, ...]) -> int:
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


def _suggestion(path: tuple[str, ...]) -> str:
    """What the unknown key was probably meant to be."""
    section: Any = Policy
    for part in path[:-1]:
        section = section.model_fields[part].annotation
    close = difflib.get_close_matches(path[-1], list(section.model_fields), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
