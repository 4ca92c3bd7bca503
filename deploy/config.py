"""One YAML describes a cluster: model, pools, router, Redis. `deploy/clusters/laptop.yaml` is the default.

What a user writes is `ClusterConfig`; what processes read (`WorkerSettings`, `RouterSettings`) is made from it in
`deploy/cluster_plan.py`. Flags of `tandem serve` override single keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.errors import StartupError, shown
from cluster.model_files import DEFAULT_MODEL
from cluster.router_settings import RouterLimits
from cluster.worker_settings import EngineSettings, PoolSettings
from deploy.yaml_settings import YamlSettingsError, load_yaml_settings

DEFAULT_CLUSTER_FILE = Path(__file__).parent / "clusters" / "laptop.yaml"
RAY_CLUSTER_FILE = DEFAULT_CLUSTER_FILE.with_name("ray-laptop.yaml")
MAX_POOL_WORKERS = 1024


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PoolConfig(PoolSettings, Section):
    """Workers of one role."""

    workers: int = Field(default=1, ge=0, le=MAX_POOL_WORKERS, description="processes")


class RouterConfig(RouterLimits, Section):
    """The front that clients talk to."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535, description="HTTP; 0: any free port")
    processes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="that share the ports; metrics, explanations and tenants' limits are those of all",
    )
    grpc_port: int | None = Field(default=0, ge=0, le=65535, description="gRPC; 0: any free port; null: off")
    served_model_name: str = Field(default="", description="empty: from the model's file name")
    api_keys_file: Path | None = Field(default=None, description="needed on an address that others can reach")


class RedisConfig(Section):
    """Where membership lives."""

    url: str = Field(default="", description="empty: a private embedded server")
    password_file: Path | None = Field(default=None, description="mode 0600; for a url without a password")


class RayConfig(Section):
    """How `tandem up --on ray` places workers. Resources are Ray's: CPU, GPU, and names of your own."""

    name: str = Field(
        default="tandem", pattern=r"^[A-Za-z0-9._-]+$", description="of the cluster within the Ray cluster"
    )
    strategy: Literal["pack", "spread"] = Field(default="spread", description="workers near each other, or apart")
    prefill_resources: dict[str, float] = Field(default_factory=dict, description="of each rank of a prefill worker")
    decode_resources: dict[str, float] = Field(default_factory=dict, description="of each rank of a decode worker")
    aggregated_resources: dict[str, float] = Field(
        default_factory=dict, description="of each rank of an aggregated worker"
    )
    secrets_dir: Path | None = Field(
        default=None,
        description="the same path on every node, from `tandem secrets create`: nodes may be several machines; needs "
        "redis.url",
    )


class ClusterConfig(EngineSettings, Section):
    """One cluster."""

    model: str = Field(default=DEFAULT_MODEL, min_length=1, description="a name, a GGUF file, a safetensors directory")
    start_timeout_s: float = Field(default=120.0, gt=0, description="for one process to become ready")
    worker_metrics_port: int = Field(
        default=0, ge=0, le=65_000, description="prefill-N serves /metrics at it + N, decode-N 100 above; 0: off"
    )
    worker_metrics_host: str = Field(
        default="127.0.0.1", description="address of workers' /metrics, which asks whoever reaches it for no key"
    )
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()
    aggregated: PoolConfig = PoolConfig(workers=0)
    router: RouterConfig = RouterConfig()
    redis: RedisConfig = RedisConfig()
    ray: RayConfig = RayConfig()
    autoscale: Path | None = Field(default=None, description="a policy file: the pools follow the traffic by it")

    @model_validator(mode="after")
    def _can_serve(self) -> ClusterConfig:
        if self.decode.workers + self.aggregated.workers == 0:
            raise ValueError("no worker decodes: set decode.workers or aggregated.workers to 1 or more")
        if self.autoscale is not None and not (self.prefill.workers and self.decode.workers):
            raise ValueError("autoscale needs two pools: set prefill.workers and decode.workers to 1 or more")
        if self.prefill.workers and not self.decode.workers:
            raise ValueError("prefill workers need decode workers: set decode.workers, or prefill.workers to 0")
        if self.decode.workers and not self.prefill.workers and self.router.prefill_fallback == "deny":
            raise ValueError("decode workers may not prefill (router.prefill_fallback: deny): set prefill.workers")
        if self.speculation == "draft" and not self.draft_model:
            raise ValueError("speculation draft needs a model that guesses: set draft_model")
        if self.verification == "rejection" and self.speculation != "draft":
            raise ValueError("verification rejection is for guesses that are drawn: set speculation to draft, or match")
        return self


def ray_of_workers(config: ClusterConfig) -> RayConfig:
    """`config.ray` with the resources of whole workers: a worker of N ranks needs N times a rank's, on one node."""
    pools = {"prefill": config.prefill, "decode": config.decode, "aggregated": config.aggregated}
    resources = {
        f"{role}_resources": {
            name: amount * pool.tensor_parallel for name, amount in getattr(config.ray, f"{role}_resources").items()
        }
        for role, pool in pools.items()
    }
    return config.ray.model_copy(update=resources)


def load_cluster_config(path: Path) -> ClusterConfig:
    """The cluster that the file describes. Raises `StartupError`: one line with file, line, key and reason."""
    try:
        return load_yaml_settings(ClusterConfig, path)
    except YamlSettingsError as error:
        more = len(error.problems) - 1
        raise StartupError(f"{error.problems[0]}" + (f" (and {more} more)" if more else "")) from None


def override(
    config: ClusterConfig, values: Mapping[str, Any], variables: Mapping[str, str] | None = None
) -> ClusterConfig:
    """The config with some keys replaced, dotted as in `decode.workers`. Raises `StartupError` naming the key.

    `variables`: of keys whose value came from the environment, the variable, which is named instead.
    """
    merged = config.model_dump()
    for key, value in values.items():
        *sections, name = key.split(".")
        section = merged
        for part in sections:
            section = section[part]
        section[name] = value
    try:
        return ClusterConfig.model_validate(merged)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = str(first["msg"]).removeprefix("Value error, ")
        key = ".".join(map(str, first["loc"]))
        key = (variables or {}).get(key, key)
        raise StartupError(f"{key} is {shown(first['input'])}: {reason}" if key else reason) from None
