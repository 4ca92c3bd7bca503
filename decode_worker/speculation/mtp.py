"""The layer for multi-token prediction that comes with a checkpoint, as a drafter (`--speculation mtp`).

    target's last state of a row, embedding of the token it chose ─ norms, projection ─┐
    own last state, embedding of the guess behind it ────────────── norms, projection ─┴─> decoder layer ─> head

It is EAGLE's layer with one tap and the whole vocabulary, so `eagle` keeps its contexts. The norms' weights are folded
into the projection; a norm that states went through before (the target's final one, the block's own) is not linear and
stays. Guesses behind the first one chain the first block, as its own states go on; further blocks are left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from cluster.errors import StartupError
from cluster.model_files import resolve_model
from cluster.worker_settings import WorkerSettings
from decode_worker.speculation.eagle import BLOCKS_PER_CONTEXT, EagleDrafter
from decode_worker.speculation.eagle_layer import EagleLayer, Fusion, open_layer
from engine.model_config import ModelConfig
from engine.model_loader import open_weights
from engine.weights.mtp_names import MtpBlock, find_mtp_block, one_layer_of
from engine.weights.safetensors_weights import SafetensorsWeights
from engine.weights.weight_source import RawBlocks

logger = logging.getLogger(__name__)

NAME = "mtp"


class TensorSource(Protocol):
    """What of an open checkpoint a block is read from."""

    def tensor(self, name: str) -> torch.Tensor: ...

    def raw_blocks(self, name: str) -> RawBlocks | None: ...


def open_mtp(settings: WorkerSettings, target: ModelConfig) -> EagleDrafter:
    """Raises `StartupError` for a model that comes without such a layer, or with one that the engine does not know."""
    model = resolve_model(settings.model)
    weights = open_weights(model)
    try:
        if not isinstance(weights, SafetensorsWeights):
            raise StartupError(
                f"{model} is a GGUF file, of which layers for multi-token prediction are not read: take the model's "
                "safetensors directory, or another drafter",
                param="speculation",
            )
        block = find_mtp_block(str(model), target, weights.mtp_shapes)
        logger.info("multi-token prediction layer found", extra={"family": block.naming.family})
        # A request that was preempted keeps its context for a while.
        max_contexts = 2 * settings.max_sequences
        layer = open_mtp_layer(block, target, weights, max_contexts * BLOCKS_PER_CONTEXT)
        return EagleDrafter(layer, max_contexts, name=NAME)
    finally:
        weights.close()


def open_mtp_layer(block: MtpBlock, target: ModelConfig, source: TensorSource, num_blocks: int) -> EagleLayer:
    """`source` has the block's tensors and the target's; it may be closed afterwards."""
    head = block.head or ("model.embed_tokens.weight" if target.tie_embeddings else "lm_head.weight")
    final_norm = source.tensor(block.final_norm)
    projection = _projection(block, source)
    fusion = Fusion(
        tap_layers=(target.num_layers - 1,),
        vocabulary=torch.arange(target.vocab_size),
        embedding=source.tensor(block.embedding or "model.embed_tokens.weight"),
        first=projection,
        following=projection,
        tap_norm=source.tensor("model.norm.weight") if block.naming.reads_normed_states else None,
        state_norm=final_norm if block.naming.chains_normed_states else None,
    )
    names = {"model.embed_tokens.weight": head, "model.norm.weight": block.final_norm, **block.layer}
    return open_layer(fusion, _BlockWeights(one_layer_of(target), source, names), num_blocks)


def _projection(block: MtpBlock, source: TensorSource) -> torch.Tensor:
    """[hidden, 2 * hidden]: the state's columns, then the embedding's, each with its norm's weights."""
    halves = source.tensor(block.projection).float().chunk(2, dim=1)
    of_embedding, of_state = halves if block.naming.projects_embedding_first else reversed(halves)
    of_state = of_state * source.tensor(block.hidden_norm).float()
    of_embedding = of_embedding * source.tensor(block.embedding_norm).float()
    return torch.cat((of_state, of_embedding), dim=1)


class _BlockWeights:
    """The block's decoder layer as a checkpoint of one layer; a `WeightSource` over the one that it came with."""

    blocks_are_exact = False

    def __init__(self, config: ModelConfig, source: TensorSource, names: dict[str, str]) -> None:
        self.config = config
        self._source = source
        self._names = names

    def names(self) -> Sequence[str]:
        return sorted(self._names)

    def tensor(self, name: str) -> torch.Tensor:
        return self._source.tensor(self._names[name])

    def raw_blocks(self, name: str) -> RawBlocks | None:
        return self._source.raw_blocks(self._names[name])

    def close(self) -> None: ...
