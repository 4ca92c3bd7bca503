"""`cluster.gguf_file` on files made byte by byte: every value type, and every way a header can lie."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.errors import StartupError
from cluster.gguf_file import GgufFile

ROOT = Path(__file__).parents[2]
U32, F32, BOOL, STRING, ARRAY, U64, I16 = 4, 6, 7, 8, 9, 10, 3


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(key: str, kind: int, data: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + data


def array(kind: int, items: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


def write(
    path: Path,
    values: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    alignment: int = 32,
    version: int = 3,
) -> Path:
    values, tensors = values or [], tensors or []
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values)) + b"".join(values + tensors)
    path.write_bytes(header + bytes(-len(header) % alignment) + data)
    return path


def test_values_of_every_kind_are_decoded(tmp_path: Path) -> None:
    values = [
        value("count", U32, struct.pack("<I", 7)),
        value("big", U64, struct.pack("<Q", 2**40)),
        value("small", I16, struct.pack("<h", -3)),
        value("eps", F32, struct.pack("<f", 0.5)),
        value("flag", BOOL, b"\x01"),
        value("name", STRING, string("Ďábel 😀")),
        value("tokens", ARRAY, array(STRING, [string("a"), string(""), string("čau")])),
        value("kinds", ARRAY, array(U32, [struct.pack("<I", n) for n in (1, 2, 3)])),
        value("nested", ARRAY, array(ARRAY, [array(U32, [struct.pack("<I", 5)]), array(STRING, [string("x")])])),
        value("after", U32, struct.pack("<I", 9)),
    ]
    with GgufFile(write(tmp_path / "m.gguf", values)) as file:
        decoded = {key: file.value(key) for key in file}
        assert file.value("absent") is None
        assert file.value("absent", 5) == 5
        assert "count" in file
    assert decoded == {
        "count": 7,
        "big": 2**40,
        "small": -3,
        "eps": 0.5,
        "flag": True,
        "name": "Ďábel 😀",
        "tokens": ["a", "", "čau"],
        "kinds": [1, 2, 3],
        "nested": [[5], ["x"]],
        "after": 9,
    }


def test_tensors_are_found_at_the_files_own_alignment(tmp_path: Path) -> None:
    values = [value("general.alignment", U32, struct.pack("<I", 128))]
    tensors = [tensor("a", (2, 3), 0, 0), tensor("b", (4,), 0, 128)]
    data = struct.pack("<6f", *range(6)).ljust(128, b"\0") + struct.pack("<4f", 9, 8, 7, 6)
    file = GgufFile(write(tmp_path / "m.gguf", values, tensors, data, alignment=128))
    assert file.tensors["a"].shape == (2, 3)
    assert file.rows("a").view("<f4").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.rows("b").view("<f4").tolist() == [[9, 8, 7, 6]]
    file.close()


def test_rows_outlive_the_file(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path / "m.gguf", [], [tensor("a", (2,), 0, 0)], struct.pack("<2f", 1, 2)))
    rows = file.rows("a")
    file.close()
    file.close()
    assert rows.view("<f4").tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("values", "tensors", "message"),
    [
        ([value("x", STRING, struct.pack("<Q", 2**63))], [], "runs past the end"),
        ([value("x", ARRAY, struct.pack("<IQ", U32, 2**62))], [], "runs past the end"),
        ([value("x", ARRAY, struct.pack("<IQ", STRING, 2**62))], [], "corrupt"),
        ([value("x", 77, b"1234")], [], "unknown type 77"),
        ([value("x", ARRAY, struct.pack("<IQ", ARRAY, 1) * 9)], [], "unknown type"),
        ([], [tensor("a", (2**40, 2**30), 0, 0)], "truncated"),
        ([], [tensor("a", (2,), 0, 2**63)], "truncated"),
        ([], [tensor("a", (2,), 999, 0)], "unknown type 999"),
        ([], [tensor("a", (31,), 2, 0)], "no multiple of 32"),
        ([], [tensor("a", (1, 1, 1, 1, 1), 0, 0)], "has 5 dimensions"),
        ([], [tensor("a", (1,), 0, 0), tensor("a", (1,), 0, 0)], "there twice"),
        ([value("general.alignment", U32, struct.pack("<I", 0))], [], "general.alignment is 0"),
        ([value("general.alignment", STRING, string("x"))], [], "general.alignment is 'x'"),
    ],
)
def test_f35_headers_that_lie_are_refused_in_one_line(
    values: list[bytes], tensors: list[bytes], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", values, tensors, bytes(64))
    with pytest.raises(StartupError, match=message) as caught:
        GgufFile(path)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 512 + len(str(path))


def test_other_versions_and_byte_orders_are_refused(tmp_path: Path) -> None:
    for version in (1, 4, 0x03000000):
        with pytest.raises(StartupError, match="little-endian versions 2 and 3"):
            GgufFile(write(tmp_path / "m.gguf", version=version))
    GgufFile(write(tmp_path / "m.gguf", version=2)).close()


def test_empty_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(b"GGUF\x03")
    (tmp_path / "text").write_bytes(b"hello world, this is no model")
    for name, message in [
        ("empty", "is empty"),
        ("absent", "No such file"),
        ("short", "corrupt"),
        ("text", "no GGUF magic"),
    ]:
        with pytest.raises(StartupError, match=message):
            GgufFile(tmp_path / name)
    with pytest.raises(StartupError, match="Is a directory"):
        GgufFile(tmp_path)


def test_reading_a_header_imports_no_torch() -> None:
    code = "import sys, cluster.gguf_file; sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    assert subprocess.run([sys.executable, "-c", code], timeout=60, env=environment).returncode == 0
