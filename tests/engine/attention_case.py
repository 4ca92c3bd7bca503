"""One layer's attention over given keys and values, through the native runner, in chunks of a test's choice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from engine.draft import Draft
from engine.native_runner import NativeRunner
from tests.engine.native_model import SMALL_LLAMA, Batch, RandomWeights, poisoned_memory

Floats = npt.NDArray[np.float32]

NUM_ROWS = 50
PREFIX = 250  # keys before these rows: a whole tile of 128, and a part of one that ends within a chain
# Tiles, few rows, and both; for groups of up to 8 query heads a chunk of one token is of few rows.
CHUNKS = ([50], [1] * 50, [20, 8, 7, 3, 1, 1, 1, 1, 8])
KV_HEADS = 2


class Case:
    """One layer that attends to given keys and values of `PREFIX` tokens, and to zeros of its own rows."""

    def __init__(self, head_dim: int, group: int = 3, window: int = 0, seed: int = 0) -> None:
        heads = KV_HEADS * group
        self.config = replace(
            SMALL_LLAMA,
            num_layers=1,
            num_heads=heads,
            num_kv_heads=KV_HEADS,
            head_dim=head_dim,
            hidden_size=heads * head_dim,
            sliding_window=window,
        )
        self.weights = RandomWeights(self.config, seed)
        layer = "model.layers.0."
        for name in ("self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
            self.weights.tensors[f"{layer}{name}.weight"][:] = 0
        for name in ("self_attn.q_proj", "self_attn.o_proj"):
            self.weights.tensors[f"{layer}{name}.weight"] = torch.eye(heads * head_dim)
        self.weights.tensors["model.embed_tokens.weight"] *= 2.0**-6  # taken off what comes out: it shall not hide much
        random = np.random.default_rng(seed)
        self.tokens = [int(token) for token in random.integers(0, self.config.vocab_size, PREFIX + NUM_ROWS)]
        self.keys = random.standard_normal((PREFIX, KV_HEADS, head_dim)).astype(np.float32)
        self.values = random.standard_normal((PREFIX, KV_HEADS, head_dim)).astype(np.float32)

    def attended(
        self,
        isa: str,
        chunks: list[int],
        kv_dtype: str = "bfloat16",
        block_tokens: int = 16,
        tree: Draft | None = None,
    ) -> Floats:
        """[rows, query heads * head_dim], computed in these chunks; the first one may be a tree."""
        num_blocks = 2 * -(-len(self.tokens) // block_tokens)
        memory = poisoned_memory(self.config, dtype=kv_dtype, block_tokens=block_tokens, num_blocks=num_blocks)
        runner = NativeRunner(self.config, self.weights, memory, dtype="float32", isa=isa)
        batch = Batch(num_blocks, block_tokens)
        sequence = batch.add(self.tokens)
        for token in range(PREFIX):
            place = memory.tensor[sequence.blocks[token // block_tokens], 0, :, :, token % block_tokens]
            place[:] = torch.from_numpy(np.stack([self.keys[token], self.values[token]])).bfloat16().to(place.dtype)
        sequence.computed = PREFIX
        rows = []
        for count in chunks:
            step = replace(batch.step([(sequence, count)]), tap_layers=(0,))
            if tree is not None:
                step = replace(step, tree_masks=np.array(tree.tree_masks(), np.int32))
                step.positions[1:] = step.positions[0] + np.array(tree.depths(), np.int32)
            taps = runner.forward(step, None).taps
            assert taps is not None
            rows.append(taps[:, 0].numpy().copy())
        runner.close()
        embedded = self.weights.tensors["model.embed_tokens.weight"][self.tokens[PREFIX:][: sum(chunks)]].numpy()
        found: Floats = np.concatenate(rows) - embedded
        return found

    def in_float32(self, isa: str) -> Floats:
        """The same of keys and values that are kept as float32."""
        return self.attended(isa, [NUM_ROWS], kv_dtype="float32")


def root_mean_square(values: Floats) -> float:
    return float(np.sqrt((values.astype(np.float64) ** 2).mean()))


def assert_near(found: Floats, expected: Floats, bound: float) -> None:
    assert root_mean_square(found - expected) < bound * root_mean_square(expected)


def assert_tree_sees_its_branches(case: Case, isa: str, parents: tuple[int, ...], bound: float) -> None:
    """Near to floats, unlike a chunk; and a tree that is a chain gives the bits of a chunk."""
    case.keys[:] = 0  # so that each key that is hidden by mistake, or is not, shows
    rows = [1 + len(parents)]
    tree, chain = Draft(tuple(range(len(parents))), parents), Draft.chain(tuple(range(len(parents))))
    found = case.attended(isa, rows, tree=tree)
    assert_near(found, case.attended(isa, rows, kv_dtype="float32", tree=tree), bound)
    in_chunk = case.attended(isa, rows)
    assert not np.array_equal(found, in_chunk)
    np.testing.assert_array_equal(case.attended(isa, rows, tree=chain), in_chunk)
