"""A drafter's layer in native code: all guesses of all requests in one call, weights in 4 bits.

Between two steps of the target every line is cold, in the interpreter as in the drafter: what one call does not do
there, Python would do from memory. The C++ side is `engine/native/draft_chain.h`; here are arrays and addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from cluster.errors import StartupError
from decode_worker.speculation.confident_tree import WIDTH, Law
from decode_worker.speculation.eagle_layer import BLOCK_TOKENS, Fusion, Reading
from decode_worker.speculation.small_products import fits_blocks
from engine import native_library
from engine.kv_memory import KvMemory
from engine.native_library import DraftBatch, DraftLaws, DraftSpec, NumberFormat
from engine.native_runner import NativeRunner
from engine.weights.weight_source import WeightSource


class NativeEagleLayer:
    """Implements `eagle_layer.EagleLayer`."""

    def __init__(self, fusion: Fusion, weights: WeightSource, memory: KvMemory) -> None:
        config = weights.config
        self.tap_layers = fusion.tap_layers
        self._memory = memory
        self._library = native_library.load_library()
        self._width = min(WIDTH, config.vocab_size)
        widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        is_small = all(map(fits_blocks, widths))
        quantization: Literal["int4", "none"] = "int4" if is_small else "none"
        self._runner = NativeRunner(config, weights, memory, dtype="float32", quantization=quantization)
        # The library reads rows of it for as long as this lives.
        self._embedding = fusion.embedding.to(torch.bfloat16, copy=True).contiguous().view(torch.uint16).numpy()
        vocabulary = fusion.vocabulary.to(torch.int32).contiguous()
        first, following = fusion.first.float().contiguous(), fusion.following.float().contiguous()
        tap_norm, state_norm = (
            None if norm is None else norm.float().contiguous() for norm in (fusion.tap_norm, fusion.state_norm)
        )
        spec = DraftSpec(
            hidden_size=config.hidden_size,
            num_taps=len(fusion.tap_layers),
            draft_vocab_size=config.vocab_size,
            target_vocab_size=len(self._embedding),
            block_tokens=BLOCK_TOKENS,
            width=self._width,
            format=NumberFormat.Q4_1 if is_small else NumberFormat.BF16,
            rms_norm_eps=config.rms_norm_eps,
            embedding=self._embedding.ctypes.data,
            vocabulary=vocabulary.data_ptr(),
            fuse_first=first.data_ptr(),
            fuse_next=following.data_ptr(),
            tap_norm=None if tap_norm is None else tap_norm.data_ptr(),
            state_norm=None if state_norm is None else state_norm.data_ptr(),
        )
        self._drafter = ctypes.c_void_p(
            self._library.tandem_drafter_create(self._runner.native_model, ctypes.byref(spec))
        )
        if not self._drafter:
            self._runner.close()
            raise StartupError(f"native drafter: {native_library.last_error()}")

    def guess(self, readings: Sequence[Reading], min_reach: float) -> list[list[Law]]:
        if not readings:
            return []
        max_levels = max(reading.num_guesses for reading in readings)
        row_starts = np.cumsum([0, *(len(reading.token_ids) for reading in readings)], dtype=np.int32)
        taps = np.concatenate([reading.taps for reading in readings]).astype(np.float32, copy=False)
        token_ids = np.array([token_id for reading in readings for token_id in reading.token_ids], np.int32)
        tables = np.stack([reading.blocks for reading in readings])
        columns = np.array(
            [(reading.num_cached, reading.first_position, reading.num_guesses) for reading in readings], np.int32
        ).T.copy()
        guesses = np.empty((len(readings), max_levels, self._width), np.int32)
        probabilities = np.empty(guesses.shape, np.float32)
        num_levels = np.empty(len(readings), np.int32)
        batch = DraftBatch(
            row_starts.ctypes.data,
            taps.ctypes.data,
            token_ids.ctypes.data,
            tables.ctypes.data,
            columns[0].ctypes.data,
            columns[1].ctypes.data,
            columns[2].ctypes.data,
            len(readings),
            tables.shape[1],
            max_levels,
            min_reach,
        )
        laws = DraftLaws(guesses.ctypes.data, probabilities.ctypes.data, num_levels.ctypes.data)
        native_library.check(
            self._library.tandem_drafter_propose(self._drafter, ctypes.byref(batch), ctypes.byref(laws))
        )
        levels = zip(guesses.tolist(), probabilities.tolist(), num_levels.tolist(), strict=True)
        return [
            [Law(tuple(ids), tuple(chances)) for ids, chances in zip(tokens[:count], law[:count], strict=True)]
            for tokens, law, count in levels
        ]

    def close(self) -> None:
        if self._drafter:
            self._library.tandem_drafter_destroy(self._drafter)
            self._drafter = ctypes.c_void_p()
            self._runner.close()
            self._memory.close()

    def __del__(self) -> None:
        if getattr(self, "_drafter", None):
            self._library.tandem_drafter_destroy(self._drafter)
