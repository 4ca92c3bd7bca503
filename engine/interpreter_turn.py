"""One launch at a time where Triton interprets: its interpreter keeps the running program's place in module globals.

On a GPU a launch is a call that any thread may make, and a turn is nothing. Triton itself is not imported here.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext

_LOCK = threading.RLock()


def is_interpreting() -> bool:
    """Whether this process runs Triton's kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def interpreter_turn() -> AbstractContextManager[object]:
    """Held around launches: by a step, and by whoever moves cells beside it."""
    return _LOCK if is_interpreting() else nullcontext()
