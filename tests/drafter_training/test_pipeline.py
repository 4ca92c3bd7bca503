"""`tandem drafter train` from end to end on the default model, as small as it goes, and its file served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cluster.worker_settings import WorkerSettings
from decode_worker.speculation.drafter_file import read_drafter
from decode_worker.speculation.opening import open_speculator
from drafter_training import pipeline
from drafter_training.commands import drafter
from engine.runner_factory import build_runner

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("USER_TURNS_PER_SHARD", 2), ("INSTRUCTIONS_PER_SHARD", 12), ("MAX_ANSWER_TOKENS", 20),
        ("MAX_CONTEXT_TOKENS", 192), ("HELD_OUT_TURNS", 4), ("TURNS_PER_BATCH", 2),
    ):  # fmt: skip
        monkeypatch.setattr(pipeline, name, value)


def test_both_kinds_are_trained_saved_resumed_and_served(
    small: None, tmp_path: Path, default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer()
    app.add_typer(drafter, name="drafter")
    work, home = tmp_path / "work", tmp_path / "home"
    common = ["--model", str(default_model_path), "--tokens", "200", "--steps", "2", "--work-dir", str(work)]
    for kind in ("eagle", "medusa"):
        flags = ["drafter", "train", "--kind", kind, "--out", str(home / "drafters"), *common]
        result = CliRunner().invoke(app, flags)
        assert result.exit_code == 0, result.output
        path = home / "drafters" / f"SmolLM2-135M-Instruct.{kind}.safetensors"
        report = json.loads(path.with_suffix(".json").read_text())
        assert report["plan"]["num_steps"] == 2
        assert 0.3 < report["coverage"]["held_out"] <= 1
        assert len(report["held_out"]["acceptance"]) == 3
    shards = sorted(file.stat().st_mtime_ns for file in (work / "features").iterdir())
    written = path.stat().st_mtime_ns
    assert CliRunner().invoke(app, flags).exit_code == 0
    assert sorted(file.stat().st_mtime_ns for file in (work / "features").iterdir()) == shards, "written again"
    assert path.stat().st_mtime_ns > written

    monkeypatch.setenv("TANDEM_HOME", str(home))
    settings = WorkerSettings(
        worker_id="trained", model=str(default_model_path), listen="unix:unused", runtime_dir=tmp_path, dtype="float32",
        num_kv_blocks=16, max_model_len=128, max_sequences=4,
    )  # fmt: skip
    built = build_runner(settings)
    for kind, taps in (("eagle", (9, 19, 29)), ("medusa", (29,))):
        speculator = open_speculator(settings.model_copy(update={"speculation": kind}), built)
        assert speculator is not None
        assert speculator.tap_layers == taps
        path = home / "drafters" / f"SmolLM2-135M-Instruct.{kind}.safetensors"
        assert read_drafter(path, kind, built.config.fingerprint).tap_layers == taps  # type: ignore[arg-type]


def test_a_model_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    app = typer.Typer()
    app.add_typer(drafter, name="drafter")
    result = CliRunner().invoke(app, ["drafter", "train", "--kind", "eagle", "--model", "no-such-model"])
    assert result.exit_code == 2
    assert "no-such-model" in result.output
