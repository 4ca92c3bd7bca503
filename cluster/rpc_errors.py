"""A `TandemError` crosses a gRPC call whole: status code, message, and a `Failure` in the trailing metadata.

Inside handlers raise the leaf; `ErrorInterceptor` turns it into a status. On the calling side `from_rpc_error` gives
the same leaf back, or the one that fits a bare status (a peer that died sends no metadata).
"""

from __future__ import annotations

import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from tandem.v1 import common_pb2

from cluster.errors import (
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    RequestTooLarge,
    TandemError,
    WorkerUnavailable,
    from_failure,
    to_failure,
)

FAILURE_METADATA_KEY = "tandem-failure-bin"

_LEAF_BY_STATUS: dict[grpc.StatusCode, type[TandemError]] = {
    grpc.StatusCode.UNAVAILABLE: WorkerUnavailable,
    # A call that we cancel ourselves raises CancelledError; this status means that the peer ended it, as at shutdown.
    grpc.StatusCode.CANCELLED: WorkerUnavailable,
    grpc.StatusCode.ABORTED: WorkerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    # Without a Failure this comes from gRPC itself: the message is above the peer's limit.
    grpc.StatusCode.RESOURCE_EXHAUSTED: RequestTooLarge,
}

_log = logging.getLogger(__name__)


def from_rpc_error(error: grpc.aio.AioRpcError, stage: str = "") -> TandemError:
    """The failure that the peer meant, or what its bare status says."""
    metadata: Any = error.trailing_metadata()
    for key, value in metadata or ():
        if key == FAILURE_METADATA_KEY and isinstance(value, bytes):
            try:
                return from_failure(common_pb2.Failure.FromString(value))
            except DecodeError:
                break
    kind = _LEAF_BY_STATUS.get(error.code(), EngineFailure)
    return kind(f"{error.code().name}: {error.details() or 'no details'}", stage=stage)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: TandemError) -> None:
    """Ends the call with the error's status and its `Failure`."""
    metadata = ((FAILURE_METADATA_KEY, to_failure(error).SerializeToString()),)
    await context.abort(error.grpc_status, error.message, metadata)


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Turns what a handler raises into a status. An unexpected exception shows an opaque id, never a traceback."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        return handler if handler is None else _with_errors(handler)


def _with_errors(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """The same kind of handler around the same function."""
    for kind, make in _MAKERS.items():
        function = getattr(handler, kind)
        if function is not None:
            wrapped = _guard_stream(function) if inspect.isasyncgenfunction(function) else _guard_call(function)
            return make(wrapped, handler.request_deserializer, handler.response_serializer)
    raise TypeError("a gRPC handler without a function")


_MAKERS: dict[str, Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


def _guard_call(function: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await function(request, context)
        except Exception as error:
            await _abort(context, error)

    return call


def _guard_stream(function: Callable[[Any, Any], AsyncIterator[Any]]) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for message in function(request, context):
                yield message
        except Exception as error:
            await _abort(context, error)

    return stream


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    if isinstance(error, TandemError):
        await abort_with(context, error)
    if isinstance(error, grpc.aio.AbortError):  # the handler has set its status already
        raise error
    error_id = secrets.token_hex(4)
    _log.error("unexpected error in a call", exc_info=error, extra={"error_id": error_id})
    await abort_with(context, EngineFailure(f"internal error {error_id}"))
