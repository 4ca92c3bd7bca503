"""Settings survive the way through a command line, and wrong flags are one line that names the flag."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import router_settings, worker_settings
from cluster.errors import StartupError
from cluster.router_settings import RouterSettings
from cluster.settings_flags import settings_to_arguments
from cluster.worker_settings import WorkerSettings

WORKER = WorkerSettings(
    worker_id="decode-0",
    model="/models/x y.gguf",
    listen="unix:/run/d.sock",
    runtime_dir=Path("/run"),
    transports=("tcp",),
    num_threads=2,
    heartbeat_s=0.25,
    redis_password_file=Path("/run/redis password"),
    seed=-7,
)


def test_worker_settings_come_back_equal_from_their_arguments() -> None:
    assert worker_settings.parse_arguments("decode_worker", settings_to_arguments(WORKER)) == WORKER


def test_router_settings_come_back_equal_from_their_arguments() -> None:
    settings = RouterSettings(model="m.gguf", runtime_dir=Path("/run"), http_port=81, prefill_fallback="deny")
    assert router_settings.parse_arguments(settings_to_arguments(settings)) == settings


def test_fields_at_their_default_need_no_argument() -> None:
    assert not any("block-tokens" in argument for argument in settings_to_arguments(WORKER))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--num-threads=0"], "--num-threads"),
        (["--num-threads=two"], "--num-threads"),
        (["--role=boss"], "--role"),
        (["--no-such-flag=1"], "--no-such-flag"),
        (["--heartbeat-s=nan"], "--heartbeat-s"),
    ],
)
def test_wrong_flag_is_one_line_that_names_it(arguments: list[str], named: str) -> None:
    with pytest.raises(StartupError) as error:
        worker_settings.parse_arguments("decode_worker", [*settings_to_arguments(WORKER), *arguments])
    assert named in error.value.message
    assert "\n" not in error.value.message


def test_missing_required_flag_is_named() -> None:
    with pytest.raises(StartupError, match="--model"):
        worker_settings.parse_arguments("decode_worker", ["--worker-id=a"])


def test_help_lists_every_field_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        worker_settings.parse_arguments("decode_worker", ["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for name in WorkerSettings.model_fields:
        assert f"--{name.replace('_', '-')}" in printed
    assert "token budget of one engine step" in " ".join(printed.split())
