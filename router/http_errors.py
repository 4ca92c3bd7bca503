"""Errors in OpenAI's shape, `{"error": {message, type, param, code}}`, with the headers that go with them."""

from __future__ import annotations

import json
import logging
import math
import secrets

from cluster.errors import ClientError, EngineFailure, RateLimited, TandemError

_log = logging.getLogger(__name__)


def error_body(error: TandemError) -> bytes:
    """The same for a response and for an event in mid-stream."""
    return json.dumps({"error": error_fields(error)}).encode()


def error_fields(error: TandemError) -> dict[str, str | None]:
    return {
        "message": error.message,
        "type": _type(error),
        "param": error.param or None,
        "code": error.error_code,
    }


def error_event(error: TandemError) -> bytes:
    """After it the stream closes, without `[DONE]`: no client can take what it has for a whole answer."""
    return b"data: " + error_body(error) + b"\n\n"


def error_headers(error: TandemError) -> list[tuple[bytes, bytes]]:
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s > 0:
        headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
    if isinstance(error, ClientError) and not isinstance(error, RateLimited):
        headers.append((b"x-should-retry", b"false"))
    if error.stage.isidentifier():  # where it failed: route, prefill, transfer, decode
        headers.append((b"x-tandem-stage", error.stage.encode("ascii", "replace")))
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def as_tandem_error(error: Exception) -> TandemError:
    """The error itself, or for an unexpected one an opaque id that stands in the log as well."""
    if isinstance(error, TandemError):
        return error
    error_id = secrets.token_hex(4)
    _log.error("unexpected error in a request", exc_info=error, extra={"error_id": error_id})
    return EngineFailure(f"internal error {error_id}")


def _type(error: TandemError) -> str:
    if error.http_status == 401:
        return "authentication_error"
    if error.http_status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if error.http_status < 500 else "server_error"
