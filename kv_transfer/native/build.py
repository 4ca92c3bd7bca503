"""Builds the library that copies and digests frames in one pass.

    python -m kv_transfer.native.build [--output-dir DIR] [--force]

Needs a C++17 compiler; it chooses among instruction sets at run time. `setup.py` calls `build`; without a compiler
`kv_transfer.frame_copy` does the same in Python, slower.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from cluster.compiler import build_command, find_compiler, run_compiler

SOURCE_DIR = Path(__file__).resolve().parent
SOURCE = SOURCE_DIR / "frame_copy.cpp"
LIBRARY_NAME = "libtandem_kv.so"
# GCC 12 reports uninitialised values inside its own AVX-512 headers (its bug 105593).
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra",
         "-Wno-uninitialized", "-Wno-maybe-uninitialized")  # fmt: skip


def build(output_dir: Path = SOURCE_DIR, *, force: bool = False) -> Path:
    """Compiles it unless that was done already, and returns the library's path. Raises `BuildError`."""
    library = output_dir / LIBRARY_NAME
    digest_file = output_dir / f"{LIBRARY_NAME}.digest"
    compiler = find_compiler()
    digest = hashlib.sha256(repr((compiler, FLAGS)).encode() + SOURCE.read_bytes()).hexdigest()
    if not force and library.is_file() and digest_file.is_file() and digest_file.read_text() == digest:
        return library
    output_dir.mkdir(parents=True, exist_ok=True)
    # A rename: a process that has the old library mapped keeps it.
    staged = output_dir / f".{LIBRARY_NAME}.{os.getpid()}"
    try:
        run_compiler([*compiler, *FLAGS, "-o", str(staged), str(SOURCE)])
        staged.replace(library)
    finally:
        staged.unlink(missing_ok=True)
    digest_file.write_text(digest)
    return library


def main() -> int:
    return build_command(build, "Build the native library of KV frames.", SOURCE_DIR)


if __name__ == "__main__":
    sys.exit(main())
