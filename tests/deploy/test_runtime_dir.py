"""Runtime directories: private, gone with their cluster, and cleaned up after a cluster that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.errors import StartupError
from deploy.runtime_dir import RuntimeDirectory

TIMEOUT_S = 60
HOLDER = (
    "import pathlib, sys, time\n"
    "from deploy.runtime_dir import RuntimeDirectory\n"
    "directory = RuntimeDirectory.create(pathlib.Path(sys.argv[1]))\n"
    "(directory.path / 'decode-0.sock').touch()\n"
    "print(directory.path, flush=True)\n"
    "time.sleep(600)\n"
)


def test_directory_is_private_and_goes_away(tmp_path: Path) -> None:
    directory = RuntimeDirectory.create(tmp_path / "base")
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert directory.logs.is_dir()
    directory.remove()
    assert not directory.path.exists()


def test_f31_directory_of_a_killed_cluster_goes_at_the_next_start(tmp_path: Path) -> None:
    base = tmp_path / "base"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", HOLDER, str(base)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        if holder.stdout is None:
            raise RuntimeError("no pipe")
        held = Path(holder.stdout.readline().strip())
        living = RuntimeDirectory.create(base)
        assert held.exists()
        holder.kill()
        holder.wait(TIMEOUT_S)
    after = RuntimeDirectory.create(base)
    assert not held.exists()
    assert living.path.exists()
    living.remove()
    after.remove()
    assert [path.name for path in base.iterdir()] == [".lock"]


def test_a_directory_that_is_joined_stays_until_the_last_one_leaves(tmp_path: Path) -> None:
    base = tmp_path / "base"
    first = RuntimeDirectory.create(base)
    second = RuntimeDirectory.join(first.path)
    first.leave()
    RuntimeDirectory.create(base).remove()
    assert second.path.exists()
    second.leave()
    assert [path.name for path in base.iterdir()] == [".lock"]


def test_a_runs_directory_is_found_again_while_somebody_holds_it_and_made_anew_afterwards(tmp_path: Path) -> None:
    base = tmp_path / "base"
    first = RuntimeDirectory.create(base, "0123abcd")
    (first.path / "ports.json").touch()
    again = RuntimeDirectory.create(base, "0123abcd")
    assert (again.path / "ports.json").exists()
    os.close(first._lock_fd)  # both are killed
    os.close(again._lock_fd)
    anew = RuntimeDirectory.create(base, "0123abcd")
    assert (anew.path, list(anew.path.glob("*.json"))) == (first.path, [])
    anew.remove()


def test_a_directory_that_is_gone_cannot_be_joined(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RuntimeDirectory.join(tmp_path / "base" / "c-0123abcd")
    assert not (tmp_path / "base").exists()


@pytest.mark.parametrize("spoil", ["open", "link"])
def test_base_that_others_control_is_refused(tmp_path: Path, spoil: str) -> None:
    base = tmp_path / "base"
    if spoil == "open":
        base.mkdir()
        base.chmod(0o777)
    else:
        base.symlink_to(tmp_path)
    with pytest.raises(StartupError, match="TANDEM_RUNTIME_DIR"):
        RuntimeDirectory.create(base)
