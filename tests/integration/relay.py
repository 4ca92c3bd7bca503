"""A relay in front of a worker's socket, which a test may freeze: bytes stay underway and nobody is told, as when a
network is parted; when it heals they arrive, late.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

CHUNK_BYTES = 65_536


class Relay:
    """`async with Relay(path, target_path) as relay`: connect to `relay.address`."""

    def __init__(self, path: Path, target: str) -> None:
        """`target`: a gRPC address, `unix:/path`."""
        self.address = f"unix:{path}"
        self._path = path
        self._target = target.removeprefix("unix:")
        self._flows = asyncio.Event()
        self._flows.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.num_held = 0  # reads that the freeze kept back

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_unix_server(self._accept, self._path)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def freeze(self) -> None:
        self._flows.clear()

    def heal(self) -> None:
        self._flows.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_writer: asyncio.StreamWriter | None = None
        try:
            other_reader, other_writer = await asyncio.open_unix_connection(self._target)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, other_writer))
                both.create_task(self._pump(other_reader, writer))
        except* OSError:
            pass  # one end broke: the other one hears of it by the close below
        finally:
            for end in (writer, other_writer):
                if end is not None:
                    end.close()
                    with contextlib.suppress(OSError):
                        await end.wait_closed()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            self.num_held += not self._flows.is_set()
            await self._flows.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError  # the end of one direction is the end of both
