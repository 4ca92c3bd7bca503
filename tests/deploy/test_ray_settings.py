"""What `tandem up` asks of Ray before it talks to it: a token, and a head of its own only where it made one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

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
