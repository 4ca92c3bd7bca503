"""The arrays of a step."""

from __future__ import annotations

from collections.abc import Sequence as Chunks
from typing import Any

import numpy as np
import pytest

from cluster.identity import BlockId, BlockRef
from engine.block_pool import BlockPool
from engine.request import EngineLimits
from engine.sequence import Sequence
from engine.step_builder import StepBuilder
from engine.step_plan import ScheduledChunk
from tests.engine.engine_bench import make_request

BLOCK = 4
LIMITS = EngineLimits(max_batch_tokens=32, max_sequences=4, max_model_len=64)


def make_sequence(num_tokens: int, blocks: list[int], first_id: int = 100, **fields: Any) -> Sequence:
    chain = BlockPool(1, BLOCK, "m").new_chain(b"")
    sequence = Sequence(make_request("r", range(first_id, first_id + num_tokens), **fields), chain, 64, 0, 0.0)
    sequence.blocks = [BlockRef(BlockId(block), 0) for block in blocks]
    return sequence


def test_a_mixed_step_lays_everything_end_to_end() -> None:
    decode, prompt = make_sequence(6, [7, 3]), make_sequence(9, [1, 2, 5], first_id=200)
    step = StepBuilder(LIMITS, BLOCK).build([ScheduledChunk(decode, 5, 1), ScheduledChunk(prompt, 2, 7)])
    assert step.token_ids.tolist() == [105, *range(202, 209)]
    assert step.positions.tolist() == [5, *range(2, 9)]
    assert step.slots.tolist() == [13, 6, 7, 8, 9, 10, 11, 20]
    assert step.query_starts.tolist() == [0, 1, 8]
    assert step.context_lens.tolist() == [6, 9]
    assert step.block_tables.tolist() == [[7, 3, 0], [1, 2, 5]]
    assert step.logit_rows.tolist() == [0, 7]
    assert [array.dtype for array in (step.token_ids, step.positions, step.block_tables)] == [np.int32] * 3
    assert step.slots.dtype == np.int64


def test_a_chunk_that_does_not_reach_the_end_wants_no_logits() -> None:
    prompt = make_sequence(9, [1, 2, 5])
    step = StepBuilder(LIMITS, BLOCK).build([ScheduledChunk(prompt, 0, 4)])
    assert step.logit_rows.tolist() == []


def test_a_one_token_chunk_in_the_middle_of_a_prompt_reads_its_own_token() -> None:
    prompt, decode = make_sequence(9, [1, 2, 5]), make_sequence(2, [6])
    step = StepBuilder(LIMITS, BLOCK).build([ScheduledChunk(prompt, 3, 1), ScheduledChunk(decode, 1, 1)])
    assert step.token_ids.tolist() == [103, 101]
    assert step.logit_rows.tolist() == [1]


def test_blocks_past_the_context_are_zero_in_the_table() -> None:
    sequence = make_sequence(3, [9, 8, 7])  # look-ahead
    step = StepBuilder(LIMITS, BLOCK).build([ScheduledChunk(sequence, 2, 1)])
    assert step.block_tables.tolist() == [[9]]
    longer = make_sequence(12, [1, 2, 3])
    step = StepBuilder(LIMITS, BLOCK).build([ScheduledChunk(sequence, 2, 1), ScheduledChunk(longer, 11, 1)])
    assert step.block_tables.tolist() == [[9, 0, 0], [1, 2, 3]]


def test_new_blocks_reach_the_row_and_a_freed_row_is_clean() -> None:
    builder = StepBuilder(EngineLimits(max_batch_tokens=8, max_sequences=1, max_model_len=64), BLOCK)
    sequence = make_sequence(8, [5, 6])
    builder.build([ScheduledChunk(sequence, 7, 1)])
    sequence.append(1)
    sequence.blocks.append(BlockRef(BlockId(9), 0))
    assert builder.build([ScheduledChunk(sequence, 8, 1)]).block_tables.tolist() == [[5, 6, 9]]
    builder.forget(sequence)
    builder.forget(sequence)
    other = make_sequence(2, [4])
    assert builder.build([ScheduledChunk(other, 0, 2)]).block_tables.tolist() == [[4]]


def test_prompt_logprobs_want_every_row_that_predicts_a_prompt_token() -> None:
    sequence = make_sequence(6, [1, 2], prompt_logprobs=0)
    builder = StepBuilder(LIMITS, BLOCK)
    assert builder.build([ScheduledChunk(sequence, 0, 4)]).logit_rows.tolist() == [0, 1, 2, 3]
    assert builder.build([ScheduledChunk(sequence, 4, 2)]).logit_rows.tolist() == [0, 1]


def test_who_wants_more_than_the_most_likely_tokens_is_asked_once_for_a_decoding_batch() -> None:
    asked: list[int] = []

    def only_most_likely(chunks: Chunks[ScheduledChunk]) -> bool:
        asked.append(len(chunks))
        return len(chunks) == 2

    first, second, third = (make_sequence(5, [index, index + 1]) for index in (1, 3, 5))
    builder = StepBuilder(LIMITS, BLOCK, only_most_likely)
    pair, all_of_them = (
        [ScheduledChunk(sequence, 4, 1) for sequence in sequences]
        for sequences in ([first, second], [first, second, third])
    )
    assert [builder.build(chunks).only_most_likely for chunks in (pair, pair, all_of_them)] == [True, True, False]
    assert asked == [2, 3]


@pytest.mark.parametrize("seed", range(8))
def test_steps_of_a_decoding_batch_are_those_of_a_fresh_look(seed: int) -> None:
    """Sequences join, leave, start over elsewhere in the pool, and begin blocks, also ones that were there ahead."""
    random = np.random.default_rng(seed)
    builder = StepBuilder(LIMITS, BLOCK)
    free = list(random.permutation(200))
    running: list[Sequence] = []

    def take(num_blocks: int) -> list[BlockRef]:
        return [BlockRef(BlockId(int(free.pop())), 0) for _ in range(num_blocks)]

    def leave(sequence: Sequence) -> None:
        builder.forget(sequence)
        free.extend(ref.block for ref in sequence.blocks)
        sequence.blocks = []

    for number in range(300):
        if len(running) < LIMITS.max_sequences and random.random() < 0.3:
            num_tokens = int(random.integers(1, 20))
            sequence = make_sequence(num_tokens, [], first_id=1000 * number, max_tokens=64)
            sequence.blocks = take(-(-num_tokens // BLOCK) + int(random.integers(0, 3)))
            running.insert(int(random.integers(0, len(running) + 1)), sequence)
        for sequence in [one for one in running if one.num_tokens >= 60 or random.random() < 0.03]:
            leave(sequence)
            if sequence.num_tokens < 60 and random.random() < 0.5:  # preempted, and back at once in other blocks
                sequence.blocks = take(-(-sequence.num_tokens // BLOCK))
            else:
                running.remove(sequence)
        if len(running) == LIMITS.max_sequences and random.random() < 0.1:  # a step of another kind between them
            builder.build([ScheduledChunk(running[0], 0, min(8, running[0].num_tokens))])
        chunks = [ScheduledChunk(sequence, sequence.num_tokens - 1, 1) for sequence in running]
        if not chunks:
            continue
        step = builder.build(chunks)
        places = [sequence.num_tokens - 1 for sequence in running]
        width = max(place // BLOCK for place in places) + 1
        tables = np.zeros((len(running), width), np.int32)
        for row, (sequence, place) in enumerate(zip(running, places, strict=True)):
            tables[row, : place // BLOCK + 1] = [ref.block for ref in sequence.blocks[: place // BLOCK + 1]]
        assert step.token_ids.tolist() == [sequence.last_token_id for sequence in running]
        assert step.positions.tolist() == places
        assert step.slots.tolist() == [
            sequence.blocks[place // BLOCK].block * BLOCK + place % BLOCK
            for sequence, place in zip(running, places, strict=True)
        ]
        assert step.query_starts.tolist() == list(range(len(running) + 1))
        assert step.context_lens.tolist() == [place + 1 for place in places]
        assert step.logit_rows.tolist() == list(range(len(running)))
        assert all(step.block_tables[:, width:].ravel() == 0)
        assert step.block_tables[:, :width].tolist() == tables.tolist()
        for sequence in running:
            sequence.append(number)
            if sequence.num_tokens > BLOCK * len(sequence.blocks):
                sequence.blocks.extend(take(1))


def test_a_decoding_batch_keeps_its_arrays() -> None:
    """So their addresses are looked up once."""
    builder = StepBuilder(LIMITS, BLOCK)
    first, second = (make_sequence(5 + index, [index, 9 - index], max_tokens=9) for index in range(2))
    steps = []
    for _ in range(2):
        steps.append(
            builder.build([ScheduledChunk(sequence, sequence.num_tokens - 1, 1) for sequence in (first, second)])
        )
        first.append(7)
        second.append(8)
    assert steps[0] is steps[1]
    assert steps[0].token_ids.tolist() == [7, 8]
