"""Every pair of shapes that can be planned for is exact; every other is refused by the field's name."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from cluster.identity import BlockId, BlockRef, TransferId
from cluster.kv_layout import KvLayout
from engine.kv_memory import POISON_BYTE, KvMemory
from kv_transfer.coverage import CellRange
from kv_transfer.landing_table import LandingTable
from kv_transfer.layer_groups import LinkCosts
from kv_transfer.layer_pusher import LayerPusher, PushRequest
from kv_transfer.shapes import CellGather, HeadRange, differing_field, head_routes, heads_of_rank
from tests.kv_transfer.direct_sender import DirectSender
from tests.kv_transfer.oracle import PushOutcome, wait_until

NUM_LAYERS, HEAD_DIM = 3, 4
BLOCKS, TP_SIZES = (16, 32, 64), (1, 2, 4)
COSTS = LinkCosts(bytes_per_s=1e9, operation_s=1e-5)
TRANSFER = TransferId(bytes(16))


def layout(num_kv_heads: int, block_tokens: int) -> KvLayout:
    return KvLayout(NUM_LAYERS, num_kv_heads, HEAD_DIM, "float32", 4, block_tokens)


def oracle(layer: int, pair: int, head: int, tokens: np.ndarray) -> np.ndarray:
    """`[tokens, head_dim]`: each element a function of (token, layer, key or value, head, position)."""
    base = 1000.0 * layer + 500.0 * pair + 50.0 * head
    return (base + tokens[:, None] * 7919.0 + np.arange(HEAD_DIM)[None, :]).astype(np.float32)


class Rank:
    """One tensor-parallel rank's pool with one prompt's block table, scattered and out of order."""

    def __init__(self, num_kv_heads: int, tp_size: int, rank: int, block_tokens: int, num_tokens: int) -> None:
        self.heads = heads_of_rank(num_kv_heads, tp_size, rank)
        num_blocks = -(-num_tokens // block_tokens)
        self.memory = KvMemory(layout(self.heads.count, block_tokens), num_blocks + 2)
        for block in range(num_blocks + 2):
            self.memory.poison(block)
        ids = sorted(range(num_blocks + 2), key=lambda block: (block * 5 + 3) % 7)
        self.blocks = tuple(BlockRef(BlockId(block), 1) for block in ids[:num_blocks])

    def cells(self, first_token: int, end_token: int) -> list[tuple[int, int, int, np.ndarray, np.ndarray]]:
        """(layer, pair, head of the model, the pool's rows, their tokens), block by block."""
        found = []
        size = self.memory.layout.block_tokens
        for index, ref in enumerate(self.blocks):
            tokens = np.arange(max(first_token, index * size), min(end_token, (index + 1) * size))
            if len(tokens) == 0:
                continue
            for layer, pair, head in itertools.product(range(NUM_LAYERS), range(2), range(self.heads.count)):
                plane = self.memory.tensor[ref.block, layer, pair, head].numpy()
                rows = plane[tokens - index * size]
                found.append((layer, pair, self.heads.first + head, rows, tokens))
        return found

    def write(self, end_token: int) -> None:
        size = self.memory.layout.block_tokens
        for index, ref in enumerate(self.blocks):
            tokens = np.arange(index * size, min(end_token, (index + 1) * size))
            for layer, pair, head in itertools.product(range(NUM_LAYERS), range(2), range(self.heads.count)):
                plane = self.memory.tensor[ref.block, layer, pair, head].numpy()
                plane[: len(tokens)] = oracle(layer, pair, self.heads.first + head, tokens)

    def assert_exact(self, first_token: int, end_token: int) -> None:
        for layer, pair, head, rows, tokens in self.cells(first_token, end_token):
            np.testing.assert_array_equal(rows, oracle(layer, pair, head, tokens), f"layer {layer} head {head}")

    def assert_untouched(self, end_token: int) -> None:
        for _, _, _, rows, _ in self.cells(0, end_token):
            assert (rows.view(np.uint8) == POISON_BYTE).all()


def move(sources: list[Rank], targets: list[Rank], num_kv_heads: int, num_tokens: int, have_tokens: int) -> None:
    """Every source rank pushes its share to every target rank, chunk by chunk and layer by layer."""
    routes = head_routes(num_kv_heads, len(sources), len(targets))
    for target_rank, target in enumerate(targets):
        mine = [route for route in routes if route.target_rank == target_rank]
        parts = {route: HeadRange(route.heads.first - target.heads.first, route.heads.count) for route in mine}
        table = LandingTable(target.memory)
        first_block = have_tokens // target.memory.layout.block_tokens
        destination = target.blocks[first_block:]
        table.open(TRANSFER, 1, destination, first_block, lambda *_: None, tuple(parts.values()))
        roots = {}
        for route, part in parts.items():
            source = sources[route.source_rank]
            source_heads = HeadRange(route.heads.first - source.heads.first, route.heads.count)
            gather = CellGather(source.memory, target.memory.layout, source_heads, part)
            pusher = LayerPusher(DirectSender(table), source.memory, COSTS, route.source_rank, gather)
            outcome = PushOutcome()
            session = pusher.open(PushRequest(TRANSFER, 1, num_tokens, have_tokens, outcome.callbacks()))
            session.blocks_allocated(source.blocks, 0)
            for start in range(0, num_tokens, 48):
                session.chunk_started(start, min(48, num_tokens - start))
                for layer in range(NUM_LAYERS):
                    session.layer_written(layer)
                session.chunk_finished()
            wait_until(lambda outcome=outcome: bool(outcome.sealed or outcome.failed), "sealed")  # type: ignore[misc]
            pusher.close()
            roots[route.source_rank] = outcome.sealed[0].root_digest
        arrived = table.arrived(TRANSFER, 1)
        assert arrived is not None
        assert arrived.is_complete, arrived.missing
        assert arrived.root_digests == {rank: root for rank, root in roots.items() if destination}


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize(("source_tp", "target_tp"), list(itertools.product(TP_SIZES, TP_SIZES)))
@pytest.mark.parametrize(("source_block", "target_block"), list(itertools.product(BLOCKS, BLOCKS)))
def test_kv17_kv51_every_shape_moves_exactly(
    num_kv_heads: int, source_tp: int, target_tp: int, source_block: int, target_block: int
) -> None:
    for num_tokens, have_blocks in ((target_block * 2 + 1, 0), (target_block * 3, 1), (target_block * 2 - 1, 1)):
        have_tokens = have_blocks * target_block
        sources = [Rank(num_kv_heads, source_tp, rank, source_block, num_tokens) for rank in range(source_tp)]
        targets = [Rank(num_kv_heads, target_tp, rank, target_block, num_tokens) for rank in range(target_tp)]
        for source in sources:
            source.write(num_tokens)
        move(sources, targets, num_kv_heads, num_tokens, have_tokens)
        for target in targets:
            target.assert_exact(have_tokens, num_tokens)
            target.assert_untouched(have_tokens)


def test_kv72_a_prefix_that_the_receiver_holds_whole_leaves_nothing_to_send() -> None:
    source, target = Rank(2, 1, 0, 16, 64), Rank(2, 1, 0, 32, 64)
    source.write(64)
    move([source], [target], 2, 64, 64)
    target.assert_untouched(64)


@pytest.mark.parametrize(("heads", "tp_size"), [(8, 3), (2, 3), (3, 2)])
def test_kv51_heads_that_cannot_be_divided_are_refused(heads: int, tp_size: int) -> None:
    with pytest.raises(ValueError, match="cannot be divided"):
        heads_of_rank(heads, tp_size, 0)


@pytest.mark.parametrize(("heads", "source_tp", "target_tp"), [(2, 1, 4), (2, 4, 1), (1, 4, 4), (8, 2, 4)])
def test_kv51_every_target_rank_gets_each_head_once(heads: int, source_tp: int, target_tp: int) -> None:
    for target in range(target_tp):
        wanted = heads_of_rank(heads, target_tp, target)
        got = [route.heads for route in head_routes(heads, source_tp, target_tp) if route.target_rank == target]
        covered = [head for part in got for head in range(part.first, part.first + part.count)]
        assert sorted(covered) == list(range(wanted.first, wanted.first + wanted.count))


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_layers", 4), ("head_dim", 8), ("dtype", "bfloat16"), ("order", "layer,block"), ("block_tokens", 24)],
)
def test_kv18_f27_what_cannot_be_planned_for_is_named(field: str, value: object) -> None:
    mine = layout(2, 16)
    assert differing_field(mine, replace(mine, **{field: value})) == field  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=field):
        CellGather(KvMemory(mine, 1), replace(mine, **{field: value}), HeadRange(0, 2), HeadRange(0, 2))  # type: ignore[arg-type]


def test_fp8_blocks_of_another_size_are_refused() -> None:
    mine = replace(layout(2, 16), dtype="fp8_e4m3", element_bytes=1)
    assert differing_field(mine, mine) == ""
    assert differing_field(mine, replace(mine, block_tokens=32)) == "block_tokens"


def test_the_part_of_a_block_that_the_prompt_does_not_reach_is_zero() -> None:
    source = Rank(1, 1, 0, 16, 20)
    source.write(20)
    gather = CellGather(source.memory, layout(1, 64), HeadRange(0, 1), HeadRange(0, 1))
    payload = np.frombuffer(gather.gather(source.blocks, CellRange(0, 1, 0, 1)), np.float32)
    assert (payload.reshape(2, 1, 64, HEAD_DIM)[:, :, 32:] == 0).all()
