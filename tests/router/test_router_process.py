"""`python -m router` as a process: how it starts, what it refuses, how it ends, and what it never imports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.free_port import free_port
from cluster.rpc_security import write_secret

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "proto")))}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "router", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=_environment(), cwd=ROOT, timeout=60)


@pytest.fixture
def flags(tmp_path: Path, default_model_path: Path) -> list[str]:
    write_secret(tmp_path / "token", "secret")
    return [
        f"--model={default_model_path}",
        f"--runtime-dir={tmp_path}",
        f"--cluster-token-file={tmp_path / 'token'}",
        f"--redis-url=unix://{tmp_path / 'no-redis.sock'}",
    ]


def _one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_the_router_imports_no_torch_engine_or_transfer() -> None:
    code = (
        "import router.router_process, sys; print([m for m in ('torch', 'engine', 'kv_transfer') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=_environment(), cwd=ROOT, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.model
def test_busy_port_is_one_line_and_exit_status_2(flags: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = _one_line(_run(*flags, f"--http-port={taken.getsockname()[1]}"))
    assert "in use" in line
    assert "--http-port" in line


@pytest.mark.model
def test_busy_grpc_port_is_one_line_and_exit_status_2(flags: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = _one_line(_run(*flags, f"--http-port={free_port()}", f"--grpc-port={taken.getsockname()[1]}"))
    assert "--grpc-port" in line


@pytest.mark.model
def test_open_address_without_keys_is_refused_with_the_command_that_makes_a_key(flags: list[str]) -> None:
    line = _one_line(_run(*flags, "--http-host=0.0.0.0", f"--http-port={free_port()}"))
    assert "tandem key create" in line


def test_missing_model_is_one_line(tmp_path: Path) -> None:
    write_secret(tmp_path / "token", "secret")
    line = _one_line(
        _run(
            f"--model={tmp_path / 'nothing.gguf'}",
            f"--runtime-dir={tmp_path}",
            f"--cluster-token-file={tmp_path / 'token'}",
            f"--http-port={free_port()}",
        )
    )
    assert "nothing.gguf" in line


@pytest.mark.model
def test_f08_without_workers_and_redis_it_lives_is_not_ready_and_ends_on_sigterm(flags: list[str]) -> None:
    port = free_port()
    command = [sys.executable, "-m", "router", *flags, f"--http-port={port}", f"--grpc-port={free_port()}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=_environment(), cwd=ROOT)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "router listens" in line:
                break
        assert _get(port, "/livez").startswith("HTTP/1.1 200")
        assert _get(port, "/readyz").startswith("HTTP/1.1 503")
        assert "\ntandem_redis_up 0.0\n" in _get(port, "/metrics")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _get(port: int, path: str) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        data = b""
        while part := connection.recv(4096):
            data += part
    return data.decode()
