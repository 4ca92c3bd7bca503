"""One router process put together: settings in, both fronts serving, a graceful end.

    membership in Redis ─> RouterCore (registry, dispatcher, service) ─> HTTP front, gRPC front

Everything runs on one event loop. On SIGTERM the router refuses new requests, lets streams end, then closes its links.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import Future

from cluster.chat_template import ChatTemplate, template_of_file
from cluster.ended_tasks import end_tasks
from cluster.errors import StartupError
from cluster.front_tls import FrontTls
from cluster.garbage import settle_objects
from cluster.kv_events import KvEventReader
from cluster.logs import configure_logs
from cluster.membership import MembershipView, Registration, router_key
from cluster.model_files import resolve_model, served_name
from cluster.process_guard import StopSignals, die_with_parent
from cluster.redis_client import RedisClient
from cluster.router_settings import RouterSettings, parse_arguments
from cluster.rpc_security import RpcSecurity, is_loopback
from cluster.tokenizer import Tokenizer, load_tokenizer
from router.allowed_origins import ANY
from router.cache_view import CacheView
from router.grpc_front import GrpcFront
from router.http_server import HttpServer, bind_socket
from router.limits import ServingLimits
from router.router_core import build_core
from router.served_certificate import ServedCertificate
from router.tenants import read_api_keys

DRAIN_TIMEOUT_S = 60.0
# Shorter than a gap may stay unrepaired.
CACHE_TICK_S = 0.25
HEARTBEAT_S = 1.0

_log = logging.getLogger(__name__)


async def start(arguments: Sequence[str]) -> None:
    """Runs a router until it is told to stop. Raises `StartupError` for what an operator can mend."""
    settings = parse_arguments(arguments)
    configure_logs("router", settings.router_id)
    die_with_parent(settings.parent_pid)
    await RouterProcess(settings).run()


class RouterProcess:
    """Builds everything in its constructor; `run` starts and ends it."""

    def __init__(self, settings: RouterSettings) -> None:
        _refuse_open_address(settings)
        self._settings = settings
        tls = FrontTls.of(settings)
        self._certificate = None if tls is None else ServedCertificate(tls)
        self._socket = bind_socket(
            settings.http_host, settings.http_port, "--http-port", shares_port=settings.shares_port
        )
        if settings.grpc_port:  # gRPC's own words about a busy port come before ours
            bind_socket(settings.http_host, settings.grpc_port, "--grpc-port", shares_port=settings.shares_port).close()
        security = RpcSecurity.from_settings(settings)
        keys = None if settings.api_keys_file is None else read_api_keys(settings.api_keys_file)
        model_path = resolve_model(settings.model)
        tokenizer = load_tokenizer(model_path)
        limits = _limits(settings, tokenizer, settings.served_model_name or served_name(model_path))
        self._core = build_core(settings, tokenizer, _template(settings, tokenizer), limits, security, keys)
        context = None if self._certificate is None else self._certificate.context
        self._http = HttpServer(self._core.http_app, self._socket, DRAIN_TIMEOUT_S, context)
        self._redis = RedisClient(settings.redis_url, settings.redis_password_file)
        self._view = MembershipView(self._redis, self._core.registry.on_membership_change)
        self._core.series.redis_up.set_function(lambda: self._view.is_redis_healthy)

    async def run(self) -> None:
        """Until SIGTERM or SIGINT; a second one does not wait for streams."""
        settings = self._settings
        signals = StopSignals()
        signals.install()
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(signals.remove)
            stack.push_async_callback(self._redis.close)
            stack.push_async_callback(self._core.stop)
            learning = self._core.encoder.learn_words()  # first of all: workers take longer to come
            self._view.start()
            stack.push_async_callback(self._view.stop)
            registration = Registration(self._redis, router_key(settings.router_id), self._core.record, HEARTBEAT_S)
            registration.start()
            stack.push_async_callback(registration.stop)
            self._follow_caches(stack)
            if settings.shares_port:
                await self._core.siblings.start()
                stack.push_async_callback(self._core.siblings.stop)
            grpc_front = await self._start_grpc()
            self._http.start()
            if grpc_front is not None:
                reporter = asyncio.create_task(self._report_readiness(grpc_front, learning), name="grpc-health")
                stack.callback(reporter.cancel)
            if self._certificate is not None:
                watching = asyncio.create_task(self._certificate.watch(), name="certificate")
                stack.callback(watching.cancel)
            settle_objects()
            _log.info("router listens", extra={"address": f"{settings.http_host}:{settings.http_port}"})
            await signals.drain.wait()
            await self._drain(grpc_front, signals)

    def _follow_caches(self, stack: contextlib.AsyncExitStack) -> None:
        """KV events into the prefix index, for a policy that looks at caches."""
        view = self._core.cache_view
        if view is None:
            return
        reader = KvEventReader(self._redis, view.on_event)
        view.connect(reader)
        reader.start()
        stack.push_async_callback(reader.stop)
        ticker = asyncio.create_task(_tick_for_ever(view), name="cache-view")
        stack.callback(ticker.cancel)

    async def _start_grpc(self) -> GrpcFront | None:
        settings = self._settings
        if not settings.grpc_port:
            return None
        host = f"[{settings.http_host}]" if ":" in settings.http_host else settings.http_host
        front = GrpcFront(
            self._core.grpc_servicer,
            f"{host}:{settings.grpc_port}",
            settings.max_body_bytes,
            offers_reflection=settings.grpc_reflection,
            shares_port=settings.shares_port,
            certificate=self._certificate,
        )
        await front.start()
        return front

    async def _drain(self, grpc_front: GrpcFront | None, signals: StopSignals) -> None:
        _log.info("router drains", extra={"running": self._core.service.num_running})
        self._core.service.is_draining = True
        hurry = asyncio.create_task(self._stop_when_told_twice(grpc_front, signals), name="second-signal")
        try:
            fronts = [self._http.stop()]
            if grpc_front is not None:
                await grpc_front.set_ready(False)
                fronts.append(grpc_front.stop(DRAIN_TIMEOUT_S))
            await asyncio.gather(*fronts)
        finally:
            await end_tasks(hurry)

    async def _stop_when_told_twice(self, grpc_front: GrpcFront | None, signals: StopSignals) -> None:
        await signals.stop_now.wait()
        self._http.stop_now()
        if grpc_front is not None:
            await grpc_front.stop(0)

    async def _report_readiness(self, front: GrpcFront, learning: Future[None]) -> None:
        """Keeps the gRPC health service in step with the registry, once the words are learned."""
        changed = asyncio.Event()
        self._core.registry.on_change(changed.set)
        await asyncio.wait([asyncio.wrap_future(learning)])
        while True:
            await front.set_ready(self._core.is_ready() and not self._core.service.is_draining)
            await changed.wait()
            changed.clear()


async def _tick_for_ever(view: CacheView) -> None:
    while True:
        await asyncio.sleep(CACHE_TICK_S)
        view.tick()


def _refuse_open_address(settings: RouterSettings) -> None:
    if settings.api_keys_file is None and not is_loopback(settings.http_host):
        raise StartupError(
            f"{settings.http_host} can be reached from other machines and no API keys are set: listen on 127.0.0.1, or "
            "make a key with `tandem key create NAME --file keys.txt` and give --api-keys-file keys.txt"
        )
    if settings.api_keys_file is None and ANY in settings.allowed_origins:
        raise StartupError(
            "allowed_origins * lets every page that somebody on this machine opens use a server without API keys: name "
            "the pages' origins, or give --api-keys-file"
        )


def _limits(settings: RouterSettings, tokenizer: Tokenizer, model_name: str) -> ServingLimits:
    own_length = tokenizer.vocabulary.max_model_len
    max_model_len = min(settings.max_model_len or own_length, own_length or settings.max_model_len)
    if max_model_len < 1:
        raise StartupError("the model's files do not say its context length: give --max-model-len")
    return ServingLimits(
        model_name=model_name,
        vocab_size=tokenizer.vocab_size,
        max_model_len=max_model_len,
        max_choices=settings.max_choices,
        aliases=settings.model_aliases,
    )


def _template(settings: RouterSettings, tokenizer: Tokenizer) -> ChatTemplate | None:
    source, special_tokens = tokenizer.vocabulary.chat_template, tokenizer.vocabulary.special_tokens
    if settings.chat_template_file is not None:
        return template_of_file(settings.chat_template_file, special_tokens)
    return None if source is None else ChatTemplate(source, special_tokens)
