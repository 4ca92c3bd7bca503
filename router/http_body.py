"""Reads a request's body within its bounds, and checks what kind it is."""

from __future__ import annotations

from typing import Any

from cluster.errors import ClientError, RequestCancelled, RequestTooLarge, shown
from router.asgi_types import Receive, Scope, header


class UnsupportedMediaType(ClientError):
    """The body is not declared as JSON."""

    code = "unsupported_media_type"
    http_status = 415


async def read_json_bytes(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body. Raises `UnsupportedMediaType`, `RequestTooLarge`, or `RequestCancelled` when the client leaves.

    How long the body may take is bounded by `http_protocol`.
    """
    content_type = header(scope, b"content-type").partition(b";")[0].strip().lower()
    if content_type != b"application/json":
        raise UnsupportedMediaType(f"content-type is {shown(content_type.decode('latin-1'))}, must be application/json")
    declared = header(scope, b"content-length")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message: dict[str, Any] = await receive()
        if message["type"] == "http.disconnect":
            raise RequestCancelled("the client went away before its request was complete")
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {max_bytes} bytes")
