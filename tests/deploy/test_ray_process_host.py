"""The actor's class without Ray: a child that is started, asked, ended, and hears nothing of Ray's secrets."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from cluster.errors import StartupError
from deploy.node_addresses import ADDRESS, HOST, MODEL, RUNTIME_DIR
from deploy.ray_process_host import HostState, ProcessHost
from deploy.runtime_dir import RuntimeDirectory

pytestmark = pytest.mark.cluster

TIMEOUT_S = 60.0
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
PROGRAM = (
    "import os, sys; print(sorted(n for n in os.environ if n.startswith('RAY_')), os.environ['MINE']); sys.exit(3)"
)


@pytest.fixture
async def host() -> AsyncIterator[ProcessHost]:
    host = ProcessHost()
    yield host
    await host.close()
    assert "raylet-watch" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture
def directory(runtime_dir: Path) -> Iterator[RuntimeDirectory]:
    """A cluster's, as its controller holds it."""
    directory = RuntimeDirectory.create(runtime_dir / "run")
    yield directory
    directory.remove()


async def test_a_child_ends_with_its_status_and_its_last_lines_and_sees_no_ray(
    directory: RuntimeDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    host = ProcessHost()  # made where the environment has Ray's token
    pid = await host.start("decode-0", [sys.executable, "-c", PROGRAM], json.dumps({"MINE": "7"}), str(directory.logs))
    assert pid > 0
    assert await host.wait() == (3, ["[] 7"])
    await host.close()


async def test_terminate_and_close_end_it(directory: RuntimeDirectory, host: ProcessHost) -> None:
    await host.start("decode-0", SLEEPER, "{}", str(directory.logs))
    await host.terminate()
    assert (await host.wait())[0] == -15
    await host.start("decode-0", SLEEPER, "{}", str(directory.logs))
    await host.close()
    assert (await host.wait())[0] == -9


async def test_a_controller_that_did_not_start_the_child_is_told_what_runs(
    directory: RuntimeDirectory, host: ProcessHost
) -> None:
    assert await host.state() == HostState(0, "", is_ending=False)
    pid = await host.start("decode-0", SLEEPER, "{}", str(directory.logs))
    first, second = asyncio.create_task(host.wait()), asyncio.create_task(host.wait())
    assert await host.state() == HostState(pid, "", is_ending=False)
    first.cancel()  # its controller is dead
    await host.terminate()
    assert (await host.state()).is_ending
    assert (await second)[0] == -15
    assert (await host.state()).pid == 0


async def test_f20_a_second_controller_does_not_cut_a_drain_short(
    directory: RuntimeDirectory, host: ProcessHost
) -> None:
    """A worker that is asked a second time ends at once."""
    counts = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.01)"
    )
    await host.start("decode-0", [sys.executable, "-c", counts], "{}", str(directory.logs))
    log = directory.logs / "decode-0.log"
    await _until(lambda: "ready" in log.read_text())
    await host.terminate()
    await _until(lambda: "asked" in log.read_text())
    await host.terminate()
    await host.close()
    assert log.read_text().split() == ["ready", "asked"]


async def test_a_host_holds_the_clusters_directory_and_the_last_one_removes_it(
    runtime_dir: Path, host: ProcessHost
) -> None:
    directory = RuntimeDirectory.create(runtime_dir / "run", "0123abcd")
    await host.start("decode-0", SLEEPER, "{}", str(directory.logs))
    (directory.path / "cluster.token").write_text("kept")
    _forget(directory)
    other = RuntimeDirectory.create(runtime_dir / "run")
    again = RuntimeDirectory.create(runtime_dir / "run", "0123abcd")
    assert (again.path / "cluster.token").read_text() == "kept"
    _forget(again)
    await host.close()
    assert not directory.path.exists()
    other.remove()


def _forget(directory: RuntimeDirectory) -> None:
    """As when its holder is killed."""
    os.close(directory._lock_fd)


async def _until(is_reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_reached():  # noqa: ASYNC110  a file
            await asyncio.sleep(0.01)


async def test_on_a_machine_of_its_own_a_worker_has_the_nodes_address_directory_and_model(
    runtime_dir: Path, host: ProcessHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_RUNTIME_DIR", str(runtime_dir / "run"))
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.2")
    model = runtime_dir / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    shows = [sys.executable, "-c", "import sys; print(*sys.argv[1:], sep='\\n')", ADDRESS, HOST, RUNTIME_DIR, MODEL]
    _, target = await host.start_on_node("decode-0", shows, "{}", str(model))
    status, lines = await host.wait()
    assert (status, lines[0], lines[1], lines[3]) == (0, target, "127.0.0.2", str(model))
    assert target.startswith("127.0.0.2:")
    assert Path(lines[2]).parent == runtime_dir / "run"
    assert not os.path.exists(lines[2]), "it goes with the worker"  # noqa: ASYNC240  only a look


async def test_a_node_without_the_model_is_told(
    runtime_dir: Path, host: ProcessHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_RUNTIME_DIR", str(runtime_dir / "run"))
    with pytest.raises(StartupError, match=r"none\.gguf"):
        await host.start_on_node("decode-0", ["true"], "{}", str(runtime_dir / "none.gguf"))
    assert not (runtime_dir / "run").exists()


async def test_a_node_without_the_clusters_directory_is_told(runtime_dir: Path, host: ProcessHost) -> None:
    with pytest.raises(StartupError, match="must share one machine"):
        await host.start("decode-0", ["true"], "{}", str(runtime_dir / "none"))
