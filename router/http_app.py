"""The HTTP front: which path is answered by what. Read this first.

    HttpGuard (who may ask) -> FastAPI's routes -> generation and token endpoints (plain ASGI), or a small GET

Request bodies are checked by `request_parser`, the same code as for gRPC, and not by FastAPI's models.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route

from cluster import telemetry
from cluster.errors import ClientError, ModelNotFound, TandemError, shown
from cluster.identity import WorkerId
from cluster.version import tandem_version
from router.allowed_origins import AllowedOrigins
from router.asgi_types import AsgiApp, Receive, Scope, Send
from router.cluster_status import ClusterStatus
from router.decision_log import DecisionLog
from router.generation_apis import generation_apis
from router.generation_service import GenerationService
from router.http_errors import as_tandem_error, error_body, error_headers
from router.http_generation import GenerationEndpoint
from router.http_guard import Forbidden, HttpGuard
from router.http_tokens import TokenEndpoint, TokenService
from router.messages_body import MessagesParser
from router.messages_format import messages_error_body
from router.openapi_document import openapi_document
from router.request_parser import RequestParser
from router.shared_metrics import SharedMetrics
from router.tenants import ApiKeys

_NOT_OFFERED = (
    "/v1/embeddings", "/v1/images", "/v1/audio", "/v1/moderations", "/v1/files", "/v1/batches",
    "/v1/fine_tuning", "/v1/assistants", "/v1/threads", "/v1/rerank", "/rerank", "/v1/score", "/pooling",
)  # fmt: skip
_LOOPBACK_CLIENTS = frozenset({"127.0.0.1", "::1", ""})


def build_http_app(
    service: GenerationService,
    parser: RequestParser,
    status: ClusterStatus,
    shared_metrics: SharedMetrics,
    decisions: DecisionLog,
    *,
    is_ready: Callable[[], bool],
    keys: ApiKeys | None,
    max_body_bytes: int,
    allowed_origins: Collection[str] = (),
    asks_certificate: bool = False,
) -> AsgiApp:
    """The ASGI application of the router."""
    tokens = TokenService(service.encoder, service.limits)
    probes = _Probes(service, status, shared_metrics, decisions, is_ready)
    shapes = generation_apis(service, parser)
    generation = {path: GenerationEndpoint(service, shape, max_body_bytes) for path, shape in shapes.items()}
    count_tokens = functools.partial(MessagesParser(parser).count_tokens, encoder=service.encoder)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.routes.extend(
        [
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generation.items()),
            Route("/tokenize", TokenEndpoint(tokens.tokenize, service.encoder, max_body_bytes), methods=["POST"]),
            Route("/detokenize", TokenEndpoint(tokens.detokenize, service.encoder, max_body_bytes), methods=["POST"]),
            Route(
                "/v1/messages/count_tokens",
                TokenEndpoint(count_tokens, service.encoder, max_body_bytes, messages_error_body),
                methods=["POST"],
            ),
            Route("/v1/models", probes.models, methods=["GET"]),
            Route("/v1/models/{model_id:path}", probes.model, methods=["GET"]),
            Route("/version", _constant_json({"version": tandem_version()}), methods=["GET"]),
            Route("/livez", probes.livez, methods=["GET"]),
            Route("/readyz", probes.readyz, methods=["GET"]),
            Route("/health", probes.readyz, methods=["GET"]),  # as vLLM's and llama.cpp's servers name it
            Route("/metrics", probes.metrics, methods=["GET"]),
            Route("/statusz", probes.statusz, methods=["GET"]),
            Route("/explain/{request_id:path}", probes.explain, methods=["GET"]),
            Route("/workers/{worker_id}/drain", probes.drain, methods=["POST"]),
            Route("/openapi.json", _constant_json(openapi_document(service.limits)), methods=["GET"]),
        ]
    )
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(TandemError, _tandem_error)
    origins = AllowedOrigins(allowed_origins)
    return HttpGuard(_GenerationFirst(generation, app), keys, origins, asks_certificate=asks_certificate)


class _GenerationFirst:
    """Hands generation requests to their endpoint without a framework's dozen layers around each of their steps."""

    def __init__(self, generation: Mapping[str, AsgiApp], others: AsgiApp) -> None:
        """`others` knows the same paths, for methods that they do not take."""
        self._generation = generation
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._generation.get(scope["path"], self._others) if scope["method"] == "POST" else self._others
        await app(scope, receive, send)


class _Probes:
    """The small GET routes."""

    def __init__(
        self,
        service: GenerationService,
        status: ClusterStatus,
        shared_metrics: SharedMetrics,
        decisions: DecisionLog,
        is_ready: Callable[[], bool],
    ) -> None:
        self._service = service
        self._status = status
        self._shared_metrics = shared_metrics
        self._decisions = decisions
        self._is_ready = is_ready
        self._created = int(time.time())

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._service.limits.names]})

    async def model(self, request: Request) -> Response:
        name, served = request.path_params["model_id"], self._service.limits.names
        if name not in served:
            raise ModelNotFound(f"no model {shown(name)}; served: {', '.join(served)}", param="model")
        return JSONResponse(self._model(name))

    async def livez(self, _: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def readyz(self, _: Request) -> Response:
        is_ready = self._is_ready() and not self._service.is_draining
        body = {"status": "ready" if is_ready else "not ready", "pools": self._status.pools()}
        return JSONResponse(body, 200 if is_ready else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(await self._shared_metrics.exposition(), media_type=telemetry.CONTENT_TYPE)

    async def statusz(self, request: Request) -> Response:
        _require_operator(request)
        return JSONResponse(await self._status.read())

    async def drain(self, request: Request) -> Response:
        """The worker finishes what it has and ends; nothing new goes to it. A second call changes nothing."""
        _require_operator(request)
        in_flight = await self._status.drain(WorkerId(request.path_params["worker_id"]))
        return JSONResponse({"worker_id": request.path_params["worker_id"], "in_flight": in_flight}, 202)

    async def explain(self, request: Request) -> Response:
        _require_operator(request)
        explained = await self._decisions.explain(request.path_params["request_id"])
        if explained is None:
            raise _NotFound("no such request, or it was too long ago: only the last ones are remembered")
        return JSONResponse(explained)

    def _model(self, name: str) -> dict[str, Any]:
        limits = self._service.limits
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "tandem",
            "root": limits.model_name,
            "parent": None,
            "max_model_len": limits.max_model_len,
        }


def _require_operator(request: Request) -> None:
    if not request.state.is_operator:
        raise HTTPException(403, "this needs a key with the word `admin` in its line of the key file")
    if request.client is not None and request.client.host not in _LOOPBACK_CLIENTS:
        raise HTTPException(403, "this page is for the machine that the router runs on")


def _constant_json(document: dict[str, Any]) -> Callable[[Request], Awaitable[Response]]:
    body = json.dumps(document).encode()

    async def respond(_: Request) -> Response:
        return Response(body, media_type="application/json")

    return respond


class _NotFound(ClientError):
    code = "not_found"
    http_status = 404


def _no_such_route(path: str) -> ClientError:
    """OpenAI's other services are told apart from a mistyped path."""
    if any(path.startswith(other) for other in _NOT_OFFERED):
        offered = "/v1/chat/completions, /v1/responses, /v1/completions and /v1/messages"
        return _NotFound(f"{path[:64]} is not offered: this server generates text at {offered}", code="not_offered")
    return _NotFound(f"nothing is at {path[:64]}; /openapi.json says what there is")


class _MethodNotAllowed(ClientError):
    code = "method_not_allowed"
    http_status = 405


async def _tandem_error(_: Request, raised: Exception) -> Response:
    error = as_tandem_error(raised)
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_body(error), error.http_status, headers, media_type="application/json")


async def _http_error(request: Request, raised: Exception) -> Response:
    """The framework's own refusals in OpenAI's shape."""
    status = raised.status_code if isinstance(raised, HTTPException) else 500
    error: ClientError
    if status == 404:
        error = _no_such_route(request.url.path)
    elif status == 405:
        error = _MethodNotAllowed(f"{request.method[:16]} is not allowed here")
    else:
        error = Forbidden(str(getattr(raised, "detail", raised)))
    headers = dict(getattr(raised, "headers", None) or {})
    return Response(error_body(error), status, headers, media_type="application/json")
