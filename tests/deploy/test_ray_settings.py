"""What `tandem up` asks of Ray before it talks to it: a token, and a head of its own only where it made one."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.errors import StartupError
from deploy import ray_cluster


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_ray_without_a_token_is_refused_with_the_command_that_makes_one(base: Path) -> None:
    with pytest.raises(StartupError, match="ray get-auth-token --generate"):
        ray_cluster.state("tandem", "127.0.0.1:1")


def test_without_an_address_and_without_a_head_of_ours_nothing_is_asked(base: Path) -> None:
    with pytest.raises(StartupError, match="tandem up --on ray"):
        ray_cluster.state("tandem", "")


def test_a_note_about_a_head_that_is_gone_is_none(base: Path) -> None:
    note = {"pid": 2**22 - 1, "started_s": 1.0, "address": "127.0.0.1:1", "token_file": "/none"}
    (base / "ray-head.json").write_text(json.dumps(note))
    with pytest.raises(StartupError, match=r"has ended.*`tandem up` starts it anew"):
        ray_cluster.down("tandem", "")
    assert not (base / "ray-head.json").exists()


def test_s_b13_token_authentication_is_on_whatever_the_environment_says(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(base / "none"))
    ray_cluster._authenticate(None)
    assert os.environ["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize("installed", ["2.53.9", "1.13.0", "2.9.3", "0.8", "nightly", ""])
def test_s_b13_a_ray_that_does_not_guard_every_way_in_is_refused_before_anything_of_it_runs(
    installed: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("it was started, or talked to")

    monkeypatch.setattr(ray_cluster, "version", lambda _: installed)
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with pytest.raises(StartupError, match=r"pip install 'ray>=2\.54'"):
        ray_cluster._start_head()
    with pytest.raises(StartupError, match=r"pip install 'ray>=2\.54'"):
        ray_cluster.state("tandem", "127.0.0.1:1")


@pytest.mark.parametrize("installed", ["2.54.0", "2.54.0rc1", "2.60.0", "3.0.0.dev0", "10.1"])
def test_s_b13_later_ones_are_not(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "version", lambda _: installed)
    ray_cluster._check_version()


def test_s_b13_the_version_that_is_installed_with_us_is_the_one_that_is_asked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    least = ".".join(map(str, ray_cluster.LEAST_RAY))
    assert project["optional-dependencies"]["ray"] == [f"ray>={least}"]


def test_s_b13_our_own_head_has_no_dashboard_and_no_monitor_and_asks_for_a_token_nobody_else_can_read(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(Exception):
        pass

    def started(command: list[str], *, env: dict[str, str], **_: Any) -> None:
        assert {"--include-dashboard=false", "--no-monitor", "--node-ip-address=127.0.0.1"} <= set(command)
        assert env["RAY_AUTH_MODE"] == "token"
        token = Path(env["RAY_AUTH_TOKEN_PATH"])
        assert len(token.read_text()) >= 32
        assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        raise Started

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray_cluster, "version", lambda _: "2.60.0")
    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(Started):
        ray_cluster._start_head()


def test_s_b13_every_file_that_starts_ray_asks_for_the_token_and_starts_no_dashboard() -> None:
    deploy = Path(ray_cluster.__file__).parent
    machines = yaml.safe_load((deploy / "virtual_machines" / "ray-cluster.yaml").read_text())
    for role in ("head", "worker"):
        (start,) = (line for line in machines[f"{role}_start_ray_commands"] if "ray start" in line)
        assert start.startswith("RAY_AUTH_MODE=token ray start ")
        assert ("--include-dashboard=false" in start.split()) == (role == "head")
    others = [path for path in deploy.rglob("*") if path.is_file() and b"ray start" in path.read_bytes()]
    assert {path.name for path in others if path.suffix != ".pyc"} == {"ray-cluster.yaml"}
    objects = yaml.safe_load_all((deploy / "kubernetes" / "raycluster.yaml").read_text())
    (cluster,) = (item["spec"] for item in objects if item["kind"] == "RayCluster")
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"]["include-dashboard"] == "false"
