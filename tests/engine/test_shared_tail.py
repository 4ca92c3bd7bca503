"""Which running sequence's last block a newcomer may copy."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import Any

import pytest

from cluster.identity import BlockId, BlockRef
from engine.block_pool import BlockPool
from engine.sequence import Sequence
from engine.shared_tail import SharedTail, find_shared_tail
from tests.engine.engine_bench import make_request

BLOCK = 4
PROMPT = [1, 2, 3, 4, 5, 6, 7]


def sequence_of(token_ids: Ids[int], num_computed: int, blocks: Ids[int], **fields: Any) -> Sequence:
    sequence = Sequence(make_request("r", token_ids, **fields), BlockPool(1, BLOCK, "m").new_chain(b""), 64, 0, 0.0)
    sequence.num_computed = num_computed
    sequence.blocks = [BlockRef(BlockId(block), 0) for block in blocks]
    return sequence


def newcomer(token_ids: Ids[int] = PROMPT, num_computed: int = 4) -> Sequence:
    return sequence_of(token_ids, num_computed, [0, 9])


@pytest.mark.parametrize(
    ("other", "num_tokens"),
    [
        (PROMPT, 6),  # one token is left to compute
        ([*PROMPT, 8, 9, 10], 6),
        ([1, 2, 3, 4, 5, 60, 7], 5),
        ([1, 2, 3, 4, 5], 5),
    ],
)
def test_the_tail_ends_where_the_tokens_part(other: list[int], num_tokens: int) -> None:
    running = [sequence_of(other, len(other), [0, 7, 8])]
    assert find_shared_tail(newcomer(), running, BLOCK) == SharedTail(7, 9, num_tokens)


@pytest.mark.parametrize(
    ("other", "num_computed", "fields"),
    [
        ([1, 2, 3, 4, 50, 6, 7], 7, {}),
        ([100, 2, 3, 4, 5, 6, 7], 7, {}),  # the same tail behind another prefix is other KV
        (PROMPT, 4, {}),  # its tail is not written yet
        (PROMPT, 7, {"scope_key": b"another tenant"}),
    ],
)
def test_s_b41_foreign_or_unwritten_tails_are_not_copied(
    other: list[int], num_computed: int, fields: dict[str, Any]
) -> None:
    assert find_shared_tail(newcomer(), [sequence_of(other, num_computed, [0, 7], **fields)], BLOCK) is None


def test_the_longest_tail_wins() -> None:
    running = [sequence_of([1, 2, 3, 4, 5, 60], 6, [0, 7]), sequence_of(PROMPT, 7, [0, 8])]
    assert find_shared_tail(newcomer(), running, BLOCK) == SharedTail(8, 9, 6)


def test_a_lone_last_token_leaves_nothing_to_copy() -> None:
    assert find_shared_tail(newcomer(PROMPT[:5]), [sequence_of(PROMPT, 7, [0, 8])], BLOCK) is None


def test_a_short_prompt_has_a_tail_and_no_full_block() -> None:
    short = sequence_of(PROMPT[:3], 0, [9])
    assert find_shared_tail(short, [sequence_of(PROMPT, 7, [5, 8])], BLOCK) == SharedTail(5, 9, 2)
