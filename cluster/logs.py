"""JSON lines on stderr: one object a line, worker_id and request_id on each, never a prompt's text.

    configure_logs("decode_worker", worker_id)
    with request_context(request_id): log.info("prefill asked", extra={"peer": peer_id})

INFO is a change of state. A message is bounded, so a hostile peer cannot fill the disk through us.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

MAX_MESSAGE_CHARS = 512
MAX_TRACEBACK_CHARS = 4096
# What a LogRecord holds by itself; all else came in through `extra`.
_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_request_id: ContextVar[str] = ContextVar("request_id", default="")


def configure_logs(
    component: str, worker_id: str = "", level: int = logging.INFO, stream: TextIO | None = None
) -> logging.Handler:
    """Sends every logger of this process to `stream` (stderr) as JSON lines. Side effects: replaces root's handlers."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(component, worker_id))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    return handler


@contextlib.contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Log lines inside (in this task and those started in it) carry the request's id."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


class JsonFormatter(logging.Formatter):
    """One record as one line of JSON: control characters are escaped, long values cut."""

    def __init__(self, component: str, worker_id: str = "") -> None:
        super().__init__()
        self._always = {"component": component, **({"worker_id": worker_id} if worker_id else {})}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage(), MAX_MESSAGE_CHARS),
            **self._always,
        }
        if request_id := _request_id.get():
            line["request_id"] = request_id
        for name, value in vars(record).items():
            if name not in _OWN_ATTRIBUTES:
                line[name] = value if isinstance(value, int | float | bool) else _cut(str(value), MAX_MESSAGE_CHARS)
        if record.exc_info:
            line["traceback"] = _cut_front(self.formatException(record.exc_info), MAX_TRACEBACK_CHARS)
        return json.dumps(line)


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def _cut_front(text: str, max_chars: int) -> str:
    """The end of a traceback says most."""
    return text if len(text) <= max_chars else "…" + text[1 - max_chars :]
