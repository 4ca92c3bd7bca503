"""What one worker process is told at start: the same fields as flags of `python -m prefill_worker` and `decode_worker`.

The supervisor and the Ray launcher build this value and turn it into flags; secrets never stand in it: the cluster
token and the Redis password come from files with mode 0600 whose paths are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.process_settings import ProcessSettings
from cluster.settings_flags import parse_settings

# A model of 8 billion parameters on one data-centre GPU, about: what a mock worker is taken for.
DEFAULT_MOCK_PREFILL_MS = (8.0, 0.1, 1e-6)
DEFAULT_MOCK_DECODE_MS = (12.0, 0.15, 1e-5)
# About ten tokens a second: a stream that people read along with.
DEFAULT_ITL_SLO_MS = 100.0
# A third of a decode worker's weight where they meet on a core: prompts go on, and streams hardly notice.
PREFILL_NICE = 5


class EngineSettings(BaseModel):
    """What an operator decides for all workers of a cluster: the same in its file and on a worker's command."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: Literal["real", "mock"] = Field(
        default="real", description="mock: no model runs, time comes from a timing model; all else is real"
    )
    mock_prefill_ms: tuple[float, float, float] = Field(
        default=DEFAULT_MOCK_PREFILL_MS,
        description="c0, c1, c2 of c0 + c1 u + c2 u (c + u/2): u uncached, c cached tokens",
    )
    mock_decode_ms: tuple[float, float, float] = Field(
        default=DEFAULT_MOCK_DECODE_MS,
        description="alpha, beta, gamma of alpha + beta B + gamma K: B sequences, K tokens",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    backend: Literal["auto", "torch", "native", "triton"] = "auto"
    quantization: Literal["none", "int8", "int4", "fp8", "file"] = Field(
        default="none", description="weights: `file` keeps the file's own 4-bit or 8-bit blocks; fp8 needs a GPU"
    )
    kv_dtype: Literal["auto", "fp8"] = Field(
        default="auto", description="auto: as the model computes; fp8: e4m3 with a scale for each token and head"
    )
    weight_compression: Literal["auto", "off"] = Field(
        default="auto",
        description="bfloat16 weights in 12 bits without loss, where the CPU decodes them on the way; prefill: never",
    )
    native_isa: str = Field(
        default="", description="instruction set of the native kernels, one of `usable_isas`; empty: this CPU's best"
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        default="auto", description="auto: where there is a GPU, decode steps of backend triton replay captured graphs"
    )
    speculation: Literal["off", "auto", "ngram", "suffix", "draft", "medusa", "eagle", "mtp"] = Field(
        default="off", description="the drafter of decode workers; `auto` guesses only where it pays"
    )
    draft_model: str = Field(default="", description="the model that guesses, for speculation `draft`")
    num_drafts: int = Field(default=8, ge=1, le=15, description="guesses in one step of one sequence, at most")
    verification: Literal["match", "rejection"] = Field(
        default="match",
        description="`match`: tokens equal those without speculation; `rejection`: in law, for speculation `draft`",
    )
    transports: tuple[str, ...] = Field(
        default=("shm", "tcp"),
        min_length=1,
        description="how KV travels, in order of preference, or `auto`: the fastest that is measured",
    )
    min_bandwidth: float = Field(
        default=0.0, ge=0, description="bytes/s: a KV link that measures less is refused; 0: any is taken"
    )
    layer_push: bool = Field(
        default=True, description="KV leaves while later layers are computed; false: once a chunk is computed"
    )
    block_tokens: int = Field(default=16, ge=1, le=256, description="tokens of one KV block")
    max_model_len: int = Field(default=0, ge=0, description="0: the model's own")
    seed: int = 0
    heartbeat_s: float = Field(default=1.0, gt=0, le=10)
    drain_timeout_s: float = Field(default=60.0, gt=0, description="for running requests to end at a stop")
    link_bytes_per_s: int = Field(default=0, ge=0, description="throttles KV transfers, for tests; 0: off")


class PoolSettings(BaseModel):
    """What an operator decides for each pool: the same in the cluster's file and on a worker's command."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_threads: int = Field(default=1, ge=1, description="compute threads of each process")
    tensor_parallel: int = Field(
        default=1, ge=1, le=64, description="processes that share one worker's model, each a part of its heads"
    )
    nice: int | None = Field(
        default=None,
        ge=0,
        le=19,
        description="steps by which each process gives way to others on its machine; by default 5 for prefill, else 0",
    )
    max_batch_tokens: int = Field(default=512, ge=1, description="token budget of one engine step")
    itl_slo_ms: float = Field(
        default=DEFAULT_ITL_SLO_MS,
        ge=0,
        description="prompts computed where streams run take only as much of a step as keeps it within this; 0: all",
    )
    max_sequences: int = Field(default=64, ge=1, description="sequences in one engine step")
    max_waiting: int = Field(default=256, ge=1, description="bound of the waiting queue")
    kv_cache_bytes: int = Field(default=0, ge=0, description="0: a share of free memory, at most 1 GiB")
    num_kv_blocks: int = Field(default=0, ge=0, description="0: from kv_cache_bytes")
    kv_host_tier_bytes: int = Field(
        default=0, ge=0, description="host memory of each for KV blocks that its pool evicts; 0: none"
    )
    kv_disk_tier: str = Field(
        default="",
        description="a folder for KV blocks that pools evict, which workers share and which outlives them; empty: none",
    )
    kv_disk_tier_bytes: int = Field(
        default=10 * 2**30, ge=0, description="of the folder's files at most, whoever wrote them"
    )


class WorkerSettings(EngineSettings, PoolSettings, ProcessSettings):
    """Frozen settings of one worker process. Each field is one flag."""

    worker_id: str = Field(description="stable name of this worker")
    role: Literal["prefill", "decode", "aggregated"] = "decode"
    model: str = Field(description="path of a GGUF file or safetensors directory")
    served_model_name: str = ""
    listen: str = Field(description="gRPC target: unix:/path or 127.0.0.1:port (port 0: any)")
    kv_host: str = Field(
        default="127.0.0.1", description="address that KV frames arrive at; off the machine they are not encrypted"
    )
    swap_bytes: int = Field(
        default=256 * 2**20, ge=0, description="host memory for the KV of preempted requests, at most; 0: they restart"
    )
    metrics_port: int = Field(default=0, ge=0, le=65535, description="Prometheus' /metrics; 0: none")
    metrics_host: str = Field(
        default="127.0.0.1", description="address of /metrics, which asks whoever reaches it for no key"
    )
    parent_pid: int = Field(default=0, description="exit when this process is gone; 0: never")

    @property
    def steps_of_nice(self) -> int:
        """What `nice` means for this role: prompts give way to streams."""
        if self.nice is not None:
            return self.nice
        return PREFILL_NICE if self.role == "prefill" else 0


def parse_arguments(program: str, arguments: Sequence[str]) -> WorkerSettings:
    """The settings of `python -m prefill_worker` or `decode_worker`. Raises `StartupError` for a wrong flag."""
    return parse_settings(WorkerSettings, program, arguments)
