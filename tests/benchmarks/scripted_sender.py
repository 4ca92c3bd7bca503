"""A sender without sockets: plays a script's answer on the event loop's clock into a capture."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.openai_client import StreamCapture
from benchmarks.scripted_server import Script
from benchmarks.workload import PlannedRequest


class ScriptedSender:
    """Keeps count of what is in flight, as a server would see it."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._number = 0
        self.in_flight = 0
        self.peak_in_flight = 0
        self.bodies: list[dict[str, Any]] = []

    async def send(self, request: PlannedRequest, capture: StreamCapture) -> None:
        loop = asyncio.get_running_loop()
        capture.sent_s = loop.time()
        body = {
            "prompt": list(request.token_ids),
            "messages": [(message.role, message.content) for message in request.messages],
            "max_tokens": request.output_tokens,
        }
        self.bodies.append(body)
        answer = self._script(self._number, body, loop.time())
        self._number += 1
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            capture.http_status = answer.status
            if answer.status != 200:
                capture.pieces.append((loop.time(), answer.body.encode()))
            for at_s, data in answer.events:
                await asyncio.sleep(max(0.0, at_s - loop.time()))
                capture.pieces.append((loop.time(), f"data: {data}\n\n".encode()))
        finally:
            self.in_flight -= 1
