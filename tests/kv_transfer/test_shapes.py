"""Every pair of shapes that can be planned for is exact; every other is refused by the field's name."""

from __future__ import annotations

import contextlib
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

NUM_LAYERS, HEAD_DIM, CHUNK_TOKENS = 3, 4, 80
BLOCKS, TP_SIZES = (16, 32, 64), (1, 2, 4)
COSTS = LinkCosts(bytes_per_s=1e9, operation_s=1e-5)
TRANSFER = TransferId(bytes(16))


def layout(num_kv_heads: int, block_tokens: int) -> KvLayout:
    return KvLayout(NUM_LAYERS, num_kv_heads, HEAD_DIM, "float32", 4, block_tokens)


def oracle(num_kv_heads: int, num_tokens: int) -> np.ndarray:
    """`[layers, 2, heads, tokens, head_dim]`: each element says where it belongs."""
    axes = np.indices((NUM_LAYERS, 2, num_kv_heads, num_tokens, HEAD_DIM), np.float32)
    return np.asarray(np.tensordot(np.array([1e5, 5e4, 5e3, 16, 1], np.float32), axes, 1), np.float32)


class Rank:
    """One tensor-parallel rank's pool with one prompt's block table, scattered and out of order."""

    def __init__(self, num_kv_heads: int, tp_size: int, rank: int, block_tokens: int, num_tokens: int) -> None:
        self.heads = heads_of_rank(num_kv_heads, tp_size, rank)
        num_blocks = -(-num_tokens // block_tokens)
        self.memory = KvMemory(layout(self.heads.count, block_tokens), num_blocks + 2)
        self.poison()
        ids = sorted(range(num_blocks + 2), key=lambda block: (block * 5 + 3) % 7)
        self.blocks = tuple(BlockRef(BlockId(block), 1) for block in ids[:num_blocks])

    def poison(self) -> None:
        for block in range(self.memory.num_blocks):
            self.memory.poison(block)

    def write(self, content: np.ndarray) -> None:
        """`content` as `oracle` gives it, for all heads of the model."""
        size = self.memory.layout.block_tokens
        mine = content[:, :, self.heads.first : self.heads.first + self.heads.count]
        for index, ref in enumerate(self.blocks):
            part = mine[..., index * size : (index + 1) * size, :]
            self.memory.tensor[ref.block].numpy()[..., : part.shape[-2], :] = part

    def read(self, num_tokens: int) -> np.ndarray:
        """`[layers, 2, this rank's heads, tokens, head_dim]`"""
        blocks = self.memory.tensor[[ref.block for ref in self.blocks]].numpy()
        joined = np.moveaxis(blocks, 0, 3)
        return joined.reshape(*joined.shape[:3], -1, HEAD_DIM)[..., :num_tokens, :]

    def assert_exact(self, content: np.ndarray, first_token: int, end_token: int) -> None:
        expected = content[:, :, self.heads.first : self.heads.first + self.heads.count, first_token:end_token]
        np.testing.assert_array_equal(self.read(end_token)[..., first_token:, :], expected)

    def assert_untouched(self, end_token: int) -> None:
        assert (np.ascontiguousarray(self.read(end_token)).view(np.uint8) == POISON_BYTE).all()


class Movement:
    """Every source rank pushes its share to every target rank, chunk by chunk, layer by layer; its test closes it."""

    def __init__(self, sources: list[Rank], targets: list[Rank], num_kv_heads: int) -> None:
        self._targets = targets
        self._tables = [LandingTable(target.memory) for target in targets]
        self._pushers: list[list[tuple[LayerPusher, HeadRange, Rank, int]]] = [[] for _ in targets]
        for route in head_routes(num_kv_heads, len(sources), len(targets)):
            source, target = sources[route.source_rank], targets[route.target_rank]
            part = HeadRange(route.heads.first - target.heads.first, route.heads.count)
            source_heads = HeadRange(route.heads.first - source.heads.first, route.heads.count)
            gather = CellGather(source.memory, target.memory.layout, source_heads, part)
            sender = DirectSender(self._tables[route.target_rank])
            pusher = LayerPusher(sender, source.memory, COSTS, route.source_rank, gather)
            self._pushers[route.target_rank].append((pusher, part, source, route.source_rank))
        self._epoch = 0

    def move(self, num_tokens: int, have_tokens: int) -> None:
        self._epoch += 1
        for target, table, pushers in zip(self._targets, self._tables, self._pushers, strict=True):
            target.poison()
            size = target.memory.layout.block_tokens
            first_block, end_block = have_tokens // size, -(-num_tokens // size)
            destination = target.blocks[first_block:end_block]
            parts = tuple(part for _, part, _, _ in pushers)
            table.open(TRANSFER, self._epoch, destination, first_block, lambda *_: None, parts)
            outcomes = {}
            for pusher, _, source, rank in pushers:
                outcomes[rank] = PushOutcome()
                self._push(pusher, source, num_tokens, have_tokens, outcomes[rank])
            for outcome in outcomes.values():
                wait_until(lambda outcome=outcome: bool(outcome.sealed or outcome.failed), "sealed")  # type: ignore[misc]
            arrived = table.arrived(TRANSFER, self._epoch)
            assert arrived is not None
            assert arrived.is_complete, arrived.missing
            roots = {rank: outcome.sealed[0].root_digest for rank, outcome in outcomes.items() if destination}
            assert arrived.root_digests == roots

    def _push(self, pusher: LayerPusher, source: Rank, num_tokens: int, have_tokens: int, outcome: PushOutcome) -> None:
        session = pusher.open(PushRequest(TRANSFER, self._epoch, num_tokens, have_tokens, outcome.callbacks()))
        session.blocks_allocated(source.blocks[: -(-num_tokens // source.memory.layout.block_tokens)], 0)
        for start in range(0, num_tokens, CHUNK_TOKENS):
            session.chunk_started(start, min(CHUNK_TOKENS, num_tokens - start))
            for layer in range(NUM_LAYERS):
                session.layer_written(layer)
            session.chunk_finished()

    def close(self) -> None:
        for pushers in self._pushers:
            for pusher, *_ in pushers:
                pusher.close()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize(("source_tp", "target_tp"), list(itertools.product(TP_SIZES, TP_SIZES)))
@pytest.mark.parametrize(("source_block", "target_block"), list(itertools.product(BLOCKS, BLOCKS)))
def test_kv2_kv17_kv51_kv72_every_shape_prefix_and_remainder_moves_exactly(
    num_kv_heads: int, source_tp: int, target_tp: int, source_block: int, target_block: int
) -> None:
    """Prefix: none, a part, all whole blocks of the receiver, behind which nothing may be left. Remainder: the prompt
    ends at a block's end, one token behind it, one before it."""
    most_tokens = 3 * target_block
    content = oracle(num_kv_heads, most_tokens)
    sources = [Rank(num_kv_heads, source_tp, rank, source_block, most_tokens) for rank in range(source_tp)]
    targets = [Rank(num_kv_heads, target_tp, rank, target_block, most_tokens) for rank in range(target_tp)]
    for source in sources:
        source.write(content)
    with contextlib.closing(Movement(sources, targets, num_kv_heads)) as movement:
        for have_blocks, remainder in itertools.product(range(3), (0, 1, target_block - 1)):
            num_tokens, have_tokens = 2 * target_block + remainder, have_blocks * target_block
            movement.move(num_tokens, have_tokens)
            for target in targets:
                target.assert_exact(content, have_tokens, num_tokens)
                target.assert_untouched(have_tokens)


def test_an_element_of_the_oracle_is_no_other_element() -> None:
    content = oracle(8, 192)
    assert len(np.unique(content)) == content.size


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
    source.write(oracle(1, 20))
    gather = CellGather(source.memory, layout(1, 64), HeadRange(0, 1), HeadRange(0, 1))
    payload = np.frombuffer(gather.gather(source.blocks, CellRange(0, 1, 0, 1)), np.float32)
    assert (payload.reshape(2, 1, 64, HEAD_DIM)[:, :, 32:] == 0).all()
