"""The error tree: a leaf for each different reaction of a caller, one table to HTTP and one to gRPC.

TandemError
├── ClientError             tell the user; never counts against a worker; deterministic, so never retried
│   ├── InvalidRequest          400
│   ├── ContextLengthExceeded   400
│   ├── RequestTooLarge         413 / 431
│   ├── ModelNotFound           404
│   └── RateLimited             429, retry later
├── RetryElsewhere          another worker may succeed
│   ├── WorkerUnavailable       the peer is dead, draining or not ready
│   ├── KvTransferFailed        502 when no other worker is left
│   │   └── KvLinkBroken            a new link to the same worker may do
│   └── KvCapacityExhausted     503
├── RetryLater              503 with Retry-After
│   ├── NoWorkersAvailable
│   └── ServerOverloaded
├── DeadlineExceeded        504
├── RequestCancelled        the client went away; nobody reads the answer
├── EngineFailure           500; this request only
└── StartupError            a process cannot start: one line for the operator, exit code 2
"""

from __future__ import annotations

from typing import ClassVar

import grpc
from tandem.v1 import common_pb2

MAX_SHOWN_VALUE_CHARS = 64


class TandemError(Exception):
    """A failure with its code, its parameter and what the caller can do about it."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str = "",
        code: str = "",
        retry_after_s: float = 0.0,
        stage: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.error_code = code or self.code
        self.retry_after_s = retry_after_s
        self.stage = stage
        self.request_id = ""  # of the request that it ended, once that had an id


class ClientError(TandemError):
    """The request itself is wrong; sending it again gives the same answer."""

    code = "invalid_request"
    http_status = 400
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT


class InvalidRequest(ClientError):
    """A field is missing, unknown or outside its range."""


class ContextLengthExceeded(ClientError):
    """Prompt and max_tokens do not fit in the model's context."""

    code = "context_length_exceeded"


class RequestTooLarge(ClientError):
    """The body is larger than the server takes."""

    code = "request_too_large"
    http_status = 413
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED


class ModelNotFound(ClientError):
    """No served model has that name."""

    code = "model_not_found"
    http_status = 404
    grpc_status = grpc.StatusCode.NOT_FOUND


class RequestExceedsKvCapacity(ClientError):
    """The request could never fit in one decode worker's pool."""

    code = "request_exceeds_kv_capacity"
    grpc_status = grpc.StatusCode.FAILED_PRECONDITION


class RateLimited(ClientError):
    """The tenant is over its limit."""

    code = "rate_limit_exceeded"
    http_status = 429
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED


class RetryElsewhere(TandemError):
    """This worker cannot; another one may."""

    code = "worker_unavailable"
    http_status = 503
    grpc_status = grpc.StatusCode.UNAVAILABLE
    retryable = True


# The code of a request that its worker gives back because it stops: nothing failed, and no fault is counted.
HANDED_OVER = "worker_stopping"


class WorkerUnavailable(RetryElsewhere):
    """The worker is dead, draining, or not ready."""


class KvTransferFailed(RetryElsewhere):
    """KV bytes did not arrive, or did not verify."""

    code = "kv_transfer_failed"
    http_status = 502
    grpc_status = grpc.StatusCode.DATA_LOSS


class KvLinkBroken(KvTransferFailed):
    """The connection that KV moves over broke; both workers are there, and can open another one."""

    code = "kv_link_broken"


class KvCapacityExhausted(RetryElsewhere):
    """No KV blocks are free on this worker now."""

    code = "kv_capacity"


class RetryLater(TandemError):
    """Nobody can serve this now."""

    code = "server_is_overloaded"
    http_status = 503
    grpc_status = grpc.StatusCode.UNAVAILABLE


class NoWorkersAvailable(RetryLater):
    """No worker of a needed role is ready."""

    code = "no_workers_available"


class ServerOverloaded(RetryLater):
    """The predicted wait is above what the request allows."""


class DeadlineExceeded(TandemError):
    """The request's own deadline passed."""

    code = "deadline_exceeded"
    http_status = 504
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED


class RequestCancelled(TandemError):
    """The client went away."""

    code = "cancelled"
    http_status = 499
    grpc_status = grpc.StatusCode.CANCELLED


class EngineFailure(TandemError):
    """The engine failed on this request alone."""


class StartupError(TandemError):
    """A process cannot start. The message is one line: what is wrong and what to do. Exit code 2."""

    code = "startup_error"


def to_failure(error: TandemError) -> common_pb2.Failure:
    """The error as it crosses a process boundary."""
    return common_pb2.Failure(
        code=error.error_code,
        message=error.message,
        param=error.param,
        retryable=error.retryable,
        retry_after_ms=int(error.retry_after_s * 1000),
        stage=error.stage,
    )


def from_failure(failure: common_pb2.Failure) -> TandemError:
    """The error that `to_failure` described: the leaf that its code belongs to; EngineFailure for an unknown code."""
    kind = _LEAF_BY_CODE.get(failure.code, RetryElsewhere if failure.retryable else EngineFailure)
    return kind(
        failure.message,
        param=failure.param,
        code=failure.code,
        retry_after_s=failure.retry_after_ms / 1000,
        stage=failure.stage,
    )


def shown(value: object) -> str:
    """A value as it may stand in a message: escaped, at most 64 characters."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_VALUE_CHARS else text[: MAX_SHOWN_VALUE_CHARS - 1] + "…"


_LEAF_BY_CODE: dict[str, type[TandemError]] = {
    leaf.code: leaf
    for leaf in (
        InvalidRequest,
        ContextLengthExceeded,
        RequestTooLarge,
        ModelNotFound,
        RequestExceedsKvCapacity,
        RateLimited,
        WorkerUnavailable,
        KvTransferFailed,
        KvLinkBroken,
        KvCapacityExhausted,
        NoWorkersAvailable,
        ServerOverloaded,
        DeadlineExceeded,
        RequestCancelled,
        EngineFailure,
    )
}
