"""What a simulation is of: the models, the workers, the objective, the scaling and the faults."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.run_summary import Slo
from benchmarks.simulator.simulated_engine import DEFAULT_MAX_LEAP
from benchmarks.simulator.simulated_worker import WorkerShape
from deploy.autoscaler.capacity import CapacityModel
from deploy.autoscaler.policy import Policy
from engine.mock_engine import StepTiming
from engine.request import EngineLimits

DEFAULT_BLOCK_TOKENS = 16
# Llama-3.1-8B in bf16.
DEFAULT_KV_BYTES_PER_TOKEN = 131_072
DEFAULT_NUM_LAYERS = 32
MAX_MODEL_LEN = 1 << 20


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
    link_bytes_per_ms: float = 2.5e7  # 25 GB/s
    round_trip_ms: float = 0.5
    route_ms: float = 1.0  # HTTP, tokenising, hashing, deciding
    max_batch_tokens: int = 8192
    max_waiting: int = 1024  # of one worker
    refuse_above_slo: float = 0.0  # predicted TTFT over the objective from which a request is refused; 0: never
    max_leap: int = DEFAULT_MAX_LEAP
    seed: int = 0

    @property
    def name(self) -> str:
        """As reports call it."""
        pools = f"{self.num_prefill}P{self.num_decode}D" if self.num_prefill or self.num_decode else ""
        return "simulated " + pools + (f"{self.num_aggregated}A" if self.num_aggregated else "")

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
            num_blocks=max(1, model.kv_tokens // self.block_tokens),
            block_tokens=self.block_tokens,
            kv_bytes_per_token=self.kv_bytes_per_token,
            num_layers=self.num_layers,
            max_leap=self.max_leap,
        )
