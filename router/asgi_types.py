"""The few ASGI types and accessors that the HTTP front uses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Scope: TypeAlias = Any  # a mutable mapping; servers and frameworks each have their own type for it
Message: TypeAlias = Any
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]


@dataclass(slots=True, eq=False)
class ClientLink:
    """Whether a request's client is still there. In a scope's state, put there by `http_protocol`."""

    is_lost: bool = False
    on_lost: Callable[[], None] | None = None  # called once, on the event loop

    def lose(self) -> None:
        self.is_lost = True
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()


def client_link(scope: Scope) -> ClientLink:
    link: ClientLink = scope["state"]["client_link"]
    return link


def header(scope: Scope, name: bytes) -> bytes:
    """The first value of a header, or nothing. Names are lower case in ASGI."""
    return next((value for key, value in scope["headers"] if key == name), b"")


async def send_response(send: Send, status: int, content_type: bytes, body: bytes, headers: Headers = ()) -> None:
    """A whole response."""
    lines = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})
