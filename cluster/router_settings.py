"""What the router process is told at start: the same fields as flags of `python -m router`.

Secrets never stand here: cluster token, Redis password and the digests of API keys come from files with mode 0600.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.process_settings import ProcessSettings
from cluster.settings_flags import parse_settings

# SmolLM2-135M in bfloat16 on one AVX-512 core, as `benchmarks.engine` measures it.
DEFAULT_PREFILL_PRIOR_MS = (2.0, 1.13, 3.2e-4)
DEFAULT_DECODE_PRIOR_MS = (9.0, 0.85, 1.8e-3)


class RouterLimits(BaseModel):
    """What an operator decides about the front: the same in a cluster's file and on a router's command."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    default_max_tokens: int = Field(default=0, ge=0, description="for requests without max_tokens; 0: what fits")
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024, le=64 * 2**20)
    max_concurrent_requests: int = Field(default=1024, ge=1, description="beyond it: 503 with Retry-After")
    max_waiting_requests: int = Field(default=512, ge=1, description="of them, waiting for a worker; beyond it: 503")
    ttft_slo_ms: float = Field(
        default=10_000,
        ge=0,
        description="beyond twice this wait requests are refused (sheddable: once); 0: never",
    )
    max_worker_queue_ms: float = Field(
        default=1000, gt=0, description="prefill booked on a worker before requests wait in the router, in fair order"
    )
    tenant_requests_per_s: float = Field(default=0, ge=0, description="of each API key whose line says nothing; 0: any")
    tenant_tokens_per_s: float = Field(default=0, ge=0, description="of each API key whose line says nothing; 0: any")
    tenant_max_concurrent: int = Field(
        default=0, ge=0, description="of each API key whose line says nothing; 0: three quarters of all, if not alone"
    )
    request_timeout_s: float = Field(default=600.0, gt=0, le=600, description="deadline of a request that names none")
    prefill_fallback: Literal["allow", "deny"] = Field(
        default="allow", description="may a decode worker prefill by itself when no prefill worker is ready"
    )
    model_aliases: tuple[str, ...] = Field(default=(), description="other names that requests may ask for the model by")
    chat_template_file: Path | None = Field(default=None, description="a jinja file; without: the model's own template")
    sampling_defaults: Literal["openai", "model"] = Field(
        default="openai",
        description="of requests that leave them out; model: temperature, top_p, top_k, min_p, repetition_penalty of "
        "the checkpoint's generation_config.json",
    )
    allowed_origins: tuple[str, ...] = Field(
        default=(), description="web sites whose pages may ask (CORS); `*`: any, where API keys are needed"
    )
    ssl_certfile: Path | None = Field(
        default=None, description="TLS of both fronts: PEM with the certificate and what leads to its authority"
    )
    ssl_keyfile: Path | None = Field(default=None, description="PEM; the certificate's key, without a password")
    ssl_ca_certs: Path | None = Field(
        default=None, description="PEM; clients need a certificate that one of these authorities signed"
    )
    log_requests: bool = Field(default=False, description="a log line for each request; failed ones have one anyhow")
    policy: Literal["cache_aware", "least_loaded", "power_of_two", "round_robin", "session"] = Field(
        default="cache_aware", description="how prefill and decode workers are chosen"
    )


class RouterSettings(RouterLimits, ProcessSettings):
    """Frozen settings of one router process. Each field is one flag."""

    router_id: str = "router-0"
    model: str = Field(description="path of a GGUF file or safetensors directory: tokenizer and chat template only")
    served_model_name: str = Field(default="", description="the name clients ask for; empty: from the model's path")
    http_host: str = "127.0.0.1"
    http_port: int = Field(default=8000, ge=1, le=65535)
    grpc_port: int = Field(default=0, ge=0, le=65535, description="public gRPC front; 0: off")
    shares_port: bool = Field(default=False, description="other routers listen on the same ports: SO_REUSEPORT")
    api_keys_file: Path | None = Field(default=None, description="API keys, a line each: name and SHA-256")
    block_tokens: int = Field(default=16, ge=1, le=256)
    max_model_len: int = Field(default=0, ge=0, description="0: the model's own")
    prefill_prior_ms: tuple[float, float, float] = Field(
        default=DEFAULT_PREFILL_PRIOR_MS, description="c0, c1, c2 of c0 + c1 u + c2 u (c + u/2), until measured"
    )
    decode_prior_ms: tuple[float, float, float] = Field(
        default=DEFAULT_DECODE_PRIOR_MS,
        description="alpha, beta, gamma of alpha + beta B + gamma K, until measured",
    )
    max_choices: int = Field(default=8, ge=1, le=128, description="bound of a request's n")
    grpc_reflection: bool = Field(default=False, description="let gRPC clients ask for the service's description")
    seed: int = Field(default=0, description="base of the seeds of requests that name none")
    parent_pid: int = Field(default=0, description="exit when this process is gone; 0: never")


def parse_arguments(arguments: Sequence[str]) -> RouterSettings:
    """The settings of `python -m router`. Raises `StartupError` for a wrong flag."""
    return parse_settings(RouterSettings, "router", arguments)
