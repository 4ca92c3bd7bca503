"""The garbage collector of a process that has started: idle during the start, its objects out of sight afterwards."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own: what is frozen stays frozen.
PROGRAM = """
import gc, json, sys
from cluster.garbage import start_without_collections

class Node:
    pass

made = []
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
try:
    with start_without_collections():
        made = [Node() for _ in range(50_000)]
        during = len(collections)
        was_enabled = gc.isenabled()
        cycle = Node()
        cycle.itself = cycle
        del cycle
        if sys.argv[1:]:
            raise ValueError("the start fails")
except ValueError:
    pass
print(json.dumps({
    "during": during,
    "was_enabled": was_enabled,
    "is_enabled": gc.isenabled(),
    "frozen": gc.get_freeze_count(),
    "in_sight": len(gc.get_objects()),
    "young": gc.get_threshold()[0],
}))
"""


@pytest.mark.parametrize("arguments", [(), ("fails",)])
def test_a_start_is_not_walked_and_stays_out_of_sight(arguments: tuple[str, ...]) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    seen = json.loads(run.stdout)
    assert seen["during"] == 0
    assert not seen["was_enabled"]
    assert seen["is_enabled"]
    assert seen["frozen"] > 50_000
    assert seen["in_sight"] < 5_000
    assert seen["young"] > 700
