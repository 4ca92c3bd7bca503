"""From what a user wrote to the processes of a cluster: settings, command lines, addresses, probes.

Pure but for the two secrets, the Redis configuration and the ports that it finds in the runtime directory, or puts
there: a plan made again in the same directory is the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from cluster.embedded_redis import prepare_embedded_redis
from cluster.errors import StartupError
from cluster.front_tls import FrontTls
from cluster.model_files import served_name
from cluster.process_guard import thread_environment
from cluster.python_modules import python_command
from cluster.router_settings import RouterLimits, RouterSettings
from cluster.rpc_security import RpcSecurity, is_loopback, kept_secret, write_secret
from cluster.settings_flags import settings_to_arguments
from cluster.worker_settings import EngineSettings, PoolSettings, WorkerSettings
from deploy.cluster_secrets import ClusterSecrets
from deploy.config import ClusterConfig, PoolConfig
from deploy.node_addresses import ADDRESS, HOST, MODEL, RUNTIME_DIR, NodeAddresses
from deploy.probes import pools_probe, redis_probe, router_probe, worker_probe
from deploy.process_spec import Probe, ProcessSpec, Stage
from deploy.router_ports import claim_ports

Role = Literal["prefill", "decode", "aggregated"]

REDIS_START_TIMEOUT_S = 10.0
REDIS_STOP_TIMEOUT_S = 5.0
# The router ends its streams by itself when the workers' drain is over.
ROUTER_EXTRA_STOP_S = 5.0
# Of `worker_metrics_port`: a worker's port follows from its name, so a scrape configuration can be written beforehand.
_METRICS_OFFSET: dict[Role, int] = {"prefill": 0, "decode": 100, "aggregated": 200}
METRICS_PORTS_PER_ROLE = 100
_MODULE_BY_ROLE: dict[Role, str] = {
    "prefill": "prefill_worker",
    "decode": "decode_worker",
    "aggregated": "decode_worker",
}


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where membership lives, for clients in the supervisor's process."""

    url: str
    password_file: Path | None


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Everything to start, and where clients will find it."""

    processes: tuple[ProcessSpec, ...]
    make_worker: Callable[[Role, str], ProcessSpec]  # one more of a role, under a name of its own
    redis: RedisAddress
    is_complete: Probe  # the router has found every worker: requests go through both pools from the first one on
    url: str
    grpc_address: str  # empty: off
    model_name: str
    summary: str  # "1 prefill + 1 decode"


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all processes of the cluster are told."""

    config: ClusterConfig
    model: Path
    runtime_dir: Path
    token_file: Path
    redis_url: str
    redis_password_file: Path | None
    security: RpcSecurity
    nodes: NodeAddresses | None = None  # None: all workers are on this machine


def plan_cluster(
    config: ClusterConfig, model: Path, runtime_dir: Path, nodes: NodeAddresses | None = None
) -> ClusterPlan:
    """`nodes`: the workers run on machines of their own, under `ray.secrets_dir`; None: all is on this machine.

    Raises `StartupError` for a busy port, an open address without API keys, and secrets or TLS files that are not as
    they must be.
    """
    require_keys_on_open_address(config)
    tls = FrontTls.of(config.router)
    if tls is not None:
        tls.check()
    shared, redis = (
        _on_one_machine(config, model, runtime_dir) if nodes is None else _on_nodes(config, model, runtime_dir, nodes)
    )
    workers = tuple(_workers(shared))
    settings = _router_settings(shared)
    host = _host_in_url(settings.http_host)
    url = f"{'http' if tls is None else 'https'}://{host}:{settings.http_port}"
    return ClusterPlan(
        processes=(*redis, *workers, *_routers(shared, settings, url)),
        make_worker=lambda role, worker_id: _worker(shared, role, dict(_pools(config))[role], worker_id),
        redis=RedisAddress(shared.redis_url, shared.redis_password_file),
        is_complete=pools_probe(url, {role: pool.workers for role, pool in _pools(config) if pool.workers}),
        url=url,
        grpc_address=f"{host}:{settings.grpc_port}" if settings.grpc_port else "",
        model_name=settings.served_model_name,
        summary=" + ".join(f"{pool.workers} {role}" for role, pool in _pools(config) if pool.workers),
    )


def _on_one_machine(config: ClusterConfig, model: Path, runtime_dir: Path) -> tuple[_Shared, tuple[ProcessSpec, ...]]:
    """Unix sockets, a token of this run, and Redis' process when the server is ours."""
    token_file = runtime_dir / "cluster.token"
    token = kept_secret(token_file, "cluster token")
    redis_url, password_file, redis = _redis(config, runtime_dir)
    return _Shared(config, model, runtime_dir, token_file, redis_url, password_file, RpcSecurity(token)), redis


def _on_nodes(
    config: ClusterConfig, model: Path, runtime_dir: Path, nodes: NodeAddresses
) -> tuple[_Shared, tuple[ProcessSpec, ...]]:
    """Mutual TLS by the secrets that lie on every node, and a Redis that every node reaches."""
    if config.ray.secrets_dir is None:
        raise StartupError("workers on several machines need ray.secrets_dir: `tandem secrets create DIR` makes it")
    if not config.redis.url or urlsplit(config.redis.url).scheme == "unix":
        raise StartupError("workers on several machines need a Redis that all of them reach: set redis.url")
    if urlsplit(config.redis.url).password is not None or config.redis.password_file is not None:
        raise StartupError("with ray.secrets_dir the password of redis.url is that directory's redis.password")
    secrets = ClusterSecrets(config.ray.secrets_dir.expanduser())
    security = secrets.security()
    files = (secrets.token_file, config.redis.url, secrets.redis_password_file)
    return _Shared(config, model, runtime_dir, *files, security, nodes), ()


def role_of(name: str) -> Role | None:
    """Of a worker by its name; None for what is no worker."""
    prefix, _, number = name.rpartition("-")
    return next((role for role in _MODULE_BY_ROLE if role == prefix and number.isdigit()), None)


def require_keys_on_open_address(config: ClusterConfig) -> None:
    if not is_loopback(config.router.host) and config.router.api_keys_file is None:
        raise StartupError(
            f"router.host {config.router.host} can be reached from other machines: set router.api_keys_file "
            "(`tandem key create NAME --file keys.txt` makes one), or use 127.0.0.1"
        )


def _redis(config: ClusterConfig, runtime_dir: Path) -> tuple[str, Path | None, tuple[ProcessSpec, ...]]:
    """URL and password file for the clients, and the process when the server is ours."""
    if config.redis.url:
        return *_without_password(config.redis.url, config.redis.password_file, runtime_dir), ()
    embedded = prepare_embedded_redis(runtime_dir)
    spec = ProcessSpec(
        name="redis",
        stage=Stage.REDIS,
        command=embedded.command,
        probe=redis_probe(embedded.url, embedded.password_file),
        start_timeout_s=REDIS_START_TIMEOUT_S,
        stop_timeout_s=REDIS_STOP_TIMEOUT_S,
    )
    return embedded.url, embedded.password_file, (spec,)


def _without_password(url: str, password_file: Path | None, runtime_dir: Path) -> tuple[str, Path | None]:
    """A password in a URL would show in every process's command line: it moves into a file."""
    parts = urlsplit(url)
    if parts.password is None:
        return url, password_file
    moved = runtime_dir / "redis.password"
    write_secret(moved, parts.password)
    user = f"{parts.username}@" if parts.username else ""
    address = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=user + address)), moved


def _pools(config: ClusterConfig) -> tuple[tuple[Role, PoolConfig], ...]:
    return (("prefill", config.prefill), ("decode", config.decode), ("aggregated", config.aggregated))


def _workers(shared: _Shared) -> Iterator[ProcessSpec]:
    for role, pool in _pools(shared.config):
        for index in range(pool.workers):
            yield _worker(shared, role, pool, f"{role}-{index}")


def _worker(shared: _Shared, role: Role, pool: PoolConfig, worker_id: str) -> ProcessSpec:
    config = shared.config
    place, probe = _place(shared, worker_id)
    settings = WorkerSettings(
        **config.model_dump(include=set(EngineSettings.model_fields)),
        **pool.model_dump(include=set(PoolSettings.model_fields)),
        **place,
        **_tls(shared),
        worker_id=worker_id,
        role=role,
        served_model_name=config.router.served_model_name or served_name(shared.model),
        redis_url=shared.redis_url,
        redis_password_file=shared.redis_password_file,
        cluster_token_file=shared.token_file,
        metrics_port=_metrics_port(config, role, worker_id),
        metrics_host=config.worker_metrics_host,
    )
    return ProcessSpec(
        name=worker_id,
        stage=Stage.WORKER,
        command=python_command(_MODULE_BY_ROLE[role], *settings_to_arguments(settings)),
        probe=probe,
        environment=thread_environment(pool.num_threads),
        start_timeout_s=config.start_timeout_s,
        stop_timeout_s=config.drain_timeout_s + ROUTER_EXTRA_STOP_S,
        needed_as="" if role == "prefill" else "decode",
    )


def _place(shared: _Shared, worker_id: str) -> tuple[dict[str, Any], Probe]:
    """Where the worker listens and keeps its files, and how it is asked: known now, or filled in by its node."""
    nodes = shared.nodes
    if nodes is not None:
        place = {"listen": ADDRESS, "kv_host": HOST, "runtime_dir": Path(RUNTIME_DIR), "model": MODEL}
        return place, worker_probe(lambda: nodes.target(worker_id), shared.security)
    target = f"unix:{shared.runtime_dir / worker_id}.sock"
    place = {"listen": target, "runtime_dir": shared.runtime_dir, "model": str(shared.model)}
    return place, worker_probe(lambda: target, shared.security)


def _tls(shared: _Shared) -> dict[str, Any]:
    tls = shared.security.tls
    if tls is None:
        return {}
    return {
        "tls_authority_file": tls.authority,
        "tls_certificate_file": tls.certificate,
        "tls_key_file": tls.key,
        "tls_server_name": tls.server_name,
    }


def _metrics_port(config: ClusterConfig, role: Role, worker_id: str) -> int:
    """0 where metrics are off. Names beyond the role's ports begin again: those workers are long gone."""
    if not config.worker_metrics_port:
        return 0
    number = int(worker_id.rpartition("-")[2]) % METRICS_PORTS_PER_ROLE
    return config.worker_metrics_port + _METRICS_OFFSET[role] + number


def _router_settings(shared: _Shared) -> RouterSettings:
    config, router = shared.config, shared.config.router
    ports = claim_ports(router, shared.runtime_dir)
    # Mock workers say what they will take; a real one is measured from its first request on.
    priors: dict[str, Any] = {}
    if config.engine == "mock":
        priors = {"prefill_prior_ms": config.mock_prefill_ms, "decode_prior_ms": config.mock_decode_ms}
    return RouterSettings(
        **priors,
        **router.model_dump(include=set(RouterLimits.model_fields)),
        **_tls(shared),
        model=str(shared.model),
        served_model_name=router.served_model_name or served_name(shared.model),
        http_host=router.host,
        http_port=ports.http,
        grpc_port=ports.grpc,
        runtime_dir=shared.runtime_dir,
        redis_url=shared.redis_url,
        redis_password_file=shared.redis_password_file,
        cluster_token_file=shared.token_file,
        api_keys_file=router.api_keys_file,
        block_tokens=config.block_tokens,
        max_model_len=config.max_model_len,
        seed=config.seed,
    )


def _routers(shared: _Shared, settings: RouterSettings, url: str) -> Iterator[ProcessSpec]:
    """One or several on the same ports: the kernel gives each of them its share of the connections."""
    num_routers = shared.config.router.processes
    for index in range(num_routers):
        own = settings.model_copy(update={"router_id": f"router-{index}", "shares_port": num_routers > 1})
        yield _router(shared, own, url)


def _router(shared: _Shared, settings: RouterSettings, url: str) -> ProcessSpec:
    return ProcessSpec(
        name=settings.router_id,
        stage=Stage.ROUTER,
        command=python_command("router", *settings_to_arguments(settings)),
        probe=router_probe(url),
        start_timeout_s=shared.config.start_timeout_s,
        stop_timeout_s=shared.config.drain_timeout_s + ROUTER_EXTRA_STOP_S,
        needed_as="router",
    )


def _host_in_url(host: str) -> str:
    """Where a client on this machine finds a server on `host`."""
    if host in ("0.0.0.0", "::"):  # noqa: S104  compared, not bound
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
