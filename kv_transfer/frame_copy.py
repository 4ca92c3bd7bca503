"""Copying a frame and taking its digest in one pass: natively where the library is built, else run by run in Python.

One pass, because memory is what copying costs: by itself, on one thread, digest and copy take as long as the copy
alone, two passes half as long again. The interpreter's lock is free during the native pass, once for a frame.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache

from cluster.byte_runs import EqualRuns, address_of
from kv_transfer.frame import DIGEST_BYTES, RunningDigest
from kv_transfer.native.build import LIBRARY_NAME, SOURCE_DIR

HOW_TO_BUILD = "build it with `python -m kv_transfer.native.build` (needs a C++17 compiler)"

_Digest = ctypes.c_char * DIGEST_BYTES

_log = logging.getLogger(__name__)


def copy_frame(sources: Sequence[memoryview], targets: Sequence[memoryview], *, past_caches: bool = False) -> bytes:
    """Copies each source into the target of its size; the digest (`frame.digest_of`) of what the targets hold then.

    `past_caches`: nobody reads the targets soon. Raises `ValueError` when sources and targets are not alike.
    """
    library = _load_library()
    if library is not None and (digest := _copy_natively(library, sources, targets, past_caches)) is not None:
        return digest
    running = RunningDigest()
    for source, target in zip(sources, targets, strict=True):
        target[:] = source
        running.update(target)
    return running.digest()


def is_native() -> bool:
    """Whether the library is there. Without it the same bytes move, slower."""
    return _load_library() is not None


def _copy_natively(
    library: ctypes.CDLL, sources: Sequence[memoryview], targets: Sequence[memoryview], past_caches: bool
) -> bytes | None:
    """None when these runs are not for the library: their sizes differ, or are no multiple of 64."""
    here, there = _as_equal_runs(sources), _as_equal_runs(targets)
    if here is None or there is None:
        return None
    if here.run_bytes != there.run_bytes or len(here) != len(there):
        raise ValueError(f"{len(here)} runs of {here.run_bytes} bytes into {len(there)} of {there.run_bytes}")
    digest = _Digest()
    result = library.tandem_copy_frame(
        here.address, here.places.buffer_info()[0], here.stride,
        there.address, there.places.buffer_info()[0], there.stride,
        len(here), here.run_bytes, past_caches, digest,
    )  # fmt: skip
    return digest.raw if result == 0 else None


def _as_equal_runs(runs: Sequence[memoryview]) -> EqualRuns | None:
    if isinstance(runs, EqualRuns):
        return runs
    if len(runs) != 1:
        return None
    return EqualRuns(runs[0], address_of(runs[0]), 0, (0,), 0, runs[0].nbytes)


@cache
def _load_library() -> ctypes.CDLL | None:
    path = SOURCE_DIR / LIBRARY_NAME
    try:
        library = ctypes.CDLL(str(path))
        function = library.tandem_copy_frame
    except (OSError, AttributeError) as error:
        _log.warning("KV frames are copied by Python, the native copy cannot be loaded (%s): %s", error, HOW_TO_BUILD)
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (pointer, pointer, size, pointer, pointer, size, size, size, ctypes.c_int32, pointer)
    function.restype = ctypes.c_int32
    return library
