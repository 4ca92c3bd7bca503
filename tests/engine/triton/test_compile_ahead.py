"""Every kernel compiles for GPUs that are not here, and no decode kernel spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from engine.kernels.triton.compile_ahead import describe_constants

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_compiles_and_no_decode_kernel_spills(arch: int) -> None:
    # Not in this process: the interpreter was chosen here for all kernels.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, "-m", "engine.kernels.triton.compile_ahead", "--arch", str(arch)],
        cwd=REPOSITORY,
        env={**environment, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'proto'}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    kernels = [json.loads(line) for line in finished.stdout.splitlines()]
    assert {kernel["name"] for kernel in kernels} >= {
        "split_kernel",
        "merge_kernel",
        "prefill_kernel",
        "kv_write_kernel",
    }
    assert all(kernel["registers"] > 0 for kernel in kernels)
    table = (REPOSITORY / "docs/kernels.md").read_text()
    rows = [f"| {kernel['name']} | {describe_constants(kernel['constants'])} |" for kernel in kernels]
    missing = [row for row in rows if row not in table]
    assert not missing, "docs/kernels.md is older than the kernels: it says how it is made"
    assert [kernel for kernel in kernels if kernel["is_decode"] and kernel["spilled_bytes"]] == []
