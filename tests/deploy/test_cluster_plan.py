"""From a config to processes: settings that parse back, secrets that show nowhere, ports, open addresses."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from cluster import router_settings, worker_settings
from cluster.errors import StartupError
from cluster.rpc_security import read_secret
from deploy.cluster_plan import plan_cluster, role_of
from deploy.cluster_secrets import create_secrets
from deploy.config import ClusterConfig, PoolConfig, RayConfig, RedisConfig, RouterConfig
from deploy.node_addresses import NodeAddresses, command_on_node
from deploy.process_spec import ProcessSpec
from deploy.router_ports import claim_port

MODEL = Path("/models/SmolLM2-135M-Instruct.Q4_1.gguf")
ANY_PORT = RouterConfig(port=0)


def by_name(specs: tuple[ProcessSpec, ...], name: str) -> ProcessSpec:
    return next(spec for spec in specs if spec.name == name)


def flags(spec: ProcessSpec) -> list[str]:
    return list(spec.command[4:])


def test_every_worker_gets_its_own_name_role_and_socket(runtime_dir: Path) -> None:
    config = ClusterConfig(prefill=PoolConfig(workers=2), decode=PoolConfig(workers=1, num_threads=3), router=ANY_PORT)
    plan = plan_cluster(config, MODEL, runtime_dir)
    assert [spec.name for spec in plan.processes] == ["redis", "prefill-0", "prefill-1", "decode-0", "router-0"]
    decode = by_name(plan.processes, "decode-0")
    settings = worker_settings.parse_arguments("decode_worker", flags(decode))
    assert (settings.role, settings.num_threads, settings.listen) == ("decode", 3, f"unix:{runtime_dir}/decode-0.sock")
    assert decode.command[1:4] == ("-P", "-m", "decode_worker")
    assert decode.environment["OMP_NUM_THREADS"] == "3"
    assert plan.summary == "2 prefill + 1 decode"


def test_router_and_workers_share_model_name_redis_and_token(runtime_dir: Path) -> None:
    plan = plan_cluster(ClusterConfig(router=ANY_PORT), MODEL, runtime_dir)
    router = router_settings.parse_arguments(flags(by_name(plan.processes, "router-0")))
    worker = worker_settings.parse_arguments("p", flags(by_name(plan.processes, "prefill-0")))
    assert router.served_model_name == worker.served_model_name == plan.model_name == "SmolLM2-135M-Instruct"
    assert (router.redis_url, router.cluster_token_file) == (worker.redis_url, worker.cluster_token_file)
    assert plan.url == f"http://127.0.0.1:{router.http_port}"
    assert plan.grpc_address == f"127.0.0.1:{router.grpc_port}"


def test_no_secret_stands_in_a_command_line(runtime_dir: Path) -> None:
    redis = RedisConfig(url="redis://user:s3cret@127.0.0.1:6379/2")
    plan = plan_cluster(ClusterConfig(router=ANY_PORT, redis=redis), MODEL, runtime_dir)
    words = " ".join(word for spec in plan.processes for word in spec.command)
    assert "s3cret" not in words
    assert read_secret(runtime_dir / "cluster.token", "token") not in words
    settings = router_settings.parse_arguments(flags(plan.processes[-1]))
    assert settings.redis_url == "redis://user@127.0.0.1:6379/2"
    assert settings.redis_password_file is not None
    assert read_secret(settings.redis_password_file, "password") == "s3cret"
    assert "redis" not in [spec.name for spec in plan.processes]


def test_several_routers_share_the_ports_under_names_of_their_own(runtime_dir: Path) -> None:
    plan = plan_cluster(ClusterConfig(router=RouterConfig(port=0, processes=3)), MODEL, runtime_dir)
    routers = [
        router_settings.parse_arguments(flags(spec)) for spec in plan.processes if spec.name.startswith("router")
    ]
    assert [one.router_id for one in routers] == ["router-0", "router-1", "router-2"]
    assert len({(one.http_port, one.grpc_port, one.shares_port) for one in routers}) == 1
    assert routers[0].shares_port
    alone = plan_cluster(ClusterConfig(router=ANY_PORT), MODEL, runtime_dir).processes[-1]
    assert not router_settings.parse_arguments(flags(alone)).shares_port


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_on_several_machines_a_worker_takes_address_model_and_directory_from_its_node(runtime_dir: Path) -> None:
    secrets = create_secrets(runtime_dir / "secrets")
    redis, ray = RedisConfig(url="redis://10.0.0.9:6379/0"), RayConfig(secrets_dir=secrets.directory)
    plan = plan_cluster(ClusterConfig(router=ANY_PORT, redis=redis, ray=ray), MODEL, runtime_dir, NodeAddresses())
    assert "redis" not in [spec.name for spec in plan.processes]
    command = command_on_node(
        by_name(plan.processes, "decode-0").command, "10.0.0.2:7001", Path("/run/c-1"), Path("/other/m.gguf")
    )
    worker = worker_settings.parse_arguments("decode_worker", command[4:])
    assert (worker.listen, worker.kv_host, worker.model) == ("10.0.0.2:7001", "10.0.0.2", "/other/m.gguf")
    assert worker.runtime_dir == Path("/run/c-1")
    router = router_settings.parse_arguments(flags(by_name(plan.processes, "router-0")))
    for settings in (worker, router):
        assert settings.cluster_token_file == secrets.token_file
        assert settings.redis_password_file == secrets.redis_password_file
        assert (settings.tls_key_file, settings.tls_server_name) == (secrets.tls.key, "tandem-cluster")
    words = " ".join(word for spec in plan.processes for word in spec.command)
    assert secrets.token_file.read_text().strip() not in words


@pytest.mark.parametrize(
    ("redis", "secrets_dir", "reason"),
    [
        (RedisConfig(url="redis://10.0.0.9:6379/0"), None, "tandem secrets create"),
        (RedisConfig(), Path("/none"), "set redis.url"),
        (RedisConfig(url="unix:///run/redis.sock"), Path("/none"), "set redis.url"),
        (RedisConfig(url="redis://u:s3cret@10.0.0.9:6379/0"), Path("/none"), "redis.password"),
        (RedisConfig(url="redis://10.0.0.9:6379/0"), Path("/none"), "no /none/cluster.token"),
    ],
)
def test_several_machines_without_what_they_need_are_refused(
    runtime_dir: Path, redis: RedisConfig, secrets_dir: Path | None, reason: str
) -> None:
    config = ClusterConfig(router=ANY_PORT, redis=redis, ray=RayConfig(secrets_dir=secrets_dir))
    with pytest.raises(StartupError, match=reason):
        plan_cluster(config, MODEL, runtime_dir, NodeAddresses())


def test_a_plan_made_again_in_the_same_directory_is_the_same(runtime_dir: Path) -> None:
    """Its ports are taken by then: by the very router that is taken over."""
    first = plan_cluster(ClusterConfig(router=ANY_PORT), MODEL, runtime_dir)
    token = read_secret(runtime_dir / "cluster.token", "token")
    port = int(first.url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        again = plan_cluster(ClusterConfig(router=ANY_PORT), MODEL, runtime_dir)
    assert [spec.command for spec in again.processes] == [spec.command for spec in first.processes]
    assert (again.url, again.grpc_address) == (first.url, first.grpc_address)
    assert read_secret(runtime_dir / "cluster.token", "token") == token


@pytest.mark.parametrize(
    ("name", "role"), [("prefill-0", "prefill"), ("decode-12", "decode"), ("redis", None), ("router-0", None)]
)
def test_a_workers_name_says_its_role(name: str, role: str | None) -> None:
    assert role_of(name) == role


def test_grpc_can_be_off(runtime_dir: Path) -> None:
    plan = plan_cluster(ClusterConfig(router=RouterConfig(port=0, grpc_port=None)), MODEL, runtime_dir)
    assert plan.grpc_address == ""
    assert router_settings.parse_arguments(flags(plan.processes[-1])).grpc_port == 0


def test_busy_port_says_which_and_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}.*--port"):
            claim_port("127.0.0.1", port, "port")


def test_open_address_without_keys_is_refused_with_the_command_that_makes_one(runtime_dir: Path) -> None:
    config = ClusterConfig(router=RouterConfig(host="0.0.0.0", port=0))  # noqa: S104  it is refused
    with pytest.raises(StartupError, match="tandem key create"):
        plan_cluster(config, MODEL, runtime_dir)
