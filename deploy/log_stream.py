"""The logs of all processes of a cluster as one stream, each line with its process's name: for containers, on stderr.

    text   10:31:02.120 decode-0 info: prefill asked peer=prefill-0
    json   {"process": "decode-0", "time": ..., "level": "info", "message": ...}

The processes go on writing to their files, which are read here: whoever reads the stream too slowly holds up nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import threading
from collections.abc import Awaitable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TextIO, cast

LogFormat = Literal["text", "json"]

POLL_INTERVAL_S = 0.2
READ_BYTES = 1 << 20
# Of a line without an end: then what there is of it goes out.
MAX_LINE_BYTES = 64 * 1024
_SHOWN_FIRST = ("time", "level", "message", "process", "worker_id", "component", "logger", "traceback")


class LogStream:
    """Where the lines go. Safe to use from several threads."""

    def __init__(self, out: TextIO, layout: LogFormat) -> None:
        self._out = out
        self._write_line = _as_json if layout == "json" else _as_text
        self._lock = threading.Lock()

    def write(self, process: str, lines: list[str]) -> None:
        """Whole lines of one process, one after the other."""
        text = "".join(f"{self._write_line(process, line)}\n" for line in lines if line.strip())
        # Nobody reads any more: the files have it all, and the cluster serves on.
        with self._lock, contextlib.suppress(OSError):
            self._out.write(text)
            self._out.flush()

    def of(self, process: str) -> TextIO:
        """A text file of that process's lines: for what this process itself says."""
        return cast(TextIO, _LineFile(self, process))


class FollowedLog:
    """Passes on what one run of a process writes to its file, which is cut by `ProcessLog` when it has grown large."""

    def __init__(self, path: Path, process: str, stream: LogStream) -> None:
        self._path = path
        self._process = process
        self._stream = stream
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""

    async def follow(self, exit_: Awaitable[object], interval_s: float = POLL_INTERVAL_S) -> None:
        """Until the process's exit, and all that it wrote."""
        ended = asyncio.ensure_future(exit_)
        while not (await asyncio.wait((ended,), timeout=interval_s))[0]:
            await asyncio.to_thread(self.pass_on)
        await asyncio.to_thread(self.pass_on, is_last=True)
        await ended

    def pass_on(self, *, is_last: bool = False) -> None:
        """What is new, up to its last whole line; `is_last`: all of it."""
        if self._path.stat().st_size < self._offset:  # it was cut: the copy has what was not read yet
            self._take(self._path.with_suffix(".log.1"))
            self._offset = 0
        self._take(self._path)
        if is_last and self._rest:
            self._write(self._rest)
            self._rest = b""

    def _take(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._offset)
            while new := file.read(READ_BYTES):
                self._offset += len(new)
                whole, end, self._rest = (self._rest + new).rpartition(b"\n")
                if len(self._rest) > MAX_LINE_BYTES:
                    whole, self._rest = whole + end + self._rest, b""
                if whole:
                    self._write(whole)

    def _write(self, text: bytes) -> None:
        self._stream.write(self._process, text.decode(errors="replace").split("\n"))


class _LineFile(io.TextIOBase):
    """What is printed into it comes out line by line."""

    def __init__(self, stream: LogStream, process: str) -> None:
        self._stream = stream
        self._process = process
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            self._stream.write(self._process, lines)
        return len(text)


def _fields(line: str) -> dict[str, Any] | None:
    """Of a line that is a log record of ours; None for anything else, a native library's words say."""
    if not line.startswith("{"):
        return None
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def _as_json(process: str, line: str) -> str:
    fields = _fields(line)
    if fields is None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        fields = {"time": time, "level": "info", "message": line}
    return json.dumps({"process": process, **fields})


def _as_text(process: str, line: str) -> str:
    fields = _fields(line)
    if fields is None:
        return f"{datetime.now(UTC):%H:%M:%S.%f}"[:-3] + f" {process}: {line}"
    time, level, message = (str(fields.get(name, "")) for name in _SHOWN_FIRST[:3])
    more = "".join(f" {name}={value}" for name, value in fields.items() if name not in _SHOWN_FIRST)
    traceback = fields.get("traceback")
    behind = "" if traceback is None else os.linesep + str(traceback).rstrip()
    return f"{time[11:23]} {process} {level}: {message}{more}{behind}"
