"""The target writing: many turns at once, each from its prompt to the end token, hidden states kept on the way.

It runs the serving runner itself, in the dtype that serves, so that a drafter learns from the very states it will see.
A finished turn's place is taken by the next prompt in the same step. Sampled tokens use the position-keyed noise of
serving, so a turn depends on its prompt and seed alone, not on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.kv_memory import KvMemory, layout_of
from engine.model_loader import open_weights
from engine.native_runner import NativeRunner
from engine.noise import NoiseKeys
from engine.sampler import gumbel_argmax
from engine.step import StepInput

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    token_ids: tuple[int, ...]
    temperature: float
    seed: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class WrittenTurn:
    """`token_ids` [n]: what was generated, the end token included where it came.

    `taps` [n, tap layers, hidden] bfloat16: hidden states of the rows that chose them, the prompt's last one first.
    """

    prompt: TurnPrompt
    token_ids: tuple[int, ...]
    has_ended: bool
    taps: torch.Tensor


@dataclass(slots=True)
class _Place:
    """One row of the batch and the turn that is written there."""

    blocks: npt.NDArray[np.int32]
    prompt: TurnPrompt | None = None
    num_cached: int = 0
    token_ids: list[int] = field(default_factory=list)
    taps: list[torch.Tensor] = field(default_factory=list)


class TurnWriter:
    """Owns a runner and its pool. `close` frees them."""

    def __init__(
        self,
        model: Path,
        end_ids: frozenset[int],
        *,
        dtype: str,
        batch_size: int,
        max_context_tokens: int,
        tap_layers: tuple[int, ...] = (),
        num_threads: int = 1,
    ) -> None:
        weights = open_weights(model)
        try:
            self.config = weights.config
            width = -(-max_context_tokens // BLOCK_TOKENS)
            self._memory = KvMemory(layout_of(self.config, dtype, BLOCK_TOKENS), batch_size * width)
            self._runner = NativeRunner(self.config, weights, self._memory, dtype=dtype, num_threads=num_threads)
        finally:
            weights.close()
        self._end_ids = end_ids
        self._tap_layers = tap_layers
        self._max_context_tokens = max_context_tokens
        self._places = [_Place(np.arange(row * width, (row + 1) * width, dtype=np.int32)) for row in range(batch_size)]

    def write(self, prompts: Iterable[TurnPrompt]) -> Iterator[WrittenTurn]:
        """The turns in the order in which they end. Prompts are taken when a place is free."""
        source = iter(prompts)
        while True:
            for place in self._places:
                if place.prompt is None and (prompt := next(source, None)) is not None:
                    place.prompt, place.num_cached = prompt, 0
                    place.token_ids, place.taps = [], []
            busy = [place for place in self._places if place.prompt is not None]
            if not busy:
                return
            yield from self._step(busy)

    def close(self) -> None:
        self._runner.close()
        self._memory.close()

    def _step(self, places: list[_Place]) -> Iterator[WrittenTurn]:
        output = self._runner.forward(self._step_input(places), None)
        next_ids = _choose(output.logits, places)
        taps = None if output.taps is None else output.taps.to(torch.bfloat16)
        for row, (place, token_id) in enumerate(zip(places, next_ids, strict=True)):
            prompt = place.prompt
            if prompt is None:
                raise ValueError("a free place has no step")
            place.num_cached = len(prompt.token_ids) + len(place.token_ids)
            place.token_ids.append(token_id)
            if taps is not None:
                place.taps.append(taps[row])
            has_ended = token_id in self._end_ids
            is_full = len(place.token_ids) >= prompt.max_new_tokens or place.num_cached + 1 >= self._max_context_tokens
            if has_ended or is_full:
                rows = torch.stack(place.taps) if place.taps else torch.empty(0)
                yield WrittenTurn(prompt, tuple(place.token_ids), has_ended, rows)
                place.prompt = None

    def _step_input(self, places: list[_Place]) -> StepInput:
        new_ids = [_uncached_ids(place) for place in places]
        counts = np.array([len(ids) for ids in new_ids])
        firsts = np.array([place.num_cached for place in places])
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        owners = np.repeat(np.arange(len(places)), counts)
        positions = np.arange(starts[-1]) - starts[owners] + firsts[owners]
        tables = np.stack([place.blocks for place in places])
        return StepInput(
            token_ids=np.concatenate(new_ids).astype(np.int32),
            positions=positions.astype(np.int32),
            slots=tables[owners, positions // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + positions % BLOCK_TOKENS,
            query_starts=starts,
            context_lens=(firsts + counts).astype(np.int32),
            block_tables=tables,
            logit_rows=starts[1:] - 1,
            tap_layers=self._tap_layers,
        )


def _uncached_ids(place: _Place) -> tuple[int, ...]:
    if place.prompt is None:
        raise ValueError("a free place has no tokens")
    return (place.token_ids[-1],) if place.token_ids else place.prompt.token_ids


def _choose(logits: torch.Tensor, places: list[_Place]) -> list[int]:
    peaks, peak_ids = logits.max(dim=-1)
    chosen = peak_ids.numpy().copy()
    rows = [row for row, place in enumerate(places) if place.prompt is not None and place.prompt.temperature > 0]
    if rows:
        prompts = [place.prompt for place in places if place.prompt is not None]
        temperatures = torch.tensor([[prompts[row].temperature] for row in rows])
        scaled = ((logits[rows] - peaks[rows, None]) / temperatures).numpy()
        keys = NoiseKeys(
            np.array([prompts[row].seed for row in rows], np.uint64),
            np.zeros(len(rows), np.uint64),
            np.array([len(prompts[row].token_ids) + len(places[row].token_ids) for row in rows], np.uint64),
        )
        chosen[rows] = gumbel_argmax(scaled, chosen[rows], keys)
    ids: list[int] = chosen.tolist()
    return ids
