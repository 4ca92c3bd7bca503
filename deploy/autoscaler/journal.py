"""Decisions as data: one JSON object a line, enough to explain every one and to decide it all again.

    {"kind": "policy", "at": ..., "policy": {...}}                                   at the start and at every change
    {"kind": "tick", "at": ..., "snapshot": {...}, "model": {...}, "decision": {...}, "done": ["..."]}
    {"kind": "event", "at": ..., "what": "..."}                                      what came of it

`at` is wall time for readers; decisions know the snapshot's own clock only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from deploy.autoscaler.capacity import CapacityModel
from deploy.autoscaler.decide import Decision
from deploy.autoscaler.policy import Policy
from deploy.autoscaler.signals import Snapshot

# A day of ticks of 5 s takes about 30 MB; a full file is kept once beside the new one.
MAX_BYTES = 64 * 2**20

_SNAPSHOT = TypeAdapter(Snapshot)
_MODEL = TypeAdapter(CapacityModel)
_DECISION = TypeAdapter(Decision)


class JournalError(Exception):
    """A journal that cannot be read. The message names file, line and reason."""


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    at: str
    policy: Policy


@dataclass(frozen=True, slots=True)
class TickEntry:
    at: str
    snapshot: Snapshot
    model: CapacityModel
    decision: Decision
    done: tuple[str, ...]  # what was done about it, in words


@dataclass(frozen=True, slots=True)
class EventEntry:
    at: str
    what: str


Entry = PolicyEntry | TickEntry | EventEntry


class Journal:
    """Appends to one file. Owned by the autoscaler; `close` at its end."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._max_bytes = max_bytes
        self._policy: Policy | None = None
        self._file = _open(path)

    def policy(self, policy: Policy) -> None:
        self._policy = policy
        self._write({"kind": "policy", "policy": policy.model_dump(mode="json")})

    def tick(self, snapshot: Snapshot, model: CapacityModel, decision: Decision, done: Sequence[str]) -> None:
        self._write(
            {
                "kind": "tick",
                "snapshot": _plain(snapshot),
                "model": _plain(model),
                "decision": _plain(decision),
                "done": list(done),
            }
        )

    def event(self, what: str) -> None:
        self._write({"kind": "event", "what": what})

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file.tell() > self._max_bytes:
            self._file.close()
            self.path.replace(self.path.with_suffix(self.path.suffix + ".1"))
            self._file = _open(self.path)
            if self._policy is not None and entry["kind"] != "policy":
                self.policy(self._policy)  # each file can be read by itself
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._file.write(json.dumps({"at": at, **entry}) + "\n")
        self._file.flush()


def read_journal(path: Path) -> Iterator[Entry]:
    """The entries in order. Raises `JournalError`. A last line that was cut short is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            return
        try:
            yield _parse(json.loads(line))
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise JournalError(f"{path}:{number}: is no entry of a journal ({type(error).__name__})") from None


def _parse(entry: dict[str, Any]) -> Entry:
    match entry["kind"]:
        case "policy":
            return PolicyEntry(entry["at"], Policy.model_validate(entry["policy"]))
        case "tick":
            return TickEntry(
                entry["at"],
                _SNAPSHOT.validate_python(entry["snapshot"]),
                _MODEL.validate_python(entry["model"]),
                _DECISION.validate_python(entry["decision"]),
                tuple(entry["done"]),
            )
        case "event":
            return EventEntry(entry["at"], entry["what"])
        case other:
            raise ValueError(f"kind {other!r}")


def _plain(value: Any) -> Any:
    """As JSON has it. Numbers that are none stay readable: Python's `NaN` and `Infinity`."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _open(path: Path) -> Any:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8")
