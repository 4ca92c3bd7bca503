"""The router without its process: everything between a front's request and the workers, wired together once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from tandem.v1 import membership_pb2, worker_pb2

from cluster.chat_template import ChatTemplate
from cluster.identity import new_incarnation
from cluster.router_settings import RouterSettings
from cluster.rpc_security import RpcSecurity
from cluster.telemetry import RouterMetrics, new_registry
from cluster.tokenizer import Tokenizer
from cluster.tracing import Tracing, open_tracing
from router.admission import Admission, AdmissionSettings
from router.asgi_types import AsgiApp
from router.cache_view import CacheView
from router.cluster_status import ClusterStatus, watch_workers
from router.decision_log import DecisionLog
from router.dispatcher import Dispatcher
from router.generation_service import GenerationService, ServingPolicy
from router.grammar_checker import GrammarChecker
from router.grpc_front import InferenceService
from router.http_app import build_http_app
from router.limits import ServingLimits
from router.policies import choose_policy
from router.prefix_index import PrefixIndex
from router.prompt_encoder import PromptEncoder
from router.request_log import RequestLog
from router.request_metrics import RequestMetrics
from router.request_parser import RequestParser
from router.router_siblings import RouterSiblings
from router.sampling_defaults import defaults_of_model
from router.shared_metrics import SharedMetrics
from router.shared_tenant_ledger import SharedTenantLedger
from router.tenant_limits import TenantLimit, TenantLimiter
from router.tenants import DEFAULT_TENANT, ApiKeys
from router.timing_model import TimingModel, TimingPrior
from router.tool_format import tool_format_of
from router.worker_registry import WorkerRegistry, turn_of
from router.worker_session import PROTOCOL_VERSION

# One tenant's flood leaves the others a place.
MAX_TENANT_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class RouterCore:
    """The parts that a process starts and stops. `stop` ends links and threads."""

    registry: WorkerRegistry
    is_ready: Callable[[], bool]  # a request would be served now, and as fast as later ones
    service: GenerationService
    encoder: PromptEncoder
    grammars: GrammarChecker
    tracing: Tracing | None
    http_app: AsgiApp
    grpc_servicer: InferenceService
    metrics_registry: CollectorRegistry
    siblings: RouterSiblings
    decisions: DecisionLog
    series: RouterMetrics
    hello: worker_pb2.RouterHello
    dispatcher: Dispatcher
    timing: TimingModel
    cache_view: CacheView | None  # of a policy that looks at caches
    ledger: SharedTenantLedger | None  # where other processes share the port

    def record(self) -> membership_pb2.RouterRecord:
        """What an autoscaler shall know of the load offered to this router."""
        record = self.service.metrics.demand.to_record()
        record.router_id, record.incarnation = self.hello.router_id, self.hello.incarnation
        record.clock_ms = int(time.monotonic() * 1000)
        record.running_requests = self.service.num_running
        record.waiting_requests = self.dispatcher.num_parked + self.service.admission.num_waiting
        if self.timing.is_prefill_fitted:
            record.prefill_coefficients.extend(self.timing.prefill_coefficients)
        if self.timing.is_decode_fitted:
            record.decode_coefficients.extend(self.timing.decode_coefficients)
        return record

    async def stop(self) -> None:
        self.service.admission.close()
        await self.registry.stop()
        await self.grammars.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        self.encoder.close()
        if self.ledger is not None:
            self.ledger.close()


def build_core(
    settings: RouterSettings,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    limits: ServingLimits,
    security: RpcSecurity,
    keys: ApiKeys | None,
) -> RouterCore:
    """Nothing runs yet: workers join through `registry.on_membership_change`."""
    metrics_registry = new_registry()
    series = RouterMetrics(metrics_registry)
    metrics = RequestMetrics(series, limits.model_name)
    siblings = RouterSiblings(settings.runtime_dir, settings.router_id)
    hello = worker_pb2.RouterHello(
        router_id=settings.router_id, incarnation=new_incarnation(), protocol_version=PROTOCOL_VERSION
    )
    registry = WorkerRegistry(hello, security, allows_local_prefill=settings.prefill_fallback == "allow")
    watch_workers(series, registry, limits.model_name)
    encoder = PromptEncoder(tokenizer, template)
    decisions = DecisionLog(siblings)
    choice = choose_policy(
        settings.policy,
        settings.seed,
        TimingPrior(settings.prefill_prior_ms, settings.decode_prior_ms),
        turn_of(settings.router_id),
    )
    cache_view = None
    if choice.uses_cache:
        cache_view = CacheView(PrefixIndex(), time.monotonic)
        registry.on_workers(cache_view.worker_joined, cache_view.worker_left)
        cache_view.watch_silence(series, limits.model_name)
    dispatcher = Dispatcher(registry, choice.policy, (metrics, decisions), cache_view, choice.timing)
    ledger = _shared_ledger(settings, keys) if settings.shares_port else None
    admission = Admission(
        registry,
        choice.timing,
        TenantLimiter(_default_limit(settings, keys), keys.limits if keys is not None else None, ledger),
        AdmissionSettings(
            max_requests=settings.max_concurrent_requests,
            max_waiting=settings.max_waiting_requests,
            ttft_slo_ms=settings.ttft_slo_ms,
            max_worker_queue_ms=settings.max_worker_queue_ms,
        ),
        (metrics, decisions),
        may_choose_local=choice.may_choose_local,
    )
    dispatcher.on_room(admission.room_changed)
    policy = ServingPolicy(
        request_timeout_s=settings.request_timeout_s,
        seed=f"{settings.seed} {settings.router_id}",
        scope_secret=security.token.encode(),
    )
    grammars = GrammarChecker()
    tool_format = tool_format_of(template)
    tracing = open_tracing("router", settings.router_id)
    service = GenerationService(
        tokenizer,
        encoder,
        limits,
        policy,
        registry,
        admission,
        dispatcher,
        metrics,
        grammars,
        tool_format,
        tracing,
        RequestLog(logs_all=settings.log_requests),
        decisions,
    )

    def is_ready() -> bool:
        return registry.is_ready and not encoder.is_learning

    uses_models = settings.sampling_defaults == "model"
    defaults = defaults_of_model(tokenizer.vocabulary.generation_config, limits) if uses_models else {}
    parser = RequestParser(limits, settings.default_max_tokens or None, tool_format, defaults)
    http_app = build_http_app(
        service,
        parser,
        ClusterStatus(registry, service, security, cache_view),
        SharedMetrics(metrics_registry, siblings),
        decisions,
        is_ready=is_ready,
        keys=keys,
        max_body_bytes=settings.max_body_bytes,
        allowed_origins=settings.allowed_origins,
        asks_certificate=settings.ssl_ca_certs is not None,
    )
    return RouterCore(
        registry=registry,
        is_ready=is_ready,
        service=service,
        encoder=encoder,
        grammars=grammars,
        tracing=tracing,
        http_app=http_app,
        grpc_servicer=InferenceService(service, parser, keys),
        metrics_registry=metrics_registry,
        siblings=siblings,
        decisions=decisions,
        series=series,
        hello=hello,
        dispatcher=dispatcher,
        timing=choice.timing,
        cache_view=cache_view,
        ledger=ledger,
    )


def _shared_ledger(settings: RouterSettings, keys: ApiKeys | None) -> SharedTenantLedger:
    """For several processes on one port: a tenant's limits are those of all of them together."""
    default = _default_limit(settings, keys)
    tenants = frozenset({DEFAULT_TENANT}) if keys is None else keys.tenants
    limits = {} if keys is None else keys.limits
    return SharedTenantLedger(settings.runtime_dir, {tenant: limits.get(tenant, default) for tenant in tenants})


def _default_limit(settings: RouterSettings, keys: ApiKeys | None) -> TenantLimit:
    """Of a tenant whose line in the key file says nothing. Without keys there is one tenant, the owner: all is its."""
    max_concurrent_here = 0
    if not settings.tenant_max_concurrent and keys is not None and len(keys.tenants) > 1:
        max_concurrent_here = max(1, int(MAX_TENANT_SHARE * settings.max_concurrent_requests))
    return TenantLimit(
        requests_per_s=settings.tenant_requests_per_s,
        tokens_per_s=settings.tenant_tokens_per_s,
        max_concurrent=settings.tenant_max_concurrent,
        max_concurrent_here=max_concurrent_here,
        may_be_critical=keys is None,
    )
