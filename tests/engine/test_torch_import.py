"""`engine.torch_import`: what a worker's process imports of torch, seen in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

SHARED = """
import sys
from engine.torch_import import SHAPE_FUNCTIONS, import_torch_for_eager_use
"""


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SHARED + program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def imported() -> list[str]:
    """Modules of torch in a process that imports it for eager use and works with it."""
    program = """
import_torch_for_eager_use()
import torch
assert torch.arange(6.0).view(2, 3).to(torch.bfloat16).matmul(torch.ones(3, 1, dtype=torch.bfloat16)).shape == (2, 1)
print("\\n".join(sys.modules))
"""
    return run(program).split("\n")


def test_an_eager_process_has_neither_shape_functions_nor_what_only_these_import(imported: list[str]) -> None:
    assert "torch" in imported
    assert not {"torch._meta_registrations", "torch._refs", "torch._decomp.decompositions"} & set(imported)


def test_who_needs_shape_functions_still_gets_them_by_their_name() -> None:
    program = """
import_torch_for_eager_use()
import importlib
import torch
shapes = importlib.import_module(SHAPE_FUNCTIONS)
assert torch._meta_registrations is shapes
assert hasattr(shapes, "meta_mm")
print(torch.empty(2, 3, device="meta").matmul(torch.empty(3, 4, device="meta")).shape)
"""
    assert run(program) == "torch.Size([2, 4])"


def test_a_torch_that_is_there_already_stays_as_it_is() -> None:
    program = """
import torch
before = sys.modules[SHAPE_FUNCTIONS]
import_torch_for_eager_use()
assert sys.modules[SHAPE_FUNCTIONS] is before
print("same")
"""
    assert run(program) == "same"
