"""Keeps the garbage collector off the request path of a process whose start made hundreds of thousands of objects.

A full collection walks every container that lives: after the imports of a server that is tens of milliseconds, in the
middle of whatever request happens to be decided. What the start made lives for ever, so it is taken out of the
collector's sight, and young objects are looked at in larger lots. Memory is still freed at once by counting; cycles are
still found.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Objects made before the youngest are looked at (Python's default: 700), and how many such looks before the next older.
YOUNG_OBJECTS, YOUNG_LOOKS, MIDDLE_LOOKS = 20_000, 20, 50


@contextmanager
def start_without_collections() -> Iterator[None]:
    """A start inside of which the collector does not walk, again and again, what is made to stay. Behind it, or behind
    its failure, the collector works as after `settle_objects`."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        settle_objects()


def settle_objects() -> None:
    """Called once, when the start is over. Side effect: garbage of the start is freed."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_LOOKS, MIDDLE_LOOKS)
