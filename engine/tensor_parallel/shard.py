"""What one rank of a sharded model holds: its heads, its part of the MLP, its rows of the vocabulary.

    q, k, v, gate, up     rows of its heads, of its part of the MLP     each input is read by every rank
    attention out, down   the columns that read those                   outputs are summed over the ranks
    embedding, logits     rows of its part of the vocabulary            summed, and laid side by side
    norms                 whole

Source: Megatron-LM (arXiv 1909.08053, section 3). With more ranks than KV heads, neighbouring ranks compute the same
one, each for its own query heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cluster.errors import StartupError
from engine.model_config import ModelConfig
from engine.weights.weight_source import RawBlocks, WeightFile

ALL = slice(None)
VOCABULARY_MODULES = frozenset({"embed_tokens", "lm_head"})


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`."""

    rank: int
    size: int

    def part(self, total: int) -> slice:
        """Its share of what divides evenly."""
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def kv_heads(self, num_kv_heads: int) -> slice:
        """The KV heads that its query heads read."""
        if num_kv_heads >= self.size:
            return self.part(num_kv_heads)
        first = self.rank * num_kv_heads // self.size
        return slice(first, first + 1)

    def vocabulary(self, vocab_size: int) -> slice:
        """Its token ids, as many as every other rank's: the last ones may lie behind the vocabulary."""
        share = -(-vocab_size // self.size)
        return slice(self.rank * share, (self.rank + 1) * share)


def check_divides(config: ModelConfig, size: int) -> None:
    """Raises `StartupError` for a number of ranks that the model's heads or its MLP do not divide into."""
    larger, smaller = max(size, config.num_kv_heads), min(size, config.num_kv_heads)
    for what, fits in (
        (f"{config.num_heads} heads", config.num_heads % size == 0),
        (f"{config.num_kv_heads} KV heads", larger % smaller == 0),
        (f"an MLP of {_mlp_size(config)}", _mlp_size(config) % size == 0),
    ):
        if not fits:
            raise StartupError(
                f"{config.name} has {what}, which tensor_parallel {size} does not divide: set another one",
                param="tensor_parallel",
            )


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The config of what the rank computes. `vocab_size` stays the whole one."""
    heads = shard.kv_heads(config.num_kv_heads)
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // shard.size,
        num_kv_heads=heads.stop - heads.start,
        intermediate_size=config.intermediate_size // shard.size,
        mixture=config.mixture
        and dataclasses.replace(config.mixture, expert_size=config.mixture.expert_size // shard.size),
    )


class ShardedWeights:
    """One rank's part of a checkpoint; keeps `engine.weights.weight_source.WeightSource`'s promise.

    What of a matrix is not the rank's is not converted, let alone kept.
    """

    blocks_are_exact = False

    def __init__(self, whole: WeightFile, shard: Shard) -> None:
        """Raises `StartupError` as `check_divides`."""
        check_divides(whole.config, shard.size)
        self.config = shard_config(whole.config, shard)
        self._whole = whole
        self._shard = shard
        config, head_dim = whole.config, whole.config.head_dim
        query = _scaled(shard.part(config.num_heads), head_dim)
        key_value = _scaled(shard.kv_heads(config.num_kv_heads), head_dim)
        mlp = shard.part(_mlp_size(config))
        vocabulary = shard.vocabulary(config.vocab_size)
        self._parts = {
            "q_proj": (query, ALL),
            "k_proj": (key_value, ALL),
            "v_proj": (key_value, ALL),
            "o_proj": (ALL, query),
            "gate_proj": (mlp, ALL),
            "up_proj": (mlp, ALL),
            "down_proj": (ALL, mlp),
            "embed_tokens": (vocabulary, ALL),
            "lm_head": (vocabulary, ALL),
        }

    def names(self) -> Sequence[str]:
        return self._whole.names()

    def tensor(self, name: str) -> torch.Tensor:
        module = name.split(".")[-2]
        if module not in self._parts:
            return self._whole.tensor(name)
        rows, columns = self._parts[module]
        if module not in VOCABULARY_MODULES:
            return self._whole.part(name, rows, columns)
        # A rank whose ids lie behind the vocabulary in part, or all of them, has zeros for those.
        vocab_size = self._whole.config.vocab_size
        first, last = min(rows.start, vocab_size), min(rows.stop, vocab_size)
        weight = self._whole.part(name, slice(first, last), columns)
        return torch.nn.functional.pad(weight, (0, 0, 0, rows.stop - rows.start - len(weight)))

    def raw_blocks(self, name: str) -> RawBlocks | None:
        """None: a part of a matrix may end within a block."""
        return None

    def close(self) -> None:
        self._whole.close()


def _mlp_size(config: ModelConfig) -> int:
    """Of the MLP, or of each expert: every rank has a part of all experts."""
    return config.intermediate_size if config.mixture is None else config.mixture.expert_size


def _scaled(heads: slice, head_dim: int) -> slice:
    return slice(heads.start * head_dim, heads.stop * head_dim)
