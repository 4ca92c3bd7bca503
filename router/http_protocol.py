"""uvicorn's HTTP/1.1 protocol with bounds on what a connection may cost before and after its request is read.

    headers   16 KiB and 100 of them, complete within 10 s of their first byte (or of the connection)
    body      complete within 30 s of the headers
    response  aborted when the client has read nothing of what waits for it for 60 s
    idle      closed 60 s after the last response

uvicorn's own keep-alive timer starts anew with every byte; these deadlines do not. A response's head is sent with the
first part of its body.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cluster.errors import ClientError, InvalidRequest, RequestTooLarge, TandemError
from router.asgi_types import ClientLink
from router.http_errors import error_body
from router.response_transport import ResponseTransport

MAX_HEADER_BYTES = 16 * 1024
MAX_HEADERS = 100
IDLE_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class ReceiptTimes:
    """How long a client may take. Tests use shorter ones."""

    headers_s: float = 10.0
    body_s: float = 30.0
    stalled_reader_s: float = 60.0


class RequestTimeout(ClientError):
    """The client took too long to send its request."""

    code = "request_timeout"
    http_status = 408


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    times = ReceiptTimes()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s: float | None = None  # on the loop's clock
        self._awaited = ("headers", 0.0)  # by then, and how long it may take
        self._client = ClientLink()
        self._has_certificate = False
        self._reader_deadline: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0
        self._is_in_headers = True
        self._refusal: TandemError | None = None

    # --- connection ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._responses = ResponseTransport(transport)
        super().connection_made(self._responses)
        tls = transport.get_extra_info("ssl_object")
        self._has_certificate = tls is not None and bool(tls.getpeercert())  # verified, or the handshake had failed
        self._arm(self.times.headers_s, "headers")

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._watch_reader(False)
        super().connection_lost(exc)
        self._client.lose()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self.parser is None:
            return
        if self._is_in_headers:
            if self._deadline_s is None:
                self._arm(self.times.headers_s, "headers")
            self._num_header_bytes += len(data)
        super().data_received(data)
        # A header that never ends is not seen by the parser's callbacks.
        if self._is_in_headers and self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse(RequestTooLarge(f"headers are larger than {MAX_HEADER_BYTES} bytes", code=_HEADERS_TOO_LARGE))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_reader(False)

    # --- parser callbacks ---------------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._disarm()
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > MAX_HEADER_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse(
                RequestTooLarge(
                    f"{len(self.headers)} headers of {num_bytes} bytes: at most {MAX_HEADERS} and {MAX_HEADER_BYTES}",
                    code=_HEADERS_TOO_LARGE,
                )
            )
            return
        self._arm(self.times.body_s, "body")
        is_alone = self.cycle is None or self.cycle.response_complete  # nothing else is being answered here
        if is_alone and not self.expect_100_continue:
            self._responses.hold_next()
        self.scope["state"].update(client_link=self._client, has_certificate=self._has_certificate)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._disarm()
        self._is_in_headers = True
        self._num_header_bytes = 0
        if self._refusal is None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._responses.flush()  # the head of a response without a body
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest("this is not an HTTP/1.1 request", code="invalid_http"))

    # --- deadlines ----------------------------------------------------------------------------------------------------

    def _arm(self, timeout_s: float, what: str) -> None:
        """One timer serves a connection's deadlines in turn: most requests are there before theirs is looked at."""
        now_s = self.loop.time()
        self._deadline_s = now_s + timeout_s
        self._awaited = (what, timeout_s)
        if self._timer is not None and self._timer.when() > self._deadline_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self.loop.call_at(self._deadline_s, self._look_at_deadline)

    def _disarm(self) -> None:
        self._deadline_s = None

    def _look_at_deadline(self) -> None:
        self._timer = None
        if self._deadline_s is None:
            return
        if self.loop.time() < self._deadline_s:
            self._timer = self.loop.call_at(self._deadline_s, self._look_at_deadline)
            return
        self._deadline_s = None
        self._too_slow(*self._awaited)

    def _too_slow(self, what: str, timeout_s: float) -> None:
        if what == "headers" and self._num_header_bytes == 0:
            self.transport.close()  # it never said anything
            return
        self._refuse(RequestTimeout(f"the {what} of the request did not arrive within {timeout_s:g} s"))

    def _watch_reader(self, is_stalled: bool) -> None:
        if self._reader_deadline is not None:
            self._reader_deadline.cancel()
            self._reader_deadline = None
        if is_stalled:
            self._reader_deadline = self.loop.call_later(self.times.stalled_reader_s, self.transport.abort)

    def _refuse(self, error: TandemError) -> None:
        """Answers for a request that never reaches the application, and closes."""
        if self._refusal is not None:
            return
        self._refusal = error
        self._disarm()
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = error_body(error)
            status = 431 if error.error_code == _HEADERS_TOO_LARGE else error.http_status
            self.transport.write(
                STATUS_LINE[status]
                + b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
                + b"x-should-retry: false\r\nconnection: close\r\n\r\n"
                + body
            )
            if cycle is not None and not cycle.response_complete:
                cycle.response_started = cycle.response_complete = True
                cycle.disconnected = True
                cycle.message_event.set()
        self.transport.close()


_HEADERS_TOO_LARGE = "headers_too_large"
