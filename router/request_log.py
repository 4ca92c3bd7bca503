"""A log line for a request that ended: always for a failure that is the server's, for every one where it was asked for.

    {"message": "answered", "request_id": "chatcmpl-…", "client_request_id": "…", "tenant": "alice", "status": 200,
     "prompt_tokens": 812, "cached_tokens": 800, "completion_tokens": 64, "first_token_ms": 41.2, "total_ms": 903.5, …}

Numbers and names, never a word of a prompt or an answer.
"""

from __future__ import annotations

import logging
from typing import Any

from cluster.errors import RequestCancelled, TandemError
from cluster.identity import RequestId, Tenant
from router.answer import Answer, RequestTimes
from router.api_types import GenerationRequest

# As web servers have it: the client closed the connection.
CLIENT_LEFT = 499

_log = logging.getLogger(__name__)


class RequestLog:
    """Owned by the router process."""

    def __init__(self, *, logs_all: bool) -> None:
        self._logs_all = logs_all

    def answered(self, request: GenerationRequest, answer: Answer, tenant: Tenant) -> None:
        if not self._logs_all:
            return
        times, usage = answer.times, answer.usage
        line = _who(request, RequestId(answer.request_id), tenant)
        line.update(
            status=200,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reason=",".join(sorted(set(answer.finish_reasons))),
            waited_ms=_ms(times.encoded_s, times.placed_s),
            first_token_ms=_ms(times.admitted_s, times.first_token_s),
            total_ms=_ms(times.admitted_s, times.ended_s),
        )
        _log.info("answered", extra=line)

    def failed(
        self, request: GenerationRequest, request_id: RequestId, tenant: Tenant, error: TandemError, times: RequestTimes
    ) -> None:
        """Refused, failed, or left by its client."""
        is_left = isinstance(error, RequestCancelled)
        is_ours = error.http_status >= 500 and not is_left
        if not (is_ours or self._logs_all):
            return
        line = _who(request, request_id, tenant)
        line.update(status=CLIENT_LEFT if is_left else error.http_status, code=error.error_code, reason=error.message)
        line.update({"stage": error.stage} if error.stage else {})
        line.update(was_placed=times.placed_s > 0, has_started=times.first_token_s > 0)
        _log.log(logging.WARNING if is_ours else logging.INFO, "client left" if is_left else "not answered", extra=line)


def _who(request: GenerationRequest, request_id: RequestId, tenant: Tenant) -> dict[str, Any]:
    named = {"client_request_id": request.client_request_id} if request.client_request_id else {}
    return {"request_id": request_id, **named, "tenant": tenant, "is_streamed": request.is_streamed}


def _ms(begin_s: float, end_s: float) -> float:
    """0 for what never came."""
    return round(max(0.0, end_s - begin_s) * 1000, 1) if end_s else 0.0
