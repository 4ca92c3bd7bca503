"""The native library as Python sees it: where it is, its C structures and functions, its errors.

ctypes releases the GIL during each call, so a step leaves the other threads free. Knows nothing of models: that is
`engine.native_runner`. The C side of each declaration is `engine/native/tandem_native.h`.
"""

from __future__ import annotations

import ctypes
import enum
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from cluster.errors import EngineFailure, StartupError
from engine.native.build import LIBRARY_NAME, SOURCE_DIR

ABI_VERSION = 12
HOW_TO_BUILD = "build it with `python -m engine.native.build` (needs a C++17 compiler)"

# void (*)(int32_t layer)
LayerCallbackPointer = ctypes.CFUNCTYPE(None, c_int32)


class TensorKind(enum.IntEnum):
    EMBEDDING = 0
    OUTPUT = 1
    FINAL_NORM = 2
    ATTENTION_NORM = 3
    MLP_NORM = 4
    QUERY = 5
    KEY = 6
    VALUE = 7
    ATTENTION_OUTPUT = 8
    GATE = 9
    UP = 10
    DOWN = 11
    QUERY_BIAS = 12
    KEY_BIAS = 13
    VALUE_BIAS = 14
    QUERY_NORM = 15
    KEY_NORM = 16


class NumberFormat(enum.IntEnum):
    """What bytes handed to `tandem_model_load` are, and (but for F16) how the library keeps a matrix.

    BF16_COMPRESSED is BF16 without loss in 12 bits a weight, kept only, where `tandem_model_takes` says so.
    """

    F32 = 0
    BF16 = 1
    F16 = 2
    Q4_0 = 3
    Q4_1 = 4
    Q8_0 = 5
    BF16_COMPRESSED = 6


class ModelSpec(ctypes.Structure):
    _fields_ = (
        ("vocab_size", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_layers", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("sliding_window", c_int32),
        ("rms_norm_eps", c_float),
        ("attention_scale", c_float),
        ("num_threads", c_int32),
    )


class KvPool(ctypes.Structure):
    _fields_ = (
        ("address", c_void_p),
        ("num_blocks", c_int64),
        ("block_tokens", c_int32),
        ("is_bfloat16", c_int32),
    )


class Step(ctypes.Structure):
    """Addresses of one `engine.step.StepInput`'s arrays."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("logit_rows", c_void_p),
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("table_width", c_int32),
        ("num_logit_rows", c_int32),
        ("inputs", c_void_p),
        ("tap_layers", c_void_p),
        ("taps", c_void_p),
        ("num_tap_layers", c_int32),
        ("tree_masks", c_void_p),
        ("most_likely", c_void_p),
        ("only_most_likely", c_int32),
    )


class ModelStatus(ctypes.Structure):
    _fields_ = (
        ("packed_bytes", c_int64),
        ("reserved_bytes", c_int64),
        ("huge_page_bytes", c_int64),
        ("workspace_bytes", c_int64),
        ("compressed_exceptions", c_int64),
        ("compressed_plain_panels", c_int64),
        ("num_threads", c_int32),
        ("matrices_beyond_half", c_int32),
    )


class DraftSpec(ctypes.Structure):
    _fields_ = (
        ("hidden_size", c_int32),
        ("num_taps", c_int32),
        ("draft_vocab_size", c_int32),
        ("target_vocab_size", c_int32),
        ("block_tokens", c_int32),
        ("width", c_int32),
        ("format", c_int32),
        ("rms_norm_eps", c_float),
        ("embedding", c_void_p),
        ("vocabulary", c_void_p),
        ("fuse_first", c_void_p),
        ("fuse_next", c_void_p),
        ("tap_norm", c_void_p),
        ("state_norm", c_void_p),
    )


class DraftBatch(ctypes.Structure):
    _fields_ = (
        ("row_starts", c_void_p),
        ("taps", c_void_p),
        ("token_ids", c_void_p),
        ("block_tables", c_void_p),
        ("num_cached", c_void_p),
        ("first_positions", c_void_p),
        ("num_guesses", c_void_p),
        ("num_sequences", c_int32),
        ("table_width", c_int32),
        ("max_levels", c_int32),
        ("min_reach", c_float),
    )


class DraftLaws(ctypes.Structure):
    _fields_ = (("token_ids", c_void_p), ("probabilities", c_void_p), ("num_levels", c_void_p))


# name -> (result, arguments)
_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "tandem_abi_version": (c_int32, ()),
    "tandem_last_error": (c_char_p, ()),
    "tandem_usable_isas": (c_char_p, ()),
    "tandem_model_create": (c_void_p, (POINTER(ModelSpec), c_void_p, c_char_p)),
    "tandem_model_destroy": (None, (c_void_p,)),
    "tandem_model_takes": (c_int32, (c_void_p, c_int32)),
    "tandem_model_load": (c_int32, (c_void_p, c_int32, c_int32, c_int32, c_int32, c_int32, c_int32, c_void_p)),
    "tandem_model_attach_pool": (c_int32, (c_void_p, POINTER(KvPool))),
    "tandem_model_isa": (c_char_p, (c_void_p,)),
    "tandem_model_status": (None, (c_void_p, POINTER(ModelStatus))),
    "tandem_model_memory": (c_int32, (c_void_p, c_int32, POINTER(c_uint64), POINTER(c_uint64))),
    "tandem_drafter_create": (c_void_p, (c_void_p, POINTER(DraftSpec))),
    "tandem_drafter_destroy": (None, (c_void_p,)),
    "tandem_drafter_propose": (c_int32, (c_void_p, POINTER(DraftBatch), POINTER(DraftLaws))),
    "tandem_matrix_create": (c_void_p, (c_char_p, c_int32, c_int32, c_int32, c_int32, c_void_p)),
    "tandem_matrix_bytes": (c_int64, (c_void_p,)),
    "tandem_matrix_multiply": (c_int32, (c_void_p, c_void_p, c_int32, c_void_p, c_int64)),
    "tandem_matrix_row": (c_int32, (c_void_p, c_int32, c_void_p)),
    "tandem_matrix_destroy": (None, (c_void_p,)),
    "tandem_pages_create": (c_void_p, (c_void_p, c_int64)),
    "tandem_pages_reach": (None, (c_void_p, c_int64, c_int64)),
    "tandem_pages_make_way": (None, (c_void_p, c_int32)),
    "tandem_pages_touched": (c_int64, (c_void_p,)),
    "tandem_pages_destroy": (None, (c_void_p,)),
    "tandem_gumbel_argmax": (
        c_int32,
        (c_char_p, c_void_p, c_int64, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    ),
    "tandem_scale_and_filter": (
        c_int32,
        (c_char_p, c_void_p, c_int64, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    ),
    "tandem_read_once": (c_int64, (c_char_p, c_void_p, c_int64)),
    "tandem_multiply_in_registers": (c_double, (c_char_p, c_int32, c_int32)),
    "tandem_model_forward": (c_int32, (c_void_p, POINTER(Step), c_void_p, c_int64, c_void_p, LayerCallbackPointer)),
}


def library_path() -> Path:
    """Where the build puts the library: beside its sources, in a checkout as in a wheel."""
    return SOURCE_DIR / LIBRARY_NAME


def is_available() -> bool:
    """Whether the library was built. That it loads and fits is `load_library`'s word."""
    return library_path().is_file()


@cache
def load_library() -> ctypes.CDLL:
    """The library with typed functions. Raises `StartupError` when it is missing, broken or of another version."""
    path = library_path()
    if not path.is_file():
        raise StartupError(f"the native CPU library is not built: {HOW_TO_BUILD}, or use backend torch")
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
        version = library.tandem_abi_version()
    except (OSError, AttributeError) as error:
        raise StartupError(f"the native CPU library does not load ({error}): {HOW_TO_BUILD}") from error
    if version != ABI_VERSION:
        raise StartupError(
            f"the native CPU library is of version {version}, this code needs {ABI_VERSION}: {HOW_TO_BUILD}"
        )
    return library


def usable_isas() -> tuple[str, ...]:
    """Instruction sets that the library holds and this processor runs, best first."""
    return tuple(load_library().tandem_usable_isas().decode().split(","))


def last_error() -> str:
    """What went wrong in the last call that failed on this thread."""
    return str(load_library().tandem_last_error().decode(errors="replace"))


def check(return_code: int) -> None:
    """Raises `EngineFailure` with the library's message unless the call succeeded."""
    if return_code != 0:
        raise EngineFailure(f"native engine: {last_error()}")
