"""`tandem up` on a Ray of several raylets: placed apart, a killed raylet loses nothing, `down` leaves nothing.

The raylets have addresses of their own (127.0.0.2, 127.0.0.3): with `ray.secrets_dir` they stand for machines.

One Ray cluster for the module: it takes half a minute to start on two cores. Mock workers: the tokens are known.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from tandem.v1 import inference_pb2

from cluster.embedded_redis import prepare_embedded_redis
from cluster.free_port import free_port
from deploy.cluster_secrets import create_secrets
from tests.integration.conftest import REPOSITORY, tandem_command, tandem_environment
from tests.integration.grpc_client import generate_tokens
from tests.integration.mock_tokens import VOCAB_SIZE, expected_tokens

pytestmark = [pytest.mark.model, pytest.mark.cluster, pytest.mark.timeout(900)]

TIMEOUT_S = 120.0
START_TIMEOUT_S = 300
# `TANDEM_RAY_SOAK=full`: streams of a minute while the pools shrink, and the death of Ray's head. Four minutes more.
IS_SOAK = os.environ.get("TANDEM_RAY_SOAK") == "full"
STREAM_TOKENS = 4800 if IS_SOAK else 600
STORE_BYTES = 80 * 2**20
POLICY = "version: 1\nname: ray\ntick_s: 1.0\nprefill: {{min: {0}, max: 2}}\ndecode: {{min: {0}, max: 2}}\n" + (
    "scale_down: {{window_s: 3.0, cooldown_s: 1.0, after_up_s: 1.0}}\n"
)

# Starts a head and two more raylets, and ends them all when its input closes. Ray gives each of them 30 s to start, by
# constants; a busy machine may need more.
RAYLETS = """
import json, os, sys, time
from ray._private import services
from ray.cluster_utils import Cluster
store, ask_once = int(sys.argv[1]), services.get_node
def ask_until_it_is_there(*arguments):
    while True:
        try:
            return ask_once(*arguments)
        except RuntimeError:
            time.sleep(0.1)
services.get_node = ask_until_it_is_there
Cluster._wait_for_node.__defaults__ = (600,)
shared = {"include_dashboard": False, "object_store_memory": store}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **shared})
more = {"num_cpus": 1, "resources": {"slot": 4}, "object_store_memory": store}
nodes = [cluster.add_node(node_ip_address=address, **more) for address in ("127.0.0.2", "127.0.0.3")]
pids = [node.all_processes["raylet"][0].process.pid for node in nodes]
print(json.dumps({"address": cluster.address, "raylets": pids, "session": cluster.head_node.get_session_dir_path()}))
sys.stdout.flush()
sys.stdin.read()
cluster.shutdown()
"""


@dataclass
class RayCluster:
    """The raylets, and what a command needs to reach them."""

    address: str
    raylets: list[int]
    session: Path
    folder: Path
    environment: dict[str, str]

    def tandem(self, *arguments: str) -> str:
        ended = subprocess.run(
            tandem_command(*arguments), env=self.environment, cwd=REPOSITORY,
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return ended.stdout


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    folder = Path(tempfile.mkdtemp(prefix="tandem-ray-"))
    token = folder / "ray.token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    environment = {
        **tandem_environment(),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(folder),
        "TANDEM_RUNTIME_DIR": str(folder / "run"),
    }
    with (
        (folder / "raylets.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-c", RAYLETS, str(STORE_BYTES)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        given_up = threading.Timer(START_TIMEOUT_S, process.kill)  # its output ends then, and the line below with it
        given_up.start()
        line = next((line for line in process.stdout if line.startswith("{")), "")
        given_up.cancel()
        assert line, (folder / "raylets.log").read_text()[-2000:]
        told = json.loads(line)
        yield RayCluster(told["address"], told["raylets"], Path(told["session"]), folder, environment)
    shutil.rmtree(folder)


def test_nodes_with_addresses_of_their_own_serve_under_tls_and_a_dead_controller_cuts_no_stream(
    ray_cluster: RayCluster, default_model_path: Path, redis: str
) -> None:
    config = ray_cluster.folder / "nodes.yaml"
    secrets = ray_cluster.folder / "secrets"
    config.write_text(_nodes_file(default_model_path, secrets, redis, free_port()))
    printed = ray_cluster.tandem("up", str(config), "--address", ray_cluster.address)
    try:
        grpc_address = re.findall(r"(127\.0\.0\.1:\d+) \(gRPC\)", printed)[0]
        url = re.findall(r"http://\S+", printed)[0]
        last = _check_stream(grpc_address, 0, 20)
        assert (last.timeline.transport, last.timeline.kv_bytes > 0) == ("tcp", True)
        listening = _hosts(ray_cluster.folder / "run")
        assert {host for hosts in listening.values() for host in hosts} == {"127.0.0.2", "127.0.0.3"}
        assert all(len(hosts) == 1 for hosts in listening.values()), "control and KV, on the node's address alone"
        assert _asked_nodes(ray_cluster) == [{"slot": 1.0}, {"slot": 1.0}]
        _a_dead_controller_cuts_no_stream(ray_cluster, grpc_address)
        _the_next_controller_took_over_and_heals(ray_cluster, url)
        _no_secret_lies_in_ray(ray_cluster, [secrets / "cluster.token", secrets / "redis.password"])
    finally:
        processes = _of_the_cluster(ray_cluster.folder / "run")
        _kill_for_good(ray_cluster, "nodes")
        ray_cluster.tandem("down", "--name", "nodes", "--address", ray_cluster.address)
    _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_S)
    assert [process.cmdline() for process in alive] == [], "nor without a controller"
    assert [path.name for path in (ray_cluster.folder / "run").iterdir()] == [".lock"]


def test_f01_f03_rt47_up_survives_a_killed_raylet_scales_down_and_leaves_nothing(
    ray_cluster: RayCluster, default_model_path: Path
) -> None:
    shared_memory = _our_shared_memory()
    policy = ray_cluster.folder / "policy.yaml"
    policy.write_text(POLICY.format(2))
    config = ray_cluster.folder / "cluster.yaml"
    config.write_text(_cluster_file(default_model_path, policy))
    printed = ray_cluster.tandem("up", str(config), "--on", "ray", "--address", ray_cluster.address)
    try:
        grpc_address = re.findall(r"(127\.0\.0\.1:\d+) \(gRPC\)", printed)[0]
        url = re.findall(r"http://\S+", printed)[0]
        assert "2 prefill + 2 decode" in printed
        hosted = [_workers_under(raylet) for raylet in ray_cluster.raylets]
        assert sorted(name for names in hosted for name in names) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
        assert all(len(names) == 2 for names in hosted), "spread"
        _a_killed_raylet_loses_no_stream(ray_cluster, grpc_address, hosted)
        _two_of_each_again(ray_cluster, url)
        _a_scale_down_hurts_no_stream(ray_cluster, grpc_address, policy)
        (run,) = (path for path in (ray_cluster.folder / "run").iterdir() if path.name.startswith("c-"))
        _no_secret_lies_in_ray(ray_cluster, [run / "cluster.token", run / "redis.password"])
    finally:
        processes = _of_the_cluster(ray_cluster.folder / "run")
        assert processes
        ray_cluster.tandem("down", "--address", ray_cluster.address)
    _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_S)
    assert [process.cmdline() for process in alive] == []
    assert [path.name for path in (ray_cluster.folder / "run").iterdir()] == [".lock"]
    assert _our_shared_memory() == shared_memory


def test_s_b13_without_the_token_no_port_of_ray_takes_a_job_and_no_driver_gets_in(ray_cluster: RayCluster) -> None:
    """The API of jobs runs any code for whoever may call it: here none is served, on whatever port."""
    ports = _rays_ports(ray_cluster.session)
    assert len(ports) >= 3
    calls = [
        (address, method, path)
        for address in ports
        for method, path in (("POST", "/api/jobs/"), ("DELETE", "/api/jobs/raysubmit_1"))
    ]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda call: _http_status(*call), calls))
    served = [call for call, status in zip(calls, answers, strict=True) if status not in (0, 401, 403, 404, 405)]
    assert served == []
    wrong = ray_cluster.folder / "wrong.token"
    wrong.write_text("f" * 64)
    wrong.chmod(0o600)
    program = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False); print('in')"
    bare = {name: value for name, value in ray_cluster.environment.items() if not name.startswith("RAY_AUTH")}
    drivers = [
        subprocess.Popen(
            [sys.executable, "-c", program, ray_cluster.address], env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for environment in (
            {**bare, "RAY_AUTH_MODE": "disabled"},
            {**bare, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(wrong)},
        )
    ]  # fmt: skip
    for driver in drivers:
        said, _ = driver.communicate(timeout=TIMEOUT_S)
        assert driver.returncode != 0, said
        assert "uthenticat" in said, said


@pytest.mark.skipif(not IS_SOAK, reason="TANDEM_RAY_SOAK=full")
def test_rays_head_takes_the_cluster_with_it_and_up_starts_anew(default_model_path: Path) -> None:
    """Without its head no actor has an owner: Ray ends them all, and so do their children. Nothing serves by halves."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-ray-"))
    environment = {**tandem_environment(), "TANDEM_RUNTIME_DIR": str(folder)}
    own = RayCluster("", [], folder, folder, environment)
    config = folder / "cluster.yaml"
    config.write_text(f"model: {default_model_path}\nengine: mock\nrouter: {{port: 0}}\ndrain_timeout_s: 1\n")
    try:
        own.tandem("up", str(config))
        processes = [one for one in _of_the_cluster(folder) if one.pid != os.getpid()]
        head = psutil.Process(json.loads((folder / "ray-head.json").read_text())["pid"])
        next(one for one in head.children(recursive=True) if "gcs_server" in one.name()).kill()
        _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_S)
        assert [process.cmdline() for process in alive] == []
        with pytest.raises(AssertionError, match="has ended, and everything on it: `tandem up` starts it anew"):
            own.tandem("status", "--on", "ray")
        printed = own.tandem("up", str(config))
        assert _answers(re.findall(r"(127\.0\.0\.1:\d+) \(gRPC\)", printed)[0])
    finally:
        own.tandem("down")
    assert [path.name for path in folder.iterdir() if path.name.startswith("c-")] == []
    shutil.rmtree(folder)


def _cluster_file(model: Path, policy: Path) -> str:
    slots = "{slot: 1}"
    return (
        f"model: {model}\nengine: mock\nprefill: {{workers: 2}}\ndecode: {{workers: 2}}\nrouter: {{port: 0}}\n"
        f"drain_timeout_s: 1\nautoscale: {policy}\n"
        f"ray: {{strategy: spread, prefill_resources: {slots}, decode_resources: {slots}}}\n"
    )


def _a_dead_controller_cuts_no_stream(cluster: RayCluster, grpc_address: str) -> None:
    controller = _controller_process(cluster)  # to find it takes a while
    with _streams(grpc_address, 6) as answers:
        controller.kill()
        assert not any(answer.done() for answer in answers)


def _the_next_controller_took_over_and_heals(cluster: RayCluster, url: str) -> None:
    before = _pids(cluster.folder / "run")
    assert sorted(before) == ["decode-0", "prefill-0", "router"]
    old = before["decode-0"]
    psutil.Process(old).kill()
    _until(
        lambda: _pids(cluster.folder / "run").get("decode-0", before["decode-0"]) != before["decode-0"], "another one"
    )
    _until(lambda: _states(cluster, url) == ["ready", "ready"], "which serves")
    after = _pids(cluster.folder / "run")
    assert {name for name in before if before[name] != after[name]} == {"decode-0"}, "the others are the same processes"


def _a_killed_raylet_loses_no_stream(cluster: RayCluster, grpc_address: str, hosted: list[list[str]]) -> None:
    """Streams of some seconds run on both nodes when one is killed."""
    victim = next(index for index, names in enumerate(hosted) if "decode-0" in names or "prefill-0" in names)
    with _streams(grpc_address, 8):
        psutil.Process(cluster.raylets[victim]).kill()


def _two_of_each_again(cluster: RayCluster, url: str) -> None:
    """The dead node's workers are placed on the other one."""
    _until(
        lambda: sum(len(_workers_under(raylet)) for raylet in cluster.raylets if psutil.pid_exists(raylet)) == 4,
        "four workers run again",
    )
    _until(lambda: _states(cluster, url).count("ready") == 4, "and are ready")


def _a_scale_down_hurts_no_stream(cluster: RayCluster, grpc_address: str, policy: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(_check_stream, grpc_address, number, STREAM_TOKENS) for number in range(6)]
        policy.write_text(POLICY.format(1))
        for answer in answers:
            answer.result(TIMEOUT_S)
    _until(
        lambda: sum(len(_workers_under(raylet)) for raylet in cluster.raylets if psutil.pid_exists(raylet)) == 2,
        "back to the minimum",
    )


def _no_secret_lies_in_ray(cluster: RayCluster, files: list[Path]) -> None:
    secrets = [path.read_text().strip().encode() for path in files]
    logs = [path for path in (cluster.session / "logs").rglob("*") if path.is_file()]
    assert logs
    for path in logs:
        content = path.read_bytes()
        assert not any(secret in content for secret in secrets), path
    for process in _of_the_cluster(cluster.folder):
        words = " ".join(process.cmdline()).encode()
        assert not any(secret in words for secret in secrets)


def _nodes_file(model: Path, secrets: Path, redis_url: str, port: int) -> str:
    return (
        f"model: {model}\nengine: mock\nprefill: {{workers: 1}}\ndecode: {{workers: 1}}\ntransports: [tcp]\n"
        f"router: {{port: {port}, grpc_port: {free_port()}, prefill_fallback: deny}}\ndrain_timeout_s: 1\n"
        f"redis: {{url: {redis_url!r}}}\n"
        f"ray: {{name: nodes, secrets_dir: {secrets}, prefill_resources: {{slot: 1}}, decode_resources: {{slot: 1}}}}\n"
    )


@pytest.fixture
def redis(ray_cluster: RayCluster) -> Iterator[str]:
    """A Redis of one's own on TCP, with the password of the secrets that are made here too."""
    secrets = create_secrets(ray_cluster.folder / "secrets")
    embedded = prepare_embedded_redis(ray_cluster.folder)
    password = secrets.redis_password_file.read_text().strip()
    port = free_port()
    server = [embedded.command[0], "--port", str(port), "--bind", "127.0.0.1", "--requirepass", password, "--save", ""]
    with subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        yield f"redis://127.0.0.1:{port}/0"
        process.terminate()


def _rays_ports(session: Path) -> set[tuple[str, int]]:
    """Where the processes of this Ray listen."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        if any(session.name in word for word in process.info["cmdline"] or ()):
            with suppress(psutil.Error):
                listening = (one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN)
                found |= {(one.laddr.ip, one.laddr.port) for one in listening}
    return {("127.0.0.1" if ip in ("0.0.0.0", "::", "::1") else ip.removeprefix("::ffff:"), port) for ip, port in found}  # noqa: S104


def _http_status(address: tuple[str, int], method: str, path: str) -> int:
    """0: no HTTP is spoken there."""
    connection = http.client.HTTPConnection(*address, timeout=10)
    try:
        connection.request(method, path, body=b'{"entrypoint": "true"}', headers={"Content-Type": "application/json"})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _asked_nodes(cluster: RayCluster) -> list[dict[str, float]]:
    """What Ray's cluster autoscaler would read."""
    asked: list[dict[str, float]] = json.loads(
        _on_ray(
            cluster,
            "from ray.experimental.internal_kv import _internal_kv_get as get\n"
            "print(get(b'autoscaler_resource_request').decode())",
        )
    )
    return asked


def _kill_for_good(cluster: RayCluster, name: str) -> None:
    """The controller, so that Ray does not start it anew."""
    _on_ray(cluster, f"ray.kill(ray.get_actor({name!r}), no_restart=True); print('killed')")


def _on_ray(cluster: RayCluster, program: str) -> str:
    """The last line that the program prints, of a driver of Ray."""
    head = "import ray, sys\nray.init(sys.argv[1], namespace='tandem', log_to_driver=False, logging_level='ERROR')\n"
    ended = subprocess.run(
        [sys.executable, "-c", head + program, cluster.address], env=cluster.environment,
        capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    return ended.stdout.splitlines()[-1]


def _hosts(run: Path) -> dict[str, set[str]]:
    """The addresses that each worker process listens on."""
    found = {}
    for process in _of_the_cluster(run):
        names = [word.partition("=")[2] for word in process.cmdline() if word.startswith("--worker-id=")]
        if names:
            listening = (one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN)
            found[names[0]] = {one.laddr.ip.removeprefix("::ffff:") for one in listening}  # as gRPC binds IPv4
    return found


def _controller_process(cluster: RayCluster) -> psutil.Process:
    """The actor's process, by the title that Ray gives it."""
    return next(one for one in psutil.process_iter() if _is_controller(one, cluster.session))


def _is_controller(process: psutil.Process, session: Path) -> bool:
    try:
        raylet = process.parent()
        is_ours = raylet is not None and any(session.name in word for word in raylet.cmdline())
        return is_ours and process.cmdline()[0].startswith("ray::ClusterController")
    except (psutil.Error, IndexError):
        return False


def _pids(run: Path) -> dict[str, int]:
    """Workers and router by their names."""
    found = {}
    for process in _of_the_cluster(run):
        words = process.info["cmdline"]
        names = [word.removeprefix("--worker-id=") for word in words if word.startswith("--worker-id=")]
        for name in [*names, *(["router"] if "router" in words else [])]:
            found[name] = process.pid
    return found


def _answers(grpc_address: str) -> bool:
    try:
        _check_stream(grpc_address, 1, 8)
    except grpc.RpcError:
        return False
    return True


@contextmanager
def _streams(grpc_address: str, count: int) -> Iterator[list[Future[inference_pb2.GenerateResponse]]]:
    """Answers of some 3 s, all of which have begun inside the block; afterwards each has come whole."""
    with ThreadPoolExecutor(count) as pool:
        begun = [threading.Event() for _ in range(count)]
        answers = [pool.submit(_check_stream, grpc_address, number, 200, begun[number]) for number in range(count)]
        _until(lambda: all(event.is_set() for event in begun), "all have begun")
        yield answers
        for answer in answers:
            answer.result(TIMEOUT_S)


def _check_stream(
    grpc_address: str, number: int, num_tokens: int, has_begun: threading.Event | None = None
) -> inference_pb2.GenerateResponse:
    prompt = [(31 * number + 7 * index) % VOCAB_SIZE for index in range(40)]
    tokens, last = generate_tokens(grpc_address, prompt, num_tokens, has_begun=has_begun)
    assert tokens == expected_tokens(prompt, num_tokens)
    return last


def _states(cluster: RayCluster, url: str) -> list[str]:
    status: dict[str, Any] = json.loads(cluster.tandem("status", "--json", "--url", url))
    return [worker["state"] for worker in status["workers"]]


def _workers_under(raylet: int) -> list[str]:
    """Names of the worker processes that run below a raylet."""
    names = []
    for process in psutil.Process(raylet).children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if any(word in ("prefill_worker", "decode_worker") for word in words):
            names += [word.partition("=")[2] for word in words if word.startswith("--worker-id=")]
    return names


def _of_the_cluster(run: Path) -> list[psutil.Process]:
    """Every process that was told the cluster's runtime directory."""
    return [
        process for process in psutil.process_iter(["cmdline"]) if str(run) in " ".join(process.info["cmdline"] or ())
    ]


def _our_shared_memory() -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").glob("*tandem*"))  # noqa: S108  only looked at


def _until(is_reached: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_reached():
        if time.monotonic() > deadline_s:
            pytest.fail(f"not reached in {TIMEOUT_S} s: {what}")
        time.sleep(0.1)
