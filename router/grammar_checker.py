"""Whether a client's constraint can be followed, asked of a child process with a time limit; answers are remembered.

    constraint ─> known? ─no─> child process (`grammar_check_process`) ─ too slow or dead ─> killed, 400
                    └─ yes ─> the same answer at once

So no constraint can hold up the event loop or take the router's memory, and the next one finds a fresh child. The child
starts with the first constraint that comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
from collections import OrderedDict
from typing import Any

from cluster.errors import EngineFailure, InvalidRequest, ServerOverloaded
from cluster.guided_grammar import INVALID_GUIDE_CODES

CHECK_TIMEOUT_S = 2.0  # a schema of 64 KiB takes a tenth of it
START_TIMEOUT_S = 20.0
MAX_WAITING = 64
MAX_REMEMBERED = 4096  # answers of at most a few hundred bytes
MAX_LINE_BYTES = 1024 * 1024


class GrammarChecker:
    """Owned by the router process; `close` ends the child."""

    def __init__(self, check_timeout_s: float = CHECK_TIMEOUT_S) -> None:
        self._check_timeout_s = check_timeout_s
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._child: asyncio.subprocess.Process | None = None
        self._answers: OrderedDict[bytes, dict[str, str]] = OrderedDict()

    @property
    def num_remembered(self) -> int:
        return len(self._answers)

    async def check(self, kind: str, text: str, param: str) -> None:
        """Raises `InvalidRequest` naming the place within `param`, or `ServerOverloaded`."""
        key = hashlib.blake2b(f"{kind}\0{text}".encode(), digest_size=16).digest()
        answer = self._answers.get(key)
        if answer is None:
            answer = await self._ask(kind, text)
            self._answers[key] = answer
        self._answers.move_to_end(key)
        while len(self._answers) > MAX_REMEMBERED:
            self._answers.popitem(last=False)
        if answer:
            place = f"{param}{answer['place']}"[:200]
            raise InvalidRequest(f"{place}: {answer['reason']}", param=place, code=INVALID_GUIDE_CODES[kind])

    async def close(self) -> None:
        await self._end_child()

    async def _ask(self, kind: str, text: str) -> dict[str, str]:
        if self._num_waiting >= MAX_WAITING:
            raise ServerOverloaded(f"{MAX_WAITING} constraints wait to be checked", retry_after_s=1.0, stage="route")
        self._num_waiting += 1
        try:
            async with self._turn:
                return await self._ask_child(json.dumps({"kind": kind, "text": text}).encode() + b"\n")
        finally:
            self._num_waiting -= 1

    async def _ask_child(self, line: bytes) -> dict[str, str]:
        child = await self._running_child()
        try:
            async with asyncio.timeout(self._check_timeout_s):
                answer: dict[str, str] = await _exchange(child, line)
            return answer
        except TimeoutError:
            await self._end_child()
            return {"place": "", "reason": f"it takes more than {self._check_timeout_s:g} s to compile"}
        except (ConnectionError, ValueError):  # it died: out of memory, most likely
            await self._end_child()
            return {"place": "", "reason": "it takes more memory than a constraint may"}
        except asyncio.CancelledError:  # the client left; the child's answer would be taken for the next one's
            await self._end_child()
            raise

    async def _running_child(self) -> asyncio.subprocess.Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router.grammar_check_process",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # it finds what this process finds
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE_BYTES,
        )  # fmt: skip
        self._child = child
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await _read_line(child)
        except (TimeoutError, ConnectionError, ValueError):
            await self._end_child()
            raise EngineFailure("the process that checks constraints does not start", stage="route") from None
        except asyncio.CancelledError:
            await self._end_child()
            raise
        return child

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        if child.stdin is not None:
            child.stdin.close()
        await child.wait()


async def _exchange(child: asyncio.subprocess.Process, line: bytes) -> Any:
    if child.stdin is None:
        raise ConnectionError("the child has no standard input")
    child.stdin.write(line)
    await child.stdin.drain()
    return await _read_line(child)


async def _read_line(child: asyncio.subprocess.Process) -> Any:
    """Raises `ConnectionError` at the end of the stream, `ValueError` for what is no JSON."""
    if child.stdout is None:
        raise ConnectionError("the child has no standard output")
    line = await child.stdout.readline()
    if not line:
        raise ConnectionError("the child has ended")
    return json.loads(line)
