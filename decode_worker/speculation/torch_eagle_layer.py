"""A drafter's layer in torch and float32: the reference, and what serves where the native library was not built."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decode_worker.speculation.confident_tree import Law, likeliest
from decode_worker.speculation.eagle_layer import BLOCK_TOKENS, Fusion, Reading
from decode_worker.speculation.small_products import FloatArray, make_product, unit_rms
from engine.kv_memory import KvMemory
from engine.step import StepInput
from engine.torch_runner import TorchRunner
from engine.weights.weight_source import WeightSource


class TorchEagleLayer:
    """Implements `eagle_layer.EagleLayer`, context after context."""

    def __init__(self, fusion: Fusion, weights: WeightSource, memory: KvMemory) -> None:
        self.tap_layers = fusion.tap_layers
        self._vocabulary: list[int] = fusion.vocabulary.tolist()
        self._eps = weights.config.rms_norm_eps
        self._embedding = fusion.embedding.clone()  # it may be a mapped file, which may be replaced
        self._fuse_first = make_product(fusion.first)
        self._fuse_next = make_product(fusion.following)
        self._tap_norm, self._state_norm = (
            None if norm is None else norm.float().numpy() for norm in (fusion.tap_norm, fusion.state_norm)
        )
        self._memory = memory
        self._runner = TorchRunner(weights, memory)

    def guess(self, readings: Sequence[Reading], min_reach: float) -> list[list[Law]]:
        return [self._guess(reading, min_reach) for reading in readings]

    def close(self) -> None:
        self._memory.close()

    def _guess(self, reading: Reading, min_reach: float) -> list[Law]:
        count = len(reading.token_ids)
        states = self._scaled(reading.taps, self._tap_norm).reshape(count, -1)
        inputs = self._fuse_first(np.concatenate((states, self._embedded(reading.token_ids)), axis=1))
        laws: list[Law] = []
        reach, ahead = 1.0, 0
        while True:
            logits, state = self._forward(reading, ahead, inputs)
            laws.append(likeliest(logits, self._vocabulary))
            reach *= laws[-1].probabilities[0]
            if len(laws) >= reading.num_guesses or reach < min_reach:
                return laws
            ahead += len(inputs)
            own = self._scaled(state[None], self._state_norm)
            inputs = self._fuse_next(np.concatenate((own, self._embedded(laws[-1].token_ids[:1])), axis=1))

    def _scaled(self, states: FloatArray, norm: FloatArray | None) -> FloatArray:
        scaled = unit_rms(states, self._eps)
        return scaled if norm is None else unit_rms(scaled * norm, self._eps)

    def _embedded(self, token_ids: Sequence[int]) -> FloatArray:
        rows: FloatArray = self._embedding[list(token_ids)].float().numpy()
        return unit_rms(rows, self._eps)

    def _forward(self, reading: Reading, ahead: int, inputs: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Reads rows behind what is cached and `ahead` more; logits [draft vocab] and state [hidden] of the last."""
        count, first = len(inputs), reading.num_cached + ahead
        places = np.arange(first, first + count)
        slots = reading.blocks[places // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + places % BLOCK_TOKENS
        first_position = reading.first_position + ahead
        output = self._runner.forward(
            StepInput(
                token_ids=np.zeros(count, np.int32),
                positions=np.arange(first_position, first_position + count, dtype=np.int32),
                slots=slots,
                query_starts=np.array([0, count], np.int32),
                context_lens=np.array([first + count], np.int32),
                block_tables=reading.blocks[None],
                logit_rows=np.array([count - 1], np.int32),
                tap_layers=(0,),
                inputs=np.ascontiguousarray(inputs),
            ),
            None,
        )
        if output.taps is None:
            raise ValueError("the runner gave no hidden states")
        return output.logits[0].numpy(), output.taps[0, 0].numpy().copy()
