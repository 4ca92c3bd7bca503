"""A model runner on the native library: packed weights, one native call for each step.

`NativeRunner` keeps `engine.step.ModelRunner`'s promise. It copies the weights into the library's own layout once, at
construction, and afterwards hands over array addresses only: Python's work in a step does not grow with the batch.
How weights become files' formats is `engine.native_weights`; scheduling and sampling are elsewhere.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cluster.errors import StartupError
from engine import native_library
from engine.kv_memory import KvMemory
from engine.model_config import ModelConfig
from engine.models.rope import query_factor, rope_frequencies
from engine.native_library import KvPool, LayerCallbackPointer, ModelSpec, ModelStatus, NumberFormat, Step
from engine.native_weights import Quantization, WeightCompression, WeightLoader
from engine.step import LayerCallback, StepInput, StepOutput
from engine.weights.weight_source import WeightSource

# The library writes whole panels of 16 logits.
PANEL_OUTPUTS = 16
_NO_CALLBACK = LayerCallbackPointer()


class _Call(NamedTuple):
    """A step's call and what it fills. Steps of one batch are one object, so addresses are looked up once for many."""

    step: StepInput
    call: Callable[[], int]
    output: StepOutput


class NativeRunner:
    """Runs one model on the CPU. Owned by the engine thread; `close` frees the packed weights.

    The tensors of a `StepOutput` are views of buffers that the next `forward` overwrites: a caller that keeps logits
    or hidden states across steps clones them.
    """

    backend = "native"
    verifies_trees = True

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        memory: KvMemory,
        *,
        dtype: str,
        quantization: Quantization = "none",
        compression: WeightCompression = "auto",
        num_threads: int = 1,
        isa: str = "",
    ) -> None:
        """`isa` picks one of `native_library.usable_isas()`; empty is the best one.

        Raises `StartupError` when the library is missing or the model is outside what it takes.
        """
        if dtype not in ("bfloat16", "float32"):
            raise StartupError(f"the native backend computes in bfloat16 or float32, not {dtype}", param="dtype")
        if config.mixture is not None:
            raise StartupError(
                f"{config.name} is a mixture of experts, which the native backend does not compute: use backend torch",
                param="backend",
            )
        self.config = config
        self.quantization: Quantization = quantization
        self._library = native_library.load_library()
        self._memory = memory  # keeps the pool mapped while the library holds its address
        self._logits_stride = -(-config.vocab_size // PANEL_OUTPUTS) * PANEL_OUTPUTS
        self._logits = np.empty((0, self._logits_stride), np.float32)
        self._hidden = np.empty((0, config.hidden_size), np.float32)
        self._taps = np.empty((0, 0, config.hidden_size), np.float32)
        self._tap_layers = np.empty(0, np.int32)
        self._most_likely = np.empty(0, np.int32)
        self._last: _Call | None = None
        self._model = ctypes.c_void_p(_create_model(self._library, config, num_threads, isa))
        try:
            loader = WeightLoader(self._library, self._model, weights, dtype, quantization, compression)
            loader.load(config)
            self.weight_formats = loader.formats
            self._attach_pool(memory)
        except BaseException:
            self.close()
            raise

    def forward(self, step: StepInput, layer_done: LayerCallback | None) -> StepOutput:
        """Runs the step; see `ModelRunner.forward`. An exception of `layer_done` is raised after the step has ended.

        Raises `EngineFailure` for arrays that point outside the model or the pool; nothing was written then.
        """
        if layer_done is not None:
            failure: list[BaseException] = []
            native_library.check(self.native_call(step, _guarded(layer_done, failure))())
            if failure:
                raise failure[0]
            return self._output(step)
        last = self._last
        if last is None or last.step is not step:
            last = _Call(step, self.native_call(step), self._output(step))
            self._last = last
        native_library.check(last.call())
        return last.output

    def _output(self, step: StepInput) -> StepOutput:
        """Views of what the call for this step fills."""
        num_rows, num_taps = step.logit_rows.shape[0], len(step.tap_layers)
        return StepOutput(
            logits=torch.from_numpy(self._logits[:num_rows, : self.config.vocab_size]),
            hidden=torch.from_numpy(self._hidden[:num_rows]),
            taps=torch.from_numpy(self._taps[:num_rows]) if num_taps else None,
            most_likely=self._most_likely[:num_rows],
        )

    def native_call(self, step: StepInput, callback: ctypes._FuncPointer = _NO_CALLBACK) -> Callable[[], int]:
        """The one call that computes the step, ready to be made: benchmarks time it alone."""
        self._last = None  # the buffers may move
        num_rows = step.logit_rows.shape[0]
        if num_rows > self._logits.shape[0]:
            self._logits = np.empty((num_rows, self._logits_stride), np.float32)
            self._hidden = np.empty((num_rows, self.config.hidden_size), np.float32)
            self._most_likely = np.empty(num_rows, np.int32)
        if self._taps.shape[0] < num_rows or self._taps.shape[1] != len(step.tap_layers):
            self._taps = np.empty((num_rows, len(step.tap_layers), self.config.hidden_size), np.float32)
        arguments = self._step_arguments(step)
        return partial(
            self._library.tandem_model_forward,
            self._model,
            ctypes.byref(arguments),
            self._logits.ctypes.data,
            self._logits_stride,
            self._hidden.ctypes.data,
            callback,
        )

    @property
    def native_model(self) -> ctypes.c_void_p:
        """For calls that drive this model from within the library; valid until `close`."""
        return self._model

    def status(self) -> dict[str, object]:
        """What `tandem status` shows of this backend."""
        status = ModelStatus()
        self._library.tandem_model_status(self._model, ctypes.byref(status))
        return {
            "backend": self.backend,
            "isa": self._library.tandem_model_isa(self._model).decode(),
            "usable_isas": list(native_library.usable_isas()),
            "num_threads": status.num_threads,
            "quantization": self.quantization,
            "weight_formats": dict(self.weight_formats),
            "packed_bytes": status.packed_bytes,
            "compressed_exceptions": status.compressed_exceptions,
            "compressed_plain_panels": status.compressed_plain_panels,
            "matrices_beyond_half": status.matrices_beyond_half,
            "huge_pages_requested_bytes": status.huge_page_bytes,
            "huge_pages_granted_bytes": _huge_bytes_in(self._weight_ranges()),
            "workspace_bytes": status.workspace_bytes,
        }

    def kernel_details(self) -> dict[str, str]:
        """The same in short, for a worker's details: what the processor runs and how the weights lie in memory."""
        status = ModelStatus()
        self._library.tandem_model_status(self._model, ctypes.byref(status))
        details = {
            "isa": self._library.tandem_model_isa(self._model).decode(),
            "weights": " + ".join(sorted(self.weight_formats)),
            "weight_bytes": str(status.packed_bytes),
            "weight_bytes_on_huge_pages": str(_huge_bytes_in(self._weight_ranges())),
        }
        if NumberFormat.BF16_COMPRESSED.name in self.weight_formats:
            details["compressed_exceptions"] = str(status.compressed_exceptions)
            details["compressed_plain_panels"] = str(status.compressed_plain_panels)
        if status.matrices_beyond_half:
            details["matrices_beyond_half"] = str(status.matrices_beyond_half)
        return details

    def close(self) -> None:
        """Frees weights and threads (idempotent). No step may be running."""
        if self._model:
            self._library.tandem_model_destroy(self._model)
            self._model = ctypes.c_void_p()

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self.close()

    def _step_arguments(self, step: StepInput) -> Step:
        if len(step.tap_layers) != self._tap_layers.shape[0] or tuple(self._tap_layers) != step.tap_layers:
            self._tap_layers = np.array(step.tap_layers, np.int32)
        if step.inputs is not None and step.inputs.shape != (step.num_tokens, self.config.hidden_size):
            raise TypeError(f"a step's inputs are [tokens, {self.config.hidden_size}], got {step.inputs.shape}")
        return Step(
            _address(step.token_ids, np.int32),
            _address(step.positions, np.int32),
            _address(step.slots, np.int64),
            _address(step.query_starts, np.int32),
            _address(step.context_lens, np.int32),
            _address(step.block_tables, np.int32),
            _address(step.logit_rows, np.int32),
            step.token_ids.shape[0],
            step.context_lens.shape[0],
            step.block_tables.shape[1],
            step.logit_rows.shape[0],
            None if step.inputs is None else _address(step.inputs, np.float32),
            self._tap_layers.ctypes.data,
            self._taps.ctypes.data,
            len(step.tap_layers),
            None if step.tree_masks is None else _address(step.tree_masks, np.int32),
            self._most_likely.ctypes.data,
            int(step.only_most_likely),
        )

    def _attach_pool(self, memory: KvMemory) -> None:
        layout = memory.layout
        expected = (self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)
        if (layout.num_layers, layout.num_kv_heads, layout.head_dim) != expected:
            raise StartupError(f"the KV pool {layout} does not fit the model (layers, heads, size: {expected})")
        if layout.dtype not in ("bfloat16", "float32"):
            raise StartupError(f"backend native keeps KV in bfloat16 or float32, not {layout.dtype}", param="kv_dtype")
        pool = KvPool(memory.address, memory.num_blocks, layout.block_tokens, int(layout.dtype == "bfloat16"))
        native_library.check(self._library.tandem_model_attach_pool(self._model, ctypes.byref(pool)))

    def _weight_ranges(self) -> list[tuple[int, int]]:
        address, num_bytes = ctypes.c_uint64(), ctypes.c_uint64()
        ranges: list[tuple[int, int]] = []
        while self._library.tandem_model_memory(
            self._model, len(ranges), ctypes.byref(address), ctypes.byref(num_bytes)
        ):
            ranges.append((address.value, address.value + num_bytes.value))
        return ranges


def _create_model(library: ctypes.CDLL, config: ModelConfig, num_threads: int, isa: str) -> int:
    spec = ModelSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        sliding_window=config.sliding_window,
        rms_norm_eps=config.rms_norm_eps,
        attention_scale=query_factor(config.rope_scaling) / math.sqrt(config.head_dim),
        num_threads=num_threads,
    )
    frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling).astype(np.float32)
    model = library.tandem_model_create(ctypes.byref(spec), frequencies.ctypes.data, isa.encode())
    if not model:
        raise StartupError(f"native backend: {native_library.last_error()}; use backend torch")
    return int(model)


def _address(array: npt.NDArray[Any], dtype: type) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise TypeError(f"a step's arrays are contiguous {dtype.__name__}, got {array.dtype} strides {array.strides}")
    return array.ctypes.data


def _guarded(layer_done: LayerCallback, failure: list[BaseException]) -> ctypes._FuncPointer:
    """ctypes prints and drops exceptions of a callback: this keeps the first one for `forward` to raise."""

    def call(layer: int) -> None:
        try:
            if not failure:
                layer_done(layer)
        except BaseException as error:
            failure.append(error)

    return LayerCallbackPointer(call)


def _huge_bytes_in(ranges: list[tuple[int, int]]) -> int:
    """Bytes of these address ranges that the kernel says are on huge pages; 0 where it does not say."""
    granted = 0
    inside = False
    try:
        with open("/proc/self/smaps", encoding="ascii", errors="replace") as smaps:
            for line in smaps:
                name, _, rest = line.partition(" ")
                if "-" in name and not name.endswith(":"):
                    start, end = (int(part, 16) for part in name.split("-"))
                    inside = any(start < high and low < end for low, high in ranges)
                elif inside and name == "AnonHugePages:":
                    granted += int(rest.split()[0]) * 1024
    except OSError:
        return 0
    return granted
