"""Which files the native library is built from: one of them needs a flag that older compilers do not know."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.compiler import find_compiler
from engine.native import build

pytestmark = pytest.mark.skipif(
    os.uname().machine.lower() not in ("x86_64", "amd64"), reason="kernels of x86-64 are built there alone"
)


def old_compiler(folder: Path) -> list[str]:
    """This machine's compiler, without the flag."""
    script = folder / "old-compiler"
    real = " ".join(find_compiler())
    script.write_text(
        f'#!/bin/sh\ncase " $* " in *" {build.HALF_FLAG} "*) echo unrecognized >&2; exit 1;; esac\nexec {real} "$@"\n'
    )
    script.chmod(0o755)
    return [str(script)]


def built_with(compiler: list[str]) -> tuple[set[str], bool]:
    """The kernels' files, and whether the others are told of products in half precision."""
    files = build.sources(compiler)
    kernels = {path.name for path, _ in files if path.parent.name == "kernels"}
    return kernels, any(build.HALF_MACRO in flags for _, flags in files)


def test_half_precision_is_left_out_where_the_compiler_does_not_know_it_and_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = old_compiler(tmp_path)
    every_file = {*build.VARIANT_FLAGS, "portable.cpp"}
    assert built_with(old) == (every_file - {build.HALF_FILE}, False)
    build.say_what_is_left_out(old, build.sources(old))
    said = capsys.readouterr().err
    assert build.HALF_FLAG in said
    assert "avx512_bf16_fma" in said


def test_a_compiler_that_knows_it_builds_every_file_and_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    compiler = find_compiler()
    kernels, told = built_with(compiler)
    if build.HALF_FILE not in kernels:
        pytest.skip("this machine's compiler does not know it")
    assert (kernels, told) == ({*build.VARIANT_FLAGS, "portable.cpp"}, True)
    build.say_what_is_left_out(compiler, build.sources(compiler))
    assert capsys.readouterr().err == ""
