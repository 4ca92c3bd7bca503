"""Names and paths of models, and files that cannot be one."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import StartupError
from cluster.model_files import DEFAULT_MODEL, KNOWN_MODELS, check_model, find_model, resolve_model, served_name


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    models = tmp_path / "models"
    models.mkdir()
    return models


def test_path_wins_over_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"GGUF....")
    assert resolve_model(str(path)) == path


def test_name_is_looked_up_in_the_cache(empty_cache: Path) -> None:
    (empty_cache / "mine.gguf").write_bytes(b"GGUF....")
    directory = empty_cache / "theirs"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    assert find_model("mine") == empty_cache / "mine.gguf"
    assert find_model("theirs") == directory


def test_missing_default_model_says_how_to_fetch_it() -> None:
    with pytest.raises(StartupError, match=f"tandem model fetch {DEFAULT_MODEL}"):
        resolve_model(DEFAULT_MODEL)


def test_unknown_name_lists_what_can_be_fetched() -> None:
    with pytest.raises(StartupError, match=DEFAULT_MODEL):
        resolve_model("no-such-model")


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(StartupError, match="GGUF"):
        check_model(path)


def test_damaged_known_file_is_refused_and_says_what_to_do(empty_cache: Path) -> None:
    (empty_cache / KNOWN_MODELS[DEFAULT_MODEL].file_name).write_bytes(b"GGUF, but cut short")
    with pytest.raises(StartupError, match=r"damaged.*tandem model fetch"):
        check_model(resolve_model(DEFAULT_MODEL))


@pytest.mark.model
def test_truncated_file_is_refused_before_any_process_starts(default_model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(default_model_path.read_bytes()[:50_000_000])
    with pytest.raises(StartupError, match="truncated"):
        check_model(path)


@pytest.mark.model
def test_whole_file_passes(default_model_path: Path) -> None:
    check_model(default_model_path)


@pytest.mark.parametrize(
    ("file_name", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Llama-3.2-1B-Instruct"),
        ("qwen2.5-0.5b-instruct-bf16.gguf", "qwen2.5-0.5b-instruct"),
        ("plain.gguf", "plain"),
        ("SmolLM2-135M", "SmolLM2-135M"),
    ],
)
def test_served_name_leaves_the_quantisation_out(file_name: str, name: str) -> None:
    assert served_name(Path(file_name)) == name
