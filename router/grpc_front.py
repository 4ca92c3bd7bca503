"""`tandem.v1.Inference/Generate`: the same requests, checks, limits and errors as over HTTP, in protobuf's shape.

A message becomes the body that the HTTP front would have got and goes through the same parser, so no limit can be
missing here that is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from tandem.v1 import common_pb2, inference_pb2, inference_pb2_grpc

from cluster.errors import InvalidRequest, StartupError
from cluster.rpc_errors import ErrorInterceptor
from router.answer import LENGTH, STOP, Answer, ChoiceUpdate
from router.api_types import GenerationRequest
from router.generation_service import GenerationService
from router.request_parser import AroundBody, RequestParser
from router.tenants import DEFAULT_TENANT, ApiKeys

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

# Fields that HTTP has under the same name, with a presence of their own.
_OPTIONAL_FIELDS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "n", "min_tokens", "priority", "num_drafts",
)  # fmt: skip
# What constrains the answer, and what HTTP calls it.
_GUIDES = {"json_schema": "guided_json", "regex": "guided_regex", "grammar": "guided_grammar"}
_FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    STOP: common_pb2.FINISH_REASON_STOP,
    LENGTH: common_pb2.FINISH_REASON_LENGTH,
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
        tenant = DEFAULT_TENANT if self._keys is None else self._keys.tenant_of(_metadata(context, "authorization"))
        around = AroundBody(context.time_remaining(), request.return_timeline, _metadata(context, "traceparent"))
        parsed = self._parse(request, around)
        # A client that leaves cancels this coroutine, and leaving the context cancels what runs.
        async with self._service.answering(parsed, tenant) as answer:
            async for updates in answer.updates():
                yield _response(answer, updates)
            yield _last_response(answer, parsed)

    def _parse(self, request: inference_pb2.GenerateRequest, around: AroundBody) -> GenerationRequest:
        body = {"model": request.model or self._parser.limits.model_name, **_body(request)}
        parsed = self._parse_body(body, around)
        guide = parsed.guide
        if guide is not None:
            named = {field: name for name, field in _GUIDES.items()}
            guide = dataclasses.replace(guide, param=named.get(guide.param, guide.param))
        return dataclasses.replace(
            parsed,
            guide=guide,
            is_streamed=True,
            wants_token_ids=True,
        )

    def _parse_body(self, body: dict[str, Any], around: AroundBody) -> GenerationRequest:
        parse = self._parser.parse_chat if "messages" in body else self._parser.parse_completion
        try:
            return parse(body, around)
        except InvalidRequest as error:
            raise _renamed(error) from None


def _renamed(error: InvalidRequest) -> InvalidRequest:
    """The error with the parameter's name as it is in protobuf."""
    for name, field in _GUIDES.items():
        if error.param.startswith(field):
            param, message = error.param.replace(field, name, 1), error.message.replace(field, name, 1)
            return InvalidRequest(message, param=param, code=error.error_code)
    return error


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
    ) -> None:
        """Raises `StartupError` when the address is taken."""
        options = [
            ("grpc.max_receive_message_length", max_body_bytes),
            ("grpc.max_metadata_size", 16 * 1024),
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
            self.port = self._server.add_insecure_port(address)
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


def _body(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    """The JSON body that asks for the same."""
    present = {field.name for field, _ in request.ListFields()}
    body: dict[str, Any] = {name: getattr(request, name) for name in _OPTIONAL_FIELDS if name in present}
    body.update({field: getattr(request, name) for name, field in _GUIDES.items() if getattr(request, name)})
    if request.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in request.logit_bias.items()}
    if request.stop:
        body["stop"] = list(request.stop)
    if request.stop_token_ids:
        body["stop_token_ids"] = list(request.stop_token_ids)
    for name in ("user", "cache_salt", "speculation"):
        if getattr(request, name):
            body[name] = getattr(request, name)
    body["ignore_eos"] = request.ignore_eos
    match request.WhichOneof("prompt"):
        case "text":
            body["prompt"] = request.text
        case "token_ids":
            body["prompt"] = list(request.token_ids.ids)
        case "chat":
            body["messages"] = [_message(message) for message in request.chat.messages]
    if request.HasField("logprobs"):
        is_chat = "messages" in body
        body.update({"logprobs": True, "top_logprobs": request.logprobs} if is_chat else {"logprobs": request.logprobs})
    return body


def _message(message: inference_pb2.ChatMessage) -> dict[str, str]:
    name = {"name": message.name} if message.name else {}
    return {"role": message.role, "content": message.content, **name}


def _response(answer: Answer, updates: list[ChoiceUpdate]) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        request_id=answer.request_id,
        choices=[
            inference_pb2.GenerateChoice(
                index=update.index,
                text=update.delta.text,
                token_ids=[token.token_id for token in update.delta.tokens],
                logprobs=[token.logprobs for token in update.delta.tokens if token.logprobs is not None],
                finish_reason=_FINISH_REASONS[update.finish_reason],
            )
            for update in updates
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


def _metadata(context: grpc.aio.ServicerContext[Any, Any], name: str) -> str:
    metadata: Any = context.invocation_metadata()
    return next((str(value) for key, value in metadata or () if key == name), "")
