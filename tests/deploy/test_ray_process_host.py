"""The actor's class without Ray: a child that is started, asked, ended, and hears nothing of Ray's secrets."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.errors import StartupError
from deploy.node_addresses import ADDRESS, HOST, MODEL, RUNTIME_DIR
from deploy.ray_process_host import ProcessHost

PROGRAM = (
    "import os, sys; print(sorted(n for n in os.environ if n.startswith('RAY_')), os.environ['MINE']); sys.exit(3)"
)


@pytest.fixture
async def host() -> AsyncIterator[ProcessHost]:
    host = ProcessHost()
    yield host
    await host.close()
    assert "raylet-watch" not in [thread.name for thread in threading.enumerate()]


async def test_a_child_ends_with_its_status_and_its_last_lines_and_sees_no_ray(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    host = ProcessHost()  # made where the environment has Ray's token
    pid = await host.start(
        "decode-0", [sys.executable, "-c", PROGRAM], json.dumps({"MINE": "7"}), f"{runtime_dir}/logs"
    )
    assert pid > 0
    assert await host.wait() == (3, ["[] 7"])
    await host.close()


async def test_terminate_and_close_end_it(runtime_dir: Path, host: ProcessHost) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    await host.start("decode-0", sleeper, "{}", f"{runtime_dir}/logs")
    await host.terminate()
    assert (await host.wait())[0] == -15
    await host.start("decode-0", sleeper, "{}", f"{runtime_dir}/logs")
    await host.close()
    assert (await host.wait())[0] == -9


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
