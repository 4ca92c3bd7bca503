"""The passes over the vocabulary that a drawn token needs, in native code: scaling, filters, argmax with noise.

The definitions are `engine.noise`'s (bit for bit) and `engine.logit_filters`'s (whose sums of exponentials may differ
in the last bits); this file only hands arrays over.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from cluster.errors import StartupError
from engine import native_library
from engine.noise import NoiseKeys


@cache
def is_usable() -> bool:
    """Whether the library is there and fits. Where it is not, the Python definition gives the same tokens."""
    try:
        native_library.load_library()
    except StartupError:
        return False
    return True


def scale_and_filter(
    logits: npt.NDArray[np.float32],
    peaks: npt.NDArray[np.float32],
    temperatures: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int32],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
    *,
    isa: str = "",
) -> None:
    """Rows of `logits` [S, vocab] become (logits - peak) / temperature, and -inf where a token is dropped, in place.

    The other arrays are [S]; a row's largest logit is its peak. Raises `StartupError` where the library is missing.
    """
    library = native_library.load_library()
    _check_rows(logits)
    native_library.check(
        library.tandem_scale_and_filter(
            isa.encode(),
            logits.ctypes.data,
            logits.strides[0] // logits.itemsize,
            *logits.shape,
            np.ascontiguousarray(peaks, np.float32).ctypes.data,
            np.ascontiguousarray(temperatures, np.float32).ctypes.data,
            np.ascontiguousarray(top_k, np.int32).ctypes.data,
            np.ascontiguousarray(top_p, np.float64).ctypes.data,
            np.ascontiguousarray(min_p, np.float64).ctypes.data,
        )
    )


def _check_rows(scaled: npt.NDArray[np.float32]) -> None:
    if scaled.dtype != np.float32 or scaled.strides[1] != scaled.itemsize:
        raise TypeError(f"scaled logits are float32 with contiguous rows, got {scaled.dtype} {scaled.strides}")


def gumbel_argmax(
    scaled: npt.NDArray[np.float32], peak_ids: npt.NDArray[np.int64], keys: NoiseKeys, *, isa: str = ""
) -> npt.NDArray[np.int64]:
    """See `engine.sampler.gumbel_argmax`. `scaled` [S, vocab] has contiguous rows.

    Raises `StartupError` where the library is missing, `EngineFailure` for a peak outside the vocabulary.
    """
    library = native_library.load_library()
    num_rows, vocab_size = scaled.shape
    columns = [np.ascontiguousarray(np.broadcast_to(column, num_rows), dtype=np.uint64) for column in keys]
    peaks = np.ascontiguousarray(peak_ids, dtype=np.int64)
    _check_rows(scaled)
    token_ids = np.empty(num_rows, np.int64)
    native_library.check(
        library.tandem_gumbel_argmax(
            isa.encode(),
            scaled.ctypes.data,
            scaled.strides[0] // scaled.itemsize,
            num_rows,
            vocab_size,
            peaks.ctypes.data,
            *(column.ctypes.data for column in columns),
            token_ids.ctypes.data,
        )
    )
    return token_ids
