"""A step's arrays from its chunks: preallocated, filled by numpy, no Python per token.

Each running sequence has a row in one block table that lives as long as it runs, so a decode step copies nothing but
new block ids and last tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Chunks
from dataclasses import dataclass

import numpy as np

from engine.request import EngineLimits
from engine.sequence import Sequence
from engine.step import Int32Array, StepInput
from engine.step_plan import ScheduledChunk


@dataclass(slots=True)
class _Decodes:
    """The last step in which everyone had one token."""

    step: StepInput
    sequences: list[Sequence]
    block_indices: list[int]  # of each last token's block in its sequence
    slot_starts: list[int]  # what a last token's position is added to for its slot


class StepBuilder:
    """Owned by one executor. The arrays it gives are its own: they hold until the next `build`."""

    def __init__(
        self,
        limits: EngineLimits,
        block_tokens: int,
        only_most_likely: Callable[[Chunks[ScheduledChunk]], bool] = lambda chunks: False,
    ) -> None:
        """`only_most_likely`: of a step with these chunks; it is not asked again while the same sequences decode."""
        self._block_tokens = block_tokens
        self._only_most_likely = only_most_likely
        max_blocks = -(-limits.max_model_len // block_tokens)
        self._tables = np.zeros((limits.max_sequences, max_blocks), dtype=np.int32)
        self._num_known_blocks = [0] * limits.max_sequences  # by row: how many of the sequence's blocks the row has
        self._row_of: dict[Sequence, int] = {}
        self._free_rows = list(range(limits.max_sequences))
        self._token_ids = np.zeros(limits.max_batch_tokens, dtype=np.int32)
        self._positions = np.zeros(limits.max_batch_tokens, dtype=np.int32)
        self._slots = np.zeros(limits.max_batch_tokens, dtype=np.int64)
        self._query_starts = np.zeros(limits.max_sequences + 1, dtype=np.int32)
        self._context_lens = np.zeros(limits.max_sequences, dtype=np.int32)
        self._block_numbers = np.arange(max_blocks, dtype=np.int32)
        self._ascending = np.arange(limits.max_batch_tokens + 1, dtype=np.int32)
        self._decodes: _Decodes | None = None

    def build(self, chunks: Chunks[ScheduledChunk]) -> StepInput:
        """The step of these chunks, in their order.

        While the same sequences decode it is the same object with new content: who takes addresses may keep them.
        """
        if all(chunk.num_tokens == 1 and not chunk.num_drafts and chunk.is_sampled for chunk in chunks):
            return self._build_decodes(chunks)
        num_sequences = len(chunks)
        rows = np.array([self._row(chunk.sequence) for chunk in chunks], dtype=np.intp)
        counts = np.array([chunk.num_rows for chunk in chunks], dtype=np.int32)
        firsts = np.array([chunk.first_token for chunk in chunks], dtype=np.int32)
        query_starts = self._query_starts[: num_sequences + 1]
        np.cumsum(counts, out=query_starts[1:])
        context_lens = np.add(firsts, counts, out=self._context_lens[:num_sequences])
        num_tokens = int(query_starts[-1])
        positions = self._fill_positions(num_tokens, counts, firsts, query_starts)
        block_index = positions // self._block_tokens
        slots = self._slots[:num_tokens]
        slots[:] = self._tables[rows if num_tokens == num_sequences else np.repeat(rows, counts), block_index]
        slots *= self._block_tokens
        slots += positions - block_index * self._block_tokens
        tree_masks = self._lay_trees(chunks, positions, query_starts)  # a tree's slots are those of a chain
        return StepInput(
            token_ids=self._fill_token_ids(chunks, num_tokens, query_starts),
            positions=positions,
            slots=slots,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=self._block_tables(rows, context_lens),
            logit_rows=self._logit_rows(chunks, query_starts),
            tree_masks=tree_masks,
            only_most_likely=self._only_most_likely(chunks),
        )

    def forget(self, sequence: Sequence) -> None:
        """Frees the row of a sequence that finished or starts over."""
        row = self._row_of.pop(sequence, None)
        if row is not None:
            self._tables[row, : self._num_known_blocks[row]] = 0
            self._num_known_blocks[row] = 0
            self._free_rows.append(row)
            self._decodes = None

    def _build_decodes(self, chunks: Chunks[ScheduledChunk]) -> StepInput:
        """One token each. Between two calls of a model Python runs with cold caches, so what is touched is time: of the
        last such step everything stays but tokens, places, and the blocks that were begun."""
        sequences = [chunk.sequence for chunk in chunks]
        positions = [chunk.first_token for chunk in chunks]
        block_indices = [position // self._block_tokens for position in positions]
        decodes = self._decodes
        if decodes is None or decodes.sequences != sequences or not self._begin_blocks(decodes, block_indices):
            decodes = self._decodes = self._lay_decodes(sequences, block_indices, self._only_most_likely(chunks))
        step = decodes.step
        step.token_ids[:] = [sequence.last_token_id for sequence in sequences]
        step.positions[:] = positions
        step.context_lens[:] = [position + 1 for position in positions]
        step.slots[:] = [position + start for position, start in zip(positions, decodes.slot_starts, strict=True)]
        return step

    def _begin_blocks(self, decodes: _Decodes, block_indices: list[int]) -> bool:
        """Enters the blocks that were begun since the last step. False where the table has no room for one."""
        if block_indices == decodes.block_indices:
            return True
        if max(block_indices) >= decodes.step.block_tables.shape[1]:
            return False
        for place, block_index in enumerate(block_indices):
            if block_index != decodes.block_indices[place]:
                block = decodes.sequences[place].blocks[block_index].block
                decodes.step.block_tables[place, block_index] = block
                decodes.slot_starts[place] = (block - block_index) * self._block_tokens
        decodes.block_indices = block_indices
        return True

    def _lay_decodes(self, sequences: list[Sequence], block_indices: list[int], only_most_likely: bool) -> _Decodes:
        """The arrays of a batch that was not the last step's."""
        count = len(sequences)
        rows = np.array([self._row(sequence) for sequence in sequences], dtype=np.intp)
        starts = [
            (sequence.blocks[block_index].block - block_index) * self._block_tokens
            for sequence, block_index in zip(sequences, block_indices, strict=True)
        ]
        context_lens = self._context_lens[:count]
        context_lens[:] = [(block_index + 1) * self._block_tokens for block_index in block_indices]
        step = StepInput(
            token_ids=self._token_ids[:count],
            positions=self._positions[:count],
            slots=self._slots[:count],
            query_starts=self._ascending[: count + 1],
            context_lens=context_lens,
            block_tables=self._block_tables(rows, context_lens),
            logit_rows=self._ascending[:count],
            only_most_likely=only_most_likely,
        )
        return _Decodes(step, sequences, block_indices, starts)

    def _row(self, sequence: Sequence) -> int:
        row = self._row_of.get(sequence)
        if row is None:
            row = self._row_of[sequence] = self._free_rows.pop()
        known = self._num_known_blocks[row]
        if known != len(sequence.blocks):
            self._tables[row, known : len(sequence.blocks)] = [ref.block for ref in sequence.blocks[known:]]
            self._num_known_blocks[row] = len(sequence.blocks)
        return row

    def _fill_positions(
        self, num_tokens: int, counts: Int32Array, firsts: Int32Array, query_starts: Int32Array
    ) -> Int32Array:
        positions = self._positions[:num_tokens]
        if num_tokens == len(counts):
            positions[:] = firsts
        else:
            np.add(self._ascending[:num_tokens], np.repeat(firsts - query_starts[:-1], counts), out=positions)
        return positions

    @staticmethod
    def _lay_trees(
        chunks: Chunks[ScheduledChunk], positions: Int32Array, query_starts: Int32Array
    ) -> Int32Array | None:
        """The masks of the step's trees, whose rows' positions it sets to those on their branch; None: all chains."""
        masks: Int32Array | None = None
        for end, chunk in zip(query_starts[1:].tolist(), chunks, strict=True):
            if not chunk.num_drafts or chunk.sequence.draft.is_chain:
                continue
            draft = chunk.sequence.draft
            if masks is None:
                masks = np.zeros(len(positions), np.int32)
            root = end - 1 - len(draft)
            masks[root:end] = draft.tree_masks()
            positions[root + 1 : end] = positions[root] + np.array(draft.depths(), np.int32)
        return masks

    def _fill_token_ids(self, chunks: Chunks[ScheduledChunk], num_tokens: int, query_starts: Int32Array) -> Int32Array:
        token_ids = self._token_ids[:num_tokens]
        if num_tokens == len(chunks):
            token_ids[:] = [
                chunk.sequence.last_token_id if chunk.is_sampled else chunk.sequence.token_ids[chunk.first_token]
                for chunk in chunks
            ]
            return token_ids
        for start, chunk in zip(query_starts.tolist(), chunks, strict=False):
            known = chunk.sequence.token_ids_ahead(chunk.num_drafts)
            token_ids[start : start + chunk.num_rows] = known[chunk.first_token : chunk.first_token + chunk.num_rows]
        return token_ids

    def _block_tables(self, rows: np.ndarray, context_lens: Int32Array) -> Int32Array:
        """The rows' block ids up to the longest context; 0 past each one's own, where look-ahead blocks may be."""
        num_blocks = -(-context_lens // self._block_tokens)
        tables = self._tables[rows, : int(num_blocks.max())]
        tables *= self._block_numbers[: tables.shape[1]] < num_blocks[:, None]
        return tables

    def _logit_rows(self, chunks: Chunks[ScheduledChunk], query_starts: Int32Array) -> Int32Array:
        """The rows that are sampled (last tokens, drafts), and those that predict a wanted prompt token."""
        ends = query_starts[1:].tolist()
        rows: list[int] = []
        for end, chunk in zip(ends, chunks, strict=True):
            if chunk.sequence.wants_prompt_logprobs:
                start = end - chunk.num_rows
                rows.extend(range(start, start + num_prompt_targets(chunk)))
            if chunk.is_sampled:
                rows.extend(range(end - 1 - chunk.num_drafts, end))
        return np.array(rows, dtype=np.int32)


def num_prompt_targets(chunk: ScheduledChunk) -> int:
    """How many of the chunk's rows predict a token of the prompt: all but the prompt's last token."""
    last_predicting = chunk.sequence.num_prompt_tokens - 1
    return max(0, min(chunk.first_token + chunk.num_tokens, last_predicting) - chunk.first_token)
