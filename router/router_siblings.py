"""The other router processes on this port: each answers the others' questions on a Unix socket of its own.

    a question ── one line on RUNTIME_DIR/ROUTER_ID.router ──> every other process ── bytes, then the end of the stream

Clients reach any of them, so what only one knows (its metrics, its decisions) is asked for here. A process that does
not answer in time is left out. It knows no question's meaning.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

ANSWER_TIMEOUT_S = 1.0
MAX_QUESTION_BYTES = 1024
MAX_ANSWER_BYTES = 16 << 20
SUFFIX = ".router"

_log = logging.getLogger(__name__)

Answerer = Callable[[str], bytes]  # what follows the question's first word, to bytes; empty: it has nothing to say


class RouterSiblings:
    """Owned by the router process: `start` where others share its port, later `stop`. Not started, it is alone."""

    def __init__(self, directory: Path, router_id: str) -> None:
        self._path = directory / f"{router_id}{SUFFIX}"
        self._answerers: dict[str, Answerer] = {}
        self._server: asyncio.Server | None = None

    def answer(self, question: str, answerer: Answerer) -> None:
        """`answerer` says what this process knows when another one asks this. It must not block."""
        self._answerers[question] = answerer

    @property
    def are_there(self) -> bool:
        return self._server is not None

    async def start(self) -> None:
        """Raises OSError when the runtime directory takes no socket."""
        self._path.unlink(missing_ok=True)  # a killed one's
        self._server = await asyncio.start_unix_server(self._serve, self._path, limit=MAX_QUESTION_BYTES)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
            self._server = None

    async def ask(self, question: str, about: str = "") -> list[bytes]:
        """What the others say; those that say nothing, or not in time, are left out."""
        if self._server is None:
            return []
        others = [path for path in sorted(self._path.parent.glob(f"*{SUFFIX}")) if path != self._path]
        answers = await asyncio.gather(*(_ask(path, f"{question} {about}\n".encode()) for path in others))
        return [answer for answer in answers if answer]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError):  # it has gone, or asks what is no question
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                question, _, about = (await reader.readline()).decode().strip().partition(" ")
                answerer = self._answerers.get(question)
                if answerer is not None:
                    writer.write(answerer(about))
                    await writer.drain()
        writer.close()


async def _ask(path: Path, question: bytes) -> bytes:
    """One process's answer; nothing when it does not give it in time."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(question)
                parts = []
                while part := await reader.read(1 << 16):
                    parts.append(part)
                    if sum(map(len, parts)) > MAX_ANSWER_BYTES:
                        raise OSError(f"it says more than {MAX_ANSWER_BYTES} bytes")
                return b"".join(parts)
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        _log.warning("a router process does not answer", extra={"peer": path.stem, "reason": str(error)})
        return b""
