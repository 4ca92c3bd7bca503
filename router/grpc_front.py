"""`tandem.v1.Inference/Generate`: the same requests, checks, limits and errors as over HTTP, in protobuf's shape.

A message becomes the body that the HTTP front would have got (`grpc_body`) and goes through the same parser, so no
limit can be missing here that is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from tandem.v1 import common_pb2, inference_pb2, inference_pb2_grpc

from cluster.errors import InvalidRequest, RequestTooLarge, StartupError
from cluster.rpc_errors import ErrorInterceptor
from router.answer import LENGTH, STOP, Answer, ChoiceUpdate
from router.api_types import GenerationRequest
from router.generation_service import GenerationService
from router.grpc_body import body_of, renamed_error, renamed_guide
from router.openai_tools import TOOL_CALLS, ToolCallReader
from router.request_parser import AroundBody, RequestParser, client_request_id
from router.served_certificate import ServedCertificate
from router.tenants import DEFAULT_TENANT, ApiKeys
from router.tool_parser import CallDelta

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

# As over HTTP: `http_protocol`.
MAX_METADATA_BYTES, MAX_METADATA_ENTRIES = 16 * 1024, 100
# A connection that has not said what it wants by then is closed; gRPC's own default is two minutes.
HANDSHAKE_TIMEOUT_MS = 10_000

_FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    STOP: common_pb2.FINISH_REASON_STOP,
    LENGTH: common_pb2.FINISH_REASON_LENGTH,
    TOOL_CALLS: common_pb2.FINISH_REASON_TOOL_CALLS,
}


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """The servicer. `ErrorInterceptor` turns what it raises into statuses."""

    def __init__(self, service: GenerationService, parser: RequestParser, keys: ApiKeys | None) -> None:
        self._service = service
        self._parser = parser
        self._keys = keys

    async def Generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse],
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        _check_metadata(context)
        tenant = DEFAULT_TENANT if self._keys is None else self._keys.tenant_of(_metadata(context, "authorization"))
        around = AroundBody(
            context.time_remaining(),
            request.return_timeline,
            _metadata(context, "traceparent"),
            client_request_id(_metadata(context, "x-request-id")),
        )
        parsed = self._parse(request, around)
        tools = None if parsed.tool_use is None else ToolCallReader(parsed.tool_use, self._service.tool_format)
        # A client that leaves cancels this coroutine, and leaving the context cancels what runs.
        async with self._service.answering(parsed, tenant) as answer:
            async for updates in answer.updates():
                if choices := [choice for update in updates if (choice := _choice(update, tools)) is not None]:
                    yield inference_pb2.GenerateResponse(request_id=answer.request_id, choices=choices)
            yield _last_response(answer, parsed)

    def _parse(self, request: inference_pb2.GenerateRequest, around: AroundBody) -> GenerationRequest:
        try:
            body = {"model": request.model or self._parser.limits.model_name, **body_of(request)}
            parse = self._parser.parse_chat if "messages" in body else self._parser.parse_completion
            parsed = parse(body, around)
        except InvalidRequest as error:
            raise renamed_error(error) from None
        return dataclasses.replace(
            parsed,
            guide=None if parsed.guide is None else renamed_guide(parsed.guide),
            described=tuple(map(renamed_guide, parsed.described)),
            is_streamed=True,
            wants_token_ids=True,
        )


class GrpcFront:
    """The public gRPC server. Owned by the router process."""

    def __init__(
        self,
        servicer: InferenceService,
        address: str,
        max_body_bytes: int,
        *,
        offers_reflection: bool = False,
        shares_port: bool = False,
        certificate: ServedCertificate | None = None,
    ) -> None:
        """Raises `StartupError` when the address is taken. `certificate`: TLS with it; None: without."""
        options = [
            ("grpc.max_receive_message_length", max_body_bytes),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            # Between the two gRPC refuses by chance.
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
            ("grpc.so_reuseport", int(shares_port)),
        ]
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=options)
        self._health = cast(Any, health).aio.HealthServicer()  # not in the type stubs
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if offers_reflection:
            names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        try:
            if certificate is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, certificate.grpc_credentials())
        except RuntimeError:
            raise StartupError(
                f"cannot listen on {address} for gRPC: in use or not allowed; choose another with --grpc-port"
            ) from None

    async def start(self) -> None:
        await self._server.start()
        await self.set_ready(False)

    async def set_ready(self, is_ready: bool) -> None:
        """What `grpc.health.v1` answers."""
        states = health_pb2.HealthCheckResponse
        status = states.SERVING if is_ready else states.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """No new calls; those that run have `grace_s` to end."""
        await self._server.stop(grace_s)


def _choice(update: ChoiceUpdate, tools: ToolCallReader | None) -> inference_pb2.GenerateChoice | None:
    """What one choice has to say; None while it shows neither text nor call nor token."""
    text, reason = update.delta.text, update.finish_reason
    calls: Sequence[CallDelta] = ()
    if tools is not None:
        read = tools.read(update.index, text, is_last=reason is not None)
        if not (read or reason or update.delta.tokens):
            return None
        text, reason, calls = read.content, tools.finish_reason(update.index, reason), read.calls
    return inference_pb2.GenerateChoice(
        index=update.index,
        text=text,
        token_ids=[token.token_id for token in update.delta.tokens],
        logprobs=[token.logprobs for token in update.delta.tokens if token.logprobs is not None],
        finish_reason=_FINISH_REASONS[reason],
        tool_calls=[
            inference_pb2.ToolCall(index=call.index, id=call.call_id, name=call.name, arguments=call.arguments)
            for call in calls
        ],
    )


def _last_response(answer: Answer, request: GenerationRequest) -> inference_pb2.GenerateResponse:
    usage = answer.usage
    return inference_pb2.GenerateResponse(
        request_id=answer.request_id,
        usage=inference_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        timeline=answer.merged_timeline() if request.wants_timeline else None,
    )


def _check_metadata(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    metadata: Any = context.invocation_metadata()
    if len(metadata or ()) > MAX_METADATA_ENTRIES:
        raise RequestTooLarge(
            f"metadata has {len(metadata)} entries, at most {MAX_METADATA_ENTRIES}", code="headers_too_large"
        )


def _metadata(context: grpc.aio.ServicerContext[Any, Any], name: str) -> str:
    metadata: Any = context.invocation_metadata()
    return next((str(value) for key, value in metadata or () if key == name), "")
