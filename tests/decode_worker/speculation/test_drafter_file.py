"""Drafter files: written whole, read back, refused where they do not belong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cluster.errors import StartupError
from decode_worker.speculation.drafter_file import find_drafter, read_drafter
from tests.decode_worker.speculation.test_eagle import CONFIG, FILE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "drafters" / "small.eagle.safetensors"
    replace(FILE, notes="how").save(path)
    return path


def test_what_was_saved_is_read_back(path: Path) -> None:
    read = read_drafter(path, "eagle", CONFIG.fingerprint)
    assert (read.kind, read.tap_layers, read.notes) == ("eagle", FILE.tap_layers, "how")
    assert torch.equal(read.vocabulary, FILE.vocabulary)
    assert read.tensors.keys() == FILE.tensors.keys()
    assert all(torch.equal(read.tensors[name].float(), FILE.tensors[name]) for name in read.tensors)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_another_target_is_refused(path: Path) -> None:
    with pytest.raises(StartupError, match=r"another target .*tandem drafter train --kind eagle"):
        read_drafter(path, "eagle", "something-else")


def test_another_kind_or_format_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no medusa drafter"):
        read_drafter(path, "medusa", CONFIG.fingerprint)
    plain = tmp_path / "plain.safetensors"
    save_file({"vocabulary": torch.zeros(1)}, plain)
    with pytest.raises(StartupError, match="no eagle drafter"):
        read_drafter(plain, "eagle", CONFIG.fingerprint)


def test_a_damaged_file_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(StartupError, match="cannot be read"):
        read_drafter(path, "eagle", CONFIG.fingerprint)


def test_s34_a_missing_file_says_how_to_get_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(path.parent.parent))
    assert find_drafter("eagle", "small") == path
    with pytest.raises(StartupError, match="tandem drafter train --kind medusa"):
        find_drafter("medusa", "small")
