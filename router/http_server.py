"""uvicorn as a part of the router's event loop: bounded connections, our own signals, a socket bound beforehand."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn

from cluster.errors import StartupError
from router.asgi_types import AsgiApp
from router.http_protocol import IDLE_TIMEOUT_S, BoundedHttpProtocol

BACKLOG = 2048


class HttpServer:
    """Owned by the router process."""

    def __init__(
        self, app: AsgiApp, bound: socket.socket, drain_timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=IDLE_TIMEOUT_S,
            timeout_graceful_shutdown=int(drain_timeout_s),
        )
        config.load()
        config.ssl = tls  # made and checked by `front_tls`, not from uvicorn's options
        self._server = _Server(config)
        self._socket = bound
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http-server")

    async def stop(self) -> None:
        """Ends when every response is complete, or the drain timeout is over."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
            self._task = None

    def stop_now(self) -> None:
        """Does not wait for responses any more."""
        self._server.force_exit = True


class _Server(uvicorn.Server):
    """Leaves the process's signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind_socket(host: str, port: int, flag: str, *, shares_port: bool = False) -> socket.socket:
    """A listening address of our own, or one that other routers share. Raises `StartupError` when it is not free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, a body that follows its headers
    # waits 40 ms for the client's delayed acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
        bound.setblocking(False)
        bound.listen(BACKLOG)  # a client that comes while the rest starts waits instead of being refused
    except OSError as error:
        bound.close()
        raise StartupError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with {flag}"
        ) from None
    return bound
