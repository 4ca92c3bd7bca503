"""Drafter files: written whole, read back, refused where they do not belong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cluster.errors import StartupError
from decode_worker.speculation.drafter_file import find_drafter, read_drafter
from decode_worker.speculation.eagle import BLOCKS_PER_CONTEXT
from decode_worker.speculation.eagle_layer import open_eagle_layer
from decode_worker.speculation.medusa import MedusaDrafter
from tests.decode_worker.speculation.test_eagle import CONFIG, DRAFT_VOCAB, EMBEDDING, FILE, HEAD
from tests.decode_worker.speculation.trained_files import medusa_file


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


@pytest.mark.parametrize("taps", ["", "0,x", "0,-1", "0,,1"])
def test_a_header_that_names_no_layers_is_refused(taps: str, path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, {**metadata, "tap_layers": taps})
    with pytest.raises(StartupError, match="is no eagle drafter of format"):
        read_drafter(path, "eagle", CONFIG.fingerprint)


MEDUSA = medusa_file(CONFIG, DRAFT_VOCAB)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # States of one layer under a header that names three, and of three under one that names one.
        ({"tap_layers": (0,)}, r"fuse_first.weight is \[64, 256\], 1 layers that it reads ask for \[64, 128\]"),
        ({"tap_layers": (0, 1, 2, 3)}, r"fuse_first.weight is \[64, 256\], 4 layers"),
        ({"tap_layers": ()}, r"reads the layers \[\]"),
        ({"tap_layers": (0, 1, 9)}, r"reads the layers \[0, 1, 9\] of a model that has 4"),
        ({"tap_layers": (1, 0, 3)}, "reads the layers"),
        ({"vocabulary": FILE.vocabulary + CONFIG.vocab_size}, "token ids outside of the target's 211"),
        ({"vocabulary": FILE.vocabulary[:0]}, "token ids"),
        *(
            ({"tensors": {**FILE.tensors, name: tensor[:-1]}}, f"{name} is")
            for name, tensor in FILE.tensors.items()
        ),
        ({"tensors": {}}, "fuse_first.weight is missing"),
    ],
)  # fmt: skip
def test_kv55_an_eagle_file_whose_states_are_of_another_width_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        open_eagle_layer(replace(FILE, **changes), CONFIG, EMBEDDING, HEAD, BLOCKS_PER_CONTEXT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tap_layers": (4,)}, "reads the layers"),
        ({"vocabulary": MEDUSA.vocabulary - 1}, "token ids outside"),
        *(
            ({"tensors": {**MEDUSA.tensors, name: tensor[:-1]}}, f"{name} is")
            for name, tensor in MEDUSA.tensors.items()
        ),
        ({"tensors": {}}, r"linears.0.weight is missing"),
    ],
)
def test_kv55_nor_is_a_medusa_file(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        MedusaDrafter(replace(MEDUSA, **changes), CONFIG, HEAD, torch.ones(CONFIG.hidden_size), 1)


def test_a_damaged_file_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(StartupError, match="cannot be read"):
        read_drafter(path, "eagle", CONFIG.fingerprint)


def test_s34_a_missing_file_says_how_to_get_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(path.parent.parent))
    assert find_drafter("eagle", "small") == path
    with pytest.raises(StartupError, match="tandem drafter train --kind medusa"):
        find_drafter("medusa", "small")
