"""The private Redis: who may connect, what that user may do, and that it ends with its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from cluster.embedded_redis import prepare_embedded_redis
from cluster.redis_client import RedisClient, RedisUnavailable
from tests.cluster.conftest import RedisServer

pytestmark = pytest.mark.cluster

START_BUDGET_S = 1.0


async def test_start_takes_well_below_a_second_of_processor_time(runtime_dir: Path) -> None:
    server = RedisServer(prepare_embedded_redis(runtime_dir))
    await server.start()
    used = psutil.Process(server.pid).cpu_times()
    await server.close()
    assert used.user + used.system < START_BUDGET_S


async def test_nothing_listens_on_tcp_and_files_are_private(redis_server: RedisServer) -> None:
    server_info = await redis_server.client().run(lambda redis: redis.info("server"))
    assert server_info["tcp_port"] == 0
    assert psutil.Process(server_info["process_id"]).net_connections("inet") == []
    directory = redis_server.embedded.socket.parent
    assert directory.stat().st_mode & 0o777 == 0o700
    for path in directory.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


async def test_password_is_in_no_command_line_and_not_in_the_configuration(redis_server: RedisServer) -> None:
    password = redis_server.embedded.password_file.read_text().strip()
    server_info = await redis_server.client().run(lambda redis: redis.info("server"))
    assert password not in " ".join(psutil.Process(server_info["process_id"]).cmdline())
    configuration = next(redis_server.embedded.socket.parent.glob("*.conf"))
    assert password not in configuration.read_text()


async def test_client_without_the_password_is_refused(redis_server: RedisServer) -> None:
    client = RedisClient(f"unix://{redis_server.embedded.socket}")
    with pytest.raises(RedisUnavailable):
        await client.run(lambda redis: redis.ping())
    await client.close()


@pytest.mark.parametrize(
    "command",
    ["EVAL 'return 1' 0", "CONFIG GET *", "ACL LIST", "KEYS *", "FLUSHALL", "MODULE LIST", "DEBUG SLEEP 0", "SHUTDOWN",
     "SET other 1", "FUNCTION LIST", "MONITOR", "REPLICAOF 127.0.0.1 1"],
)  # fmt: skip
async def test_s_b14_user_has_no_scripting_admin_or_dangerous_command(redis_server: RedisServer, command: str) -> None:
    with pytest.raises(RedisUnavailable):
        await redis_server.client().run(lambda redis: redis.execute_command(*command.split()))  # type: ignore[no-untyped-call]


async def test_sigkill_of_the_parent_ends_the_server(runtime_dir: Path) -> None:
    program = (
        "import os, subprocess, sys, pathlib\n"
        "from cluster.embedded_redis import prepare_embedded_redis\n"
        "from cluster.guarded_exec import guarded_command\n"
        "embedded = prepare_embedded_redis(pathlib.Path(sys.argv[1]))\n"
        "child = subprocess.Popen(guarded_command(os.getpid(), embedded.command), stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(runtime_dir), stdout=asyncio.subprocess.PIPE, env=environment
    )
    if parent.stdout is None:
        raise RuntimeError("no pipe")
    child = psutil.Process(int(await asyncio.wait_for(parent.stdout.readline(), 20)))
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    _, alive = psutil.wait_procs([child], timeout=60)
    assert not alive
