"""What a step's results mean: tokens kept, KV in order, failures of one sequence alone."""

from __future__ import annotations

from collections.abc import Sequence as Chunks
from typing import Any

import numpy as np
import pytest

from cluster.sampling_params import SamplingParams
from engine.block_pool import BlockPool
from engine.draft import ROOT, Draft
from engine.executor import StepResults
from engine.request import FinishReason
from engine.result_taker import ResultTaker, Taken
from engine.sequence import Sequence
from engine.step_plan import ScheduledChunk
from tests.engine.engine_bench import make_request

BLOCK_TOKENS = 4


class Moves:
    """A `StepExecutor` of which only moved KV is asked."""

    vocab_size, num_layers = 50, 1

    def __init__(self) -> None:
        self.moves: list[tuple[list[int], list[int]]] = []

    def move_tokens(self, sources: Chunks[int], destinations: Chunks[int]) -> None:
        self.moves.append((list(sources), list(destinations)))

    def execute(self, chunks: Chunks[ScheduledChunk], layer_done: Any) -> StepResults:
        raise NotImplementedError

    def copy_block(self, source: int, destination: int) -> None:
        raise NotImplementedError

    def forget(self, sequence: Sequence) -> None:
        raise NotImplementedError


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(24, BLOCK_TOKENS, "model")


def decoding(pool: BlockPool, num_tokens: int, draft: Draft, **params: Any) -> tuple[Sequence, ScheduledChunk]:
    """A sequence whose last token's KV is to be computed, with drafts behind it."""
    sampling = SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **params})
    request = make_request("r0", list(range(num_tokens)), sampling=sampling)
    sequence = Sequence(request, pool.new_chain(b"tenant"), 64, 0, 0.0)
    blocks = pool.allocate(6)
    assert blocks is not None
    sequence.blocks = blocks
    sequence.num_computed = num_tokens - 1
    sequence.put_draft(draft)
    return sequence, ScheduledChunk(sequence, num_tokens - 1, 1, len(draft))


def take(
    pool: BlockPool, chunks: list[ScheduledChunk], results: StepResults, deaf: Any = ()
) -> tuple[list[Taken], Moves]:
    executor = Moves()
    return list(ResultTaker(executor, pool, None).take(chunks, results, deaf)), executor


def test_kv_counts_up_to_the_last_accepted_draft_and_full_blocks_are_published(pool: BlockPool) -> None:
    sequence, chunk = decoding(pool, 6, Draft.chain([11, 12, 13]))
    (taken,), executor = take(pool, [chunk], StepResults([11, 12, 40, 41]))
    assert taken.token_ids == (11, 12, 40)
    assert sequence.token_ids.tolist() == [0, 1, 2, 3, 4, 5, 11, 12, 40]
    assert sequence.num_computed == 8, "the KV of 13 is not of this sequence, that of 40 not there yet"
    assert sequence.chain.num_blocks == 2
    assert executor.moves == []


def test_the_accepted_branch_moves_to_where_a_chain_is(pool: BlockPool) -> None:
    tree = Draft((11, 12, 13, 14), (ROOT, ROOT, 1, 2))
    sequence, chunk = decoding(pool, 6, tree)
    (taken,), executor = take(pool, [chunk], StepResults([12, 0, 13, 30, 0]))
    assert taken.token_ids == (12, 13, 30)
    first, second = (ref.block * BLOCK_TOKENS for ref in sequence.blocks[1:3])
    assert executor.moves == [([first + 3, second], [first + 2, first + 3])]


def test_what_stands_behind_a_stop_is_gone(pool: BlockPool) -> None:
    sequence, chunk = decoding(pool, 6, Draft.chain([11, 12, 13]), stop_token_ids=(12,))
    (taken,), _ = take(pool, [chunk], StepResults([11, 12, 13, 14]))
    assert taken.token_ids == (11, 12)
    assert taken.decision is not None
    assert (taken.decision.finish_reason, taken.decision.stop_token_id) == (FinishReason.STOP, 12)
    assert sequence.num_tokens == 8


def test_failures_end_their_own_sequence_alone(pool: BlockPool) -> None:
    first, failing = decoding(pool, 5, Draft.chain([11]))
    second, going_on = decoding(pool, 5, Draft.chain([11]))
    third, unheard = decoding(pool, 5, Draft())
    results = StepResults([7, 7, 11, 30, 9], failed={0: "no distribution"})
    taken, _ = take(pool, [failing, going_on, unheard], results, deaf={third})
    assert [each.error for each in taken] == ["no distribution", "", "the listener of its KV failed"]
    assert taken[1].token_ids == (11, 30)
    assert first.num_tokens == third.num_tokens == 5
    assert second.num_tokens == 7


def test_a_chunk_in_the_middle_of_a_prompt_gives_nothing(pool: BlockPool) -> None:
    sequence, _ = decoding(pool, 9, Draft())
    sequence.num_computed = 0
    taken, _ = take(pool, [ScheduledChunk(sequence, 0, 4)], StepResults([]))
    assert taken == []
    assert (sequence.num_computed, sequence.chain.num_blocks) == (4, 1)
    assert np.array_equal(sequence.token_ids, np.arange(9))
