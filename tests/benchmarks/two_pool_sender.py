"""A prefill and a decode pool as their timing models say, on the event loop's clock: what a sweep must find again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from benchmarks.openai_client import StreamCapture
from benchmarks.scripted_server import chunk
from benchmarks.workload import PlannedRequest

BLOCK_TOKENS = 16


@dataclass
class TwoPoolSender:
    """One prefill worker (first come first served), one decode worker (all sequences step together)."""

    prefill_token_s: float
    step_s: float
    step_sequence_s: float
    num_sent: int = 0
    _prefill_free_s: float = 0.0
    _blocks: set[int] = field(default_factory=set)
    _waiting: list[tuple[int, StreamCapture, asyncio.Event]] = field(default_factory=list)
    _engine: asyncio.Task[None] | None = None

    async def send(self, request: PlannedRequest, capture: StreamCapture) -> None:
        loop = asyncio.get_running_loop()
        self.num_sent += 1
        capture.sent_s, capture.http_status = loop.time(), 200
        num_cached = self._cached_tokens(request.token_ids)
        service_s = self.prefill_token_s * (len(request.token_ids) - num_cached)
        self._prefill_free_s = max(self._prefill_free_s, loop.time()) + service_s
        await asyncio.sleep(self._prefill_free_s - loop.time())
        self._token(capture, chunk(" a", 1, len(request.token_ids), num_cached))
        if request.output_tokens > 1:
            ended = asyncio.Event()
            self._waiting.append((request.output_tokens - 1, capture, ended))
            if self._engine is None or self._engine.done():
                self._engine = asyncio.create_task(self._decode())
            await ended.wait()
        self._token(capture, "[DONE]")

    async def _decode(self) -> None:
        running: list[list[int]] = []
        sequences: list[tuple[StreamCapture, asyncio.Event]] = []
        while self._waiting or running:
            for left, capture, ended in self._waiting:
                running.append([left, 1])
                sequences.append((capture, ended))
            self._waiting.clear()
            await asyncio.sleep(self.step_s + self.step_sequence_s * len(running))
            for place in reversed(range(len(running))):
                capture, ended = sequences[place]
                running[place][0] -= 1
                running[place][1] += 1
                self._token(capture, chunk(" a", running[place][1]))
                if running[place][0] == 0:
                    ended.set()
                    del running[place], sequences[place]

    def _cached_tokens(self, token_ids: tuple[int, ...]) -> int:
        """Of the longest prefix of whole blocks; at least one token is always computed."""
        ends = range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS)
        keys = [hash(token_ids[:end]) for end in ends]
        known = next((place for place, key in enumerate(keys) if key not in self._blocks), len(keys))
        self._blocks.update(keys)
        return min(known * BLOCK_TOKENS, len(token_ids) - 1)

    @staticmethod
    def _token(capture: StreamCapture, data: str) -> None:
        capture.pieces.append((asyncio.get_running_loop().time(), f"data: {data}\n\n".encode()))
