"""Opens a checkpoint by its path: a GGUF file or a directory of safetensors. Pickled weights are refused."""

from __future__ import annotations

from pathlib import Path

from cluster.errors import StartupError
from engine.weights.gguf_weights import GgufWeights
from engine.weights.safetensors_weights import SafetensorsWeights
from engine.weights.weight_source import WeightFile

# Opening one runs code that its author chose.
_PICKLED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})


def open_weights(path: Path) -> WeightFile:
    """The checkpoint at `path`; the caller closes it. Raises `StartupError` in one line: what is wrong, what to do."""
    refuse_pickle(path)
    if path.is_dir():
        return SafetensorsWeights(path)
    if not path.exists():
        raise StartupError(f"model {path} is not there: check the path, or run `tandem model fetch`", param="model")
    if path.suffix == ".safetensors":
        raise StartupError(
            f"{path} is one file of a checkpoint: give its directory, which has config.json", param="model"
        )
    return GgufWeights(path)


def refuse_pickle(path: Path) -> None:
    """Raises `StartupError` for a file whose name says that it is pickled."""
    if path.suffix.lower() in _PICKLED_SUFFIXES:
        raise StartupError(
            f"{path} is a pickle, which may run any code: convert the model to safetensors or GGUF", param="model"
        )
