"""A trained drafter on disk: one safetensors file, made for one target and refused for any other.

    <TANDEM_HOME>/drafters/<model>.<kind>.safetensors      what was trained here
    drafters/<model>.<kind>.safetensors beside this file   what is shipped

Tensors are bfloat16 under the names of the trained module; `vocabulary` [draft vocab] int32 maps the drafter's tokens
to the target's. The metadata says the kind, the target's fingerprint and the layers that the drafter reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cluster.errors import StartupError
from cluster.model_files import tandem_home

DrafterKind = Literal["eagle", "medusa"]
FORMAT = "tandem-drafter-1"
SHIPPED_DIR = Path(__file__).parent / "drafters"


@dataclass(frozen=True, slots=True)
class DrafterFile:
    """`tap_layers`: whose hidden states it reads, ascending. `notes`: how it was trained and how well it guesses."""

    kind: str
    target_fingerprint: str
    tap_layers: tuple[int, ...]
    vocabulary: torch.Tensor
    tensors: Mapping[str, torch.Tensor]
    notes: str = ""

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in self.tensors.items()}
        metadata = {
            "format": FORMAT,
            "kind": self.kind,
            "target_fingerprint": self.target_fingerprint,
            "tap_layers": ",".join(map(str, self.tap_layers)),
            "notes": self.notes,
        }
        save_file(tensors | {"vocabulary": self.vocabulary.to(torch.int32)}, unfinished, metadata)
        unfinished.rename(path)


def find_drafter(kind: DrafterKind, model_name: str) -> Path:
    """The file of this kind for a model (its served name). Raises `StartupError` saying how to get one."""
    name = f"{model_name}.{kind}.safetensors"
    for directory in (tandem_home() / "drafters", SHIPPED_DIR):
        if (directory / name).is_file():
            return directory / name
    raise StartupError(
        f"no {kind} drafter for {model_name} ({name} is in neither {tandem_home() / 'drafters'} nor the package): "
        f"train one with `tandem drafter train --kind {kind}`",
        param="speculation",
    )


def read_drafter(path: Path, kind: DrafterKind, target_fingerprint: str) -> DrafterFile:
    """Raises `StartupError` for a file that is damaged, of another kind, or made for another target."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (OSError, SafetensorError) as error:
        raise StartupError(f"drafter {path} cannot be read ({error}): train or fetch it again") from error
    taps = metadata.get("tap_layers", "").split(",")
    has_all = "vocabulary" in tensors and all(layer.isdecimal() for layer in taps)
    if metadata.get("format") != FORMAT or metadata.get("kind") != kind or not has_all:
        raise StartupError(f"{path} is no {kind} drafter of format {FORMAT}: train one with `tandem drafter train`")
    if metadata.get("target_fingerprint") != target_fingerprint:
        raise StartupError(
            f"drafter {path} was trained for another target (fingerprint {metadata.get('target_fingerprint')}, "
            f"this model has {target_fingerprint}): train one with `tandem drafter train --kind {kind}`",
            param="speculation",
        )
    return DrafterFile(
        kind=kind,
        target_fingerprint=target_fingerprint,
        tap_layers=tuple(int(layer) for layer in taps),
        vocabulary=tensors.pop("vocabulary").to(torch.int64),
        tensors=tensors,
        notes=metadata.get("notes", ""),
    )
