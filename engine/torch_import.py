"""Imports torch without its shape functions, which only compilers and tensors without data (`meta`) need.

`import torch` ends with `torch._meta_registrations`, which pulls torch's reference implementations and decompositions
in: a third of the import, half a second of each worker's start. No worker compiles or traces a model. The module is not
hidden: whoever needs it in such a process imports it by its name first.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

SHAPE_FUNCTIONS = "torch._meta_registrations"


def import_torch_for_eager_use() -> None:
    """Once in a process, before anybody imports torch; later calls change nothing."""
    if "torch" in sys.modules:
        return
    placeholder = ModuleType(SHAPE_FUNCTIONS)
    sys.modules[SHAPE_FUNCTIONS] = placeholder
    try:
        importlib.import_module("torch")
    finally:
        if sys.modules.get(SHAPE_FUNCTIONS) is placeholder:
            del sys.modules[SHAPE_FUNCTIONS]
