"""What a simulation is of: the models, the workers, the objective, the scaling and the faults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.run_summary import Slo
from benchmarks.simulator.simulated_engine import DEFAULT_MAX_LEAP
from benchmarks.simulator.simulated_worker import WorkerShape
from cluster.identity import Tenant
from cluster.router_settings import RouterLimits
from cluster.worker_settings import DEFAULT_ITL_SLO_MS
from deploy.autoscaler.capacity import CapacityModel
from deploy.autoscaler.policy import Policy
from engine.mock_engine import StepTiming
from engine.request import EngineLimits
from router.admission import AdmissionSettings
from router.tenant_limits import TenantLimit
from router.timing_model import TimingPrior

DEFAULT_BLOCK_TOKENS = 16
# Llama-3.1-8B in bf16.
DEFAULT_KV_BYTES_PER_TOKEN = 131_072
DEFAULT_NUM_LAYERS = 32
MAX_MODEL_LEN = 1 << 20
WORKERS_OF_A_ROUTER = 16
# Above all that one worker of the catalogue holds: a pool whose size nobody knows must not become a list of its blocks.
MAX_KV_TOKENS = 1 << 22
DEFAULT_LIMITS = RouterLimits()  # what an operator gets who says nothing


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong. Everything is drawn from the simulation's seed."""

    worker_mtbf_s: float = 0.0  # mean time between two failures of one worker; 0: none fails
    event_loss: float = 0.0  # share of KV events that never arrive

    def __post_init__(self) -> None:
        if not 0.0 <= self.event_loss < 1.0:
            raise ValueError(f"event_loss is {self.event_loss}, must be in [0, 1)")


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """One simulated cluster."""

    model: CapacityModel
    slo: Slo
    num_prefill: int
    num_decode: int
    num_aggregated: int = 0
    placement: str = "cache_aware"
    allows_local_prefill: bool = True  # a decode worker may prefill by itself where that is cheaper
    policy: Policy | None = None  # None: nothing scales
    faults: Faults = field(default_factory=Faults)
    start_delay_s: float = 30.0  # from the decision to a ready worker
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    kv_bytes_per_token: int = DEFAULT_KV_BYTES_PER_TOKEN
    num_layers: int = DEFAULT_NUM_LAYERS
    link_bytes_per_ms: float = 2.5e7  # of each worker, shared by its transfers; 25 GB/s
    fabric_bytes_per_ms: float = 0.0  # that all transfers share beside; 0: each pair has its own way
    round_trip_ms: float = 0.5
    route_ms: float = 1.0  # HTTP, tokenising, hashing, deciding
    max_batch_tokens: int = 8192
    itl_slo_ms: float = DEFAULT_ITL_SLO_MS  # what a worker keeps its steps within beside prompts of its own; 0: nothing
    router_prior: TimingPrior | None = None  # what the router believes at its start; None: the truth
    max_waiting: int = 1024  # of one worker
    # The router's own door: who waits there, who is refused.
    admission_ttft_ms: float = DEFAULT_LIMITS.ttft_slo_ms  # refused above twice that, sheddable above once; 0: never
    max_worker_queue_ms: float = DEFAULT_LIMITS.max_worker_queue_ms
    tenant_limits: Mapping[Tenant, TenantLimit] = field(default_factory=dict)
    request_timeout_s: float = 600.0
    max_leap: int = DEFAULT_MAX_LEAP
    seed: int = 0

    @property
    def name(self) -> str:
        """As reports call it."""
        pools = f"{self.num_prefill}P{self.num_decode}D" if self.num_prefill or self.num_decode else ""
        return "simulated " + pools + (f"{self.num_aggregated}A" if self.num_aggregated else "")

    @property
    def admission(self) -> AdmissionSettings:
        """As many requests as the routers of so many workers take: the one here stands for all of them."""
        num_workers = self.num_prefill + self.num_decode + self.num_aggregated
        num_routers = math.ceil(max(1, num_workers) / WORKERS_OF_A_ROUTER)
        return AdmissionSettings(
            max_requests=DEFAULT_LIMITS.max_concurrent_requests * num_routers,
            max_waiting=DEFAULT_LIMITS.max_waiting_requests * num_routers,
            ttft_slo_ms=self.admission_ttft_ms,
            max_worker_queue_ms=self.max_worker_queue_ms,
        )

    @property
    def shape(self) -> WorkerShape:
        model = self.model
        max_sequences = model.max_batch
        return WorkerShape(
            timing=StepTiming(
                prefill=(model.c0_ms, model.c1_ms, model.c2_ms),
                decode=(model.alpha_ms, model.beta_ms, model.gamma_ms),
            ),
            limits=EngineLimits(
                max_batch_tokens=max(self.max_batch_tokens, max_sequences),
                max_sequences=max_sequences,
                max_waiting=self.max_waiting,
                max_model_len=MAX_MODEL_LEN,
            ),
            num_blocks=max(1, min(model.kv_tokens, MAX_KV_TOKENS) // self.block_tokens),
            block_tokens=self.block_tokens,
            kv_bytes_per_token=self.kv_bytes_per_token,
            num_layers=self.num_layers,
            max_leap=self.max_leap,
            link_bytes_per_ms=self.link_bytes_per_ms,
            itl_slo_ms=self.itl_slo_ms,
        )
