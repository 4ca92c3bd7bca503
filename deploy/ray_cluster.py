"""`tandem up`, `tandem down` and `tandem status` on Ray: a client of the controller actor.

Without an address a Ray head is started on this machine under a token of its own, without a dashboard and without the
monitor, whose metrics would be there for everybody; `down` ends exactly that one. Ray's token authentication is always
on: who may talk to Ray may run any code on it, and its ports listen on all addresses. A Ray that is too old to ask for
the token everywhere is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from cluster.errors import StartupError
from cluster.free_port import free_port
from cluster.python_modules import module_environment
from cluster.rpc_security import new_secret, write_secret
from deploy.config import ClusterConfig
from deploy.runtime_dir import default_base, make_private, new_run

NAMESPACE = "tandem"
HEAD_START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 200.0
STATUS_TIMEOUT_S = 30.0
PROGRESS_S, PROGRESS_TIMEOUT_S = 0.5, 5.0
# Earlier ones do not ask for the token on every way in.
LEAST_RAY = (2, 54)
# Ray's own store holds no KV and no weights: only what its control plane needs.
OBJECT_STORE_BYTES = 80 * 2**20


@dataclass(frozen=True, slots=True)
class LocalHead:
    """The Ray head that `tandem up` started here."""

    pid: int
    started_s: float  # a pid alone may be somebody else's by now
    address: str
    token_file: str


def up(config: ClusterConfig, address: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Brings the cluster up and returns when it is ready: url, model, summary. Raises `StartupError`.

    `say`: is told each step, as a line.
    """
    is_new_head = not address and _read_head() is None
    if is_new_head:
        say("starting Ray on this machine")
        _start_head()
    try:
        with _connected(address) as ray:
            return _up(ray, config, say)
    except BaseException:
        if is_new_head:
            _stop_head()
        raise


def down(name: str, address: str) -> str:
    """Stops the cluster and waits until nothing of it is left; why it had failed before, if it had."""
    failure = ""
    try:
        with _connected(address) as ray:
            failure = _stop(ray, name, address)
    finally:
        if not address:
            _stop_head()
    return failure


def state(name: str, address: str) -> dict[str, Any]:
    """The controller's own view: url, processes and their states. Raises `StartupError` when none is up."""
    with _connected(address) as ray:
        controller = _controller(ray, name)
        if controller is None:
            raise StartupError(f"no cluster named {name!r} is up: run `tandem up --on ray`")
        answer: dict[str, Any] = ray.get(controller.status.remote(), timeout=STATUS_TIMEOUT_S)
        return answer


def _stop(ray: Any, name: str, address: str) -> str:
    """The controller stops in order; what is left, and what has no controller, is ended."""
    from deploy.ray_hosts import end_all

    failure, controller = "", _controller(ray, name)
    if controller is not None:
        try:
            failure = ray.get(controller.stop.remote(), timeout=STOP_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            failure = f"its controller did not stop it ({type(error).__name__})"
        finally:
            ray.kill(controller, no_restart=True)
    num_left = end_all(f"{name}/")
    if controller is None and address and not num_left:
        raise StartupError(f"no cluster named {name!r} is up at {address}")
    return failure


def _up(ray: Any, config: ClusterConfig, say: Callable[[str], None]) -> dict[str, Any]:
    from deploy.ray_controller import ClusterController
    from deploy.ray_hosts import end_all, find_hosts

    name = config.ray.name
    if _controller(ray, name) is not None or any(find_hosts(f"{name}/")):
        raise StartupError(f"a cluster named {name!r} is up already: `tandem down` first, or set ray.name")
    controller = (
        ray.remote(ClusterController)
        .options(
            name=name,
            lifetime="detached",
            num_cpus=0,
            resources={"node:__internal_head__": 0.001},  # the router's address stays where clients look for it
            max_restarts=-1,
            max_task_retries=-1,  # who waits for it, or asks it to stop, is answered by the next one
            max_concurrency=4,  # status is answered while somebody waits for it to be ready, or to stop
        )
        .remote(config.model_dump_json(), new_run())
    )
    timeout_s = config.start_timeout_s * 2
    try:
        waiting = controller.wait_until_ready.remote(timeout_s)
        return _say_until_ready(ray, controller, waiting, timeout_s + 30, say)
    except BaseException as error:
        ray.kill(controller, no_restart=True)
        end_all(f"{name}/")
        if isinstance(error, ray.exceptions.RayError):
            raise StartupError(f"the cluster did not start: {getattr(error, 'cause', error)}") from None
        raise


def _say_until_ready(
    ray: Any, controller: Any, waiting: Any, timeout_s: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """What `waiting` gives; each change of a process is said meanwhile. Raises Ray's errors, also its time-out."""
    told: dict[str, str] = {}
    deadline_s = time.monotonic() + timeout_s
    while not ray.wait([waiting], timeout=PROGRESS_S)[0] and time.monotonic() < deadline_s:
        with contextlib.suppress(ray.exceptions.RayError):  # it is busy, or dead: `waiting` has its end then
            states: dict[str, str] = ray.get(controller.status.remote(), timeout=PROGRESS_TIMEOUT_S)["processes"]
            for name, state in states.items():
                if state != told.get(name, "waiting"):
                    say(f"{name}: {state}")
            told = states
    ready: dict[str, Any] = ray.get(waiting, timeout=PROGRESS_S)
    return ready


def _controller(ray: Any, name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """The `ray` module, connected for the time of the block. Raises `StartupError`."""
    head = None if address else _read_head()
    if not address and head is None:
        raise StartupError(_no_head())
    _authenticate(head)
    _check_version()
    import ray

    target = address or (head.address if head is not None else "")
    try:
        ray.init(address=target, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise StartupError(f"cannot reach Ray at {target}: {str(error).splitlines()[0]}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _authenticate(head: LocalHead | None) -> None:
    """Before Ray is imported. Raises `StartupError` when there is no token to show."""
    os.environ["RAY_AUTH_MODE"] = "token"
    if head is not None:
        os.environ["RAY_AUTH_TOKEN_PATH"] = head.token_file
    default = Path.home() / ".ray" / "auth_token"
    if not any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")) and not default.exists():
        raise StartupError(
            "Ray's token authentication is needed: run `ray get-auth-token --generate`, start every node with "
            "RAY_AUTH_MODE=token and that token, and give the same one here (RAY_AUTH_TOKEN_PATH)"
        )


def _check_version() -> None:
    """Before anything of Ray runs. Raises `StartupError` for none, for an old one, and for one that does not say."""
    try:
        installed = version("ray")
    except PackageNotFoundError:
        raise StartupError("Ray is not installed: pip install 'tandem-serve[ray]'") from None
    numbers = re.match(r"(\d+)\.(\d+)\b", installed)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < LEAST_RAY:
        least = ".".join(map(str, LEAST_RAY))
        raise StartupError(
            f"Ray {installed} is installed, which does not guard every way in by its token: pip install 'ray>={least}'"
        )


# --- a head of our own ------------------------------------------------------------------------------------------------


def _start_head() -> None:
    """A background process with Ray's daemons as children. Raises `StartupError`."""
    _check_version()
    base = default_base()
    make_private(base)
    token_file = base / "ray.token"
    write_secret(token_file, new_secret())
    port = free_port()
    log = base / "ray-head.log"
    command = [
        sys.executable, "-c", "from ray.scripts.scripts import main; main()",
        "start", "--head", "--block", "--include-dashboard=false", "--no-monitor", "--disable-usage-stats",
        "--node-ip-address=127.0.0.1", f"--port={port}", f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--temp-dir={base / 'ray'}",
    ]  # fmt: skip
    environment = {**module_environment(), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    head = LocalHead(process.pid, psutil.Process(process.pid).create_time(), f"127.0.0.1:{port}", str(token_file))
    _head_file().write_text(json.dumps(asdict(head)))
    deadline_s = time.monotonic() + HEAD_START_TIMEOUT_S
    while "Ray runtime started" not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > deadline_s:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            _stop_head()
            raise StartupError(f"Ray did not start on this machine: {''.join(last) or 'it wrote nothing'}")
        time.sleep(0.1)


def _stop_head() -> None:
    """Ends the head's process with all that it started, and removes its files."""
    head = _read_head()
    if head is not None:
        _end_tree(head.pid)
    base = default_base()
    for name in ("ray-head.json", "ray.token", "ray-head.log"):
        (base / name).unlink(missing_ok=True)
    shutil.rmtree(base / "ray", ignore_errors=True)


def _end_tree(pid: int) -> None:
    """Asks, then kills: only the process and its descendants, each by its own id."""
    try:
        leader = psutil.Process(pid)
        tree = [leader, *leader.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    leader.terminate()
    _, alive = psutil.wait_procs(tree, timeout=15)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=10)


def _no_head() -> str:
    if not _head_file().exists():
        return "no Ray that `tandem up` started runs here: give --address, or run `tandem up --on ray`"
    return (
        "the Ray that `tandem up` started here has ended, and everything on it: `tandem up` starts it anew "
        f"(its log: {default_base() / 'ray-head.log'})"
    )


def _head_file() -> Path:
    return default_base() / "ray-head.json"


def _read_head() -> LocalHead | None:
    """The head that runs here; a note about one that is gone is none."""
    try:
        head = LocalHead(**json.loads(_head_file().read_text()))
    except (OSError, ValueError, TypeError):
        return None
    try:
        return head if psutil.Process(head.pid).create_time() == head.started_s else None
    except psutil.NoSuchProcess:
        return None
