"""Builds the native library: each file of `kernels/` for its own instruction set, one shared library out of all.

    python -m engine.native.build [--output-dir DIR] [--force]

Needs a C++17 compiler (`CXX`, else c++, g++ or clang++) and nothing else: no Python headers, no torch. `setup.py` calls
`build`, and an install without a compiler goes on without the library. Knows nothing of Python's ABI or of packaging.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cluster.compiler import build_command, compiles, find_compiler, run_compiler

Source = tuple[Path, tuple[str, ...]]  # a file and its flags

SOURCE_DIR = Path(__file__).resolve().parent
LIBRARY_NAME = "libtandem_native.so"
# -fno-strict-aliasing: packed buffers are read as words and written as halves and bytes.
# -ffp-contract=off: a product and a sum are fused only where the source says so, so that two builds agree.
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-pthread",
    "-Wall",
    "-Wextra",
)
AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
# GCC 12 reports uninitialised values inside its own AVX-512 headers (its bug 105593).
QUIET_HEADERS = ("-Wno-uninitialized", "-Wno-maybe-uninitialized")
AVX512_FLAGS = (*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512",
                *QUIET_HEADERS)  # fmt: skip
AVX512_BF16_FLAGS = (*AVX512_FLAGS, "-mavx512vnni", "-mavx512bf16")
# What not every compiler knows (GCC from 12, clang from 14): the flag of one file, by a macro the others know of it.
HALF_FILE, HALF_FLAG, HALF_MACRO = "avx512_fp16.cpp", "-mavx512fp16", "-DTANDEM_AVX512_FP16"
HALF_PROGRAM = 'int has_half() { return __builtin_cpu_supports("avx512fp16"); }\n'
VARIANT_FLAGS = {
    "avx2.cpp": AVX2_FLAGS,
    "avx512.cpp": AVX512_FLAGS,
    "avx512_bf16.cpp": AVX512_BF16_FLAGS,
    "avx512_bf16_fma.cpp": AVX512_BF16_FLAGS,
    HALF_FILE: (*AVX512_BF16_FLAGS, "-mavx512vbmi2", HALF_FLAG),
    "amx.cpp": AVX512_BF16_FLAGS,  # the tile instructions are assembly and need no flag
    "amx_emulated.cpp": AVX512_BF16_FLAGS,
}


def build(output_dir: Path = SOURCE_DIR, *, force: bool = False) -> Path:
    """Compiles what changed since the last build and returns the library's path. Raises `BuildError`."""
    library = output_dir / LIBRARY_NAME
    digest_file = output_dir / f"{LIBRARY_NAME}.digest"
    compiler = find_compiler()
    files = sources(compiler)
    digest = _digest(compiler, files)
    if not force and library.is_file() and digest_file.is_file() and digest_file.read_text() == digest:
        return library
    say_what_is_left_out(compiler, files)
    output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tandem-native-") as directory:
        objects = _compile_all(compiler, files, Path(directory))
        linked = Path(directory) / LIBRARY_NAME
        run_compiler([*compiler, "-shared", "-pthread", "-o", str(linked), *map(str, objects)])
        # A rename: a process that has the old library mapped keeps it.
        staged = output_dir / f".{LIBRARY_NAME}.{os.getpid()}"
        shutil.copyfile(linked, staged)
        staged.replace(library)
    digest_file.write_text(digest)
    return library


def sources(compiler: Sequence[str]) -> list[Source]:
    """Each file to compile with its instruction-set flags; off x86-64 only the portable kernels."""
    on_x86 = platform.machine().lower() in ("x86_64", "amd64")
    has_half = on_x86 and compiles([*compiler, HALF_FLAG], HALF_PROGRAM)
    common = ("-DTANDEM_X86",) * on_x86 + (HALF_MACRO,) * has_half
    files = [(path, common) for path in sorted(SOURCE_DIR.glob("*.cpp"))]
    files.append((SOURCE_DIR / "kernels" / "portable.cpp", ()))
    if on_x86:
        variants = [(name, flags) for name, flags in VARIANT_FLAGS.items() if has_half or name != HALF_FILE]
        files.extend((SOURCE_DIR / "kernels" / name, flags) for name, flags in variants)
    return files


def say_what_is_left_out(compiler: Sequence[str], files: Sequence[Source]) -> None:
    """On standard error: kernels that this compiler cannot build, and what runs instead."""
    if platform.machine().lower() in ("x86_64", "amd64") and all(path.name != HALF_FILE for path, _ in files):
        sys.stderr.write(
            f"{compiler[0]} does not know {HALF_FLAG} (GCC 12 does, clang 14 too): built without {HALF_FILE}, the "
            "products in half precision of Intel cores with AVX512-FP16 and no AMX; these take avx512_bf16_fma\n"
        )


def _digest(compiler: Sequence[str], files: Sequence[Source]) -> str:
    """What the library depends on: sources, flags, compiler."""
    digest = hashlib.sha256(repr((list(compiler), COMMON_FLAGS, files)).encode())
    for path in sorted([*SOURCE_DIR.rglob("*.cpp"), *SOURCE_DIR.rglob("*.h")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _compile_all(compiler: Sequence[str], files: Sequence[Source], directory: Path) -> list[Path]:
    def compile_one(item: Source) -> Path:
        source, flags = item
        target = directory / f"{source.parent.name}-{source.stem}.o"
        run_compiler([*compiler, *COMMON_FLAGS, *flags, f"-I{SOURCE_DIR}", "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(compile_one, files))


def main() -> int:
    return build_command(build, "Build the native CPU library.", SOURCE_DIR)


if __name__ == "__main__":
    sys.exit(main())
