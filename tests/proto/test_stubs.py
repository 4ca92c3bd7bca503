"""The committed stubs are what the .proto files generate."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from grpc_tools import protoc

REPOSITORY = Path(__file__).parents[2]
PROTO_ROOT = REPOSITORY / "proto"
PROTO_FILES = sorted((PROTO_ROOT / "tandem" / "v1").glob("*.proto"))


def test_stubs_are_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # protoc looks for its mypy plugins on PATH; they stand beside this interpreter.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    flags = ["--python_out", "--grpc_python_out", "--mypy_out=quiet", "--mypy_grpc_out=quiet"]
    outputs = [f"{flag}:{tmp_path}" if "=" in flag else f"{flag}={tmp_path}" for flag in flags]
    status = protoc.main(["protoc", f"-I{PROTO_ROOT}", *outputs, *map(str, PROTO_FILES)])
    assert status == 0
    generated = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2*.py*"))
    assert len(generated) == 4 * len(PROTO_FILES)
    stale = [str(path) for path in generated if _code(tmp_path / path) != _code(PROTO_ROOT / path)]
    assert stale == [], "run `make proto`"


def _code(path: Path) -> str:
    """The stub without the versions of the tools that wrote it."""
    return re.sub(r"(?m)^(# Protobuf Python Version.*|GRPC_GENERATED_VERSION.*)$", "", path.read_text())
