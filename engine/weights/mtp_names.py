"""Layers that come with a checkpoint to predict the token after the next one (multi-token prediction), by their names.

    RMS norm of the embedding ─┐
    RMS norm of the state ─────┴─> projection ─> decoder layer ─> final norm ─> head: the token after the next one

Checkpoints name these parts in their own ways, and do not agree on which half of the projection is whose, nor on
whether states are taken before or behind a norm. The target is computed without them: who opens a checkpoint for it
leaves their tensors out, and its fingerprint does not know them. Here are names and shapes, no tensor.

Sources of names and order: DeepSeek-V3 (arXiv 2412.19437, section 2.2) as Hugging Face checkpoints have it, MiMo
(arXiv 2505.07608), Qwen3-Next; each as vLLM reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.errors import StartupError, shown
from engine.model_config import ModelConfig
from engine.weights.expected_shapes import expected_shapes

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_PREFIXES = ("mtp.", "model.mtp_layers.")
_LAYER_OF_ONE = "model.layers.0."


@dataclass(frozen=True, slots=True)
class MtpNaming:
    """How one family names the parts of its first block. `{layers}` stands for the target's number of layers."""

    family: str
    block: str  # what the parts' names begin with
    layer: str  # the same of the decoder layer's
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    head: str = ""  # what a block may have of its own; without it, the target's
    embedding: str = ""
    projects_embedding_first: bool = True  # the projection's first columns are the embedding's
    reads_normed_states: bool = True  # the target's last states come behind its final norm
    chains_normed_states: bool = True  # the block's own states do, when it guesses on


NAMINGS = (
    MtpNaming(
        "MiMo", "model.mtp_layers.0.", "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj",
        "final_layernorm", projects_embedding_first=False, reads_normed_states=False,
    ),
    MtpNaming("Qwen3-Next", "mtp.", "mtp.layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    MtpNaming(
        "DeepSeek-V3", "model.layers.{layers}.", "model.layers.{layers}.", "enorm", "hnorm", "eh_proj",
        "shared_head.norm", head="shared_head.head", embedding="embed_tokens", chains_normed_states=False,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MtpBlock:
    """The first block of a checkpoint: the stored names of its parts.

    `layer` maps the names of a model of one layer to the stored ones; head and embedding are empty where the block
    has none of its own.
    """

    naming: MtpNaming
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    layer: Mapping[str, str]
    head: str = ""
    embedding: str = ""


def is_mtp(name: str, num_layers: int, num_mtp_layers: int) -> bool:
    """Whether a tensor belongs to a multi-token prediction layer of a target with `num_layers` layers, whose config
    states `num_mtp_layers`."""
    if name.startswith(_PREFIXES):
        return True
    match = _LAYER.match(name)
    return match is not None and num_layers <= int(match[1]) < num_layers + num_mtp_layers


def find_mtp_block(where: str, target: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> MtpBlock:
    """The block among a checkpoint's multi-token prediction tensors, `shapes` by stored name.

    Raises `StartupError` when there is none, or one with other parts than the engine computes.
    """
    prefixes = {naming: naming.block.format(layers=target.num_layers) for naming in NAMINGS}
    naming = next((naming for naming, prefix in prefixes.items() if _has(shapes, prefix)), None)
    if naming is None:
        raise StartupError(
            f"{where} has no layers for multi-token prediction: take a checkpoint that comes with them "
            f"({_supported()}), or another drafter",
            param="speculation",
        )
    block, layer = prefixes[naming], naming.layer.format(layers=target.num_layers)
    hidden, vocabulary = target.hidden_size, (target.vocab_size, target.hidden_size)
    optional = {f"{block}{part}.weight": vocabulary for part in (naming.head, naming.embedding) if part}
    required = {
        f"{block}{naming.embedding_norm}.weight": (hidden,),
        f"{block}{naming.hidden_norm}.weight": (hidden,),
        f"{block}{naming.projection}.weight": (hidden, 2 * hidden),
        f"{block}{naming.final_norm}.weight": (hidden,),
    }
    names = {name: layer + name.removeprefix(_LAYER_OF_ONE) for name in layer_names(target)}
    of_one_layer = expected_shapes(one_layer_of(target))
    required |= {stored: of_one_layer[name] for name, stored in names.items()}
    _check(where, naming, required, optional, {name: shape for name, shape in shapes.items() if _is_first(name, layer)})
    return MtpBlock(
        naming=naming,
        embedding_norm=f"{block}{naming.embedding_norm}.weight",
        hidden_norm=f"{block}{naming.hidden_norm}.weight",
        projection=f"{block}{naming.projection}.weight",
        final_norm=f"{block}{naming.final_norm}.weight",
        layer=names,
        head=_if_there(shapes, f"{block}{naming.head}.weight"),
        embedding=_if_there(shapes, f"{block}{naming.embedding}.weight"),
    )


def one_layer_of(target: ModelConfig) -> ModelConfig:
    """A model of one of the target's layers, whose head stands where its embedding would."""
    return replace(target, name=f"{target.name}.mtp", num_layers=1, tie_embeddings=True)


def layer_names(target: ModelConfig) -> list[str]:
    """Names of a decoder layer's tensors in a model of one layer."""
    return [name for name in expected_shapes(one_layer_of(target)) if name.startswith(_LAYER_OF_ONE)]


def _check(
    where: str,
    naming: MtpNaming,
    required: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
) -> None:
    known = {**required, **optional}
    for name, shape in found.items():
        if name not in known:
            raise StartupError(
                f"{where}: its multi-token prediction layer ({naming.family}'s names) has tensor {shown(name)}, which "
                f"the engine does not compute: it knows one decoder layer like the target's ({_supported()})",
                param="speculation",
            )
        if shape != known[name]:
            raise StartupError(
                f"{where}: tensor {name} of multi-token prediction is {list(shape)}, must be {list(known[name])}",
                param="speculation",
            )
    for name in required:
        if name not in found:
            raise StartupError(
                f"{where} lacks tensor {name} of multi-token prediction: the checkpoint is incomplete, or of a family "
                f"that is not supported ({_supported()})",
                param="speculation",
            )


def _is_first(name: str, layer: str) -> bool:
    """Whether a tensor is of the first block, not of one behind it (`layer` is the first one's prefix)."""
    numbered, _, _ = layer.rstrip(".").rpartition(".")
    return name.startswith(layer) or not name.startswith(numbered + ".")


def _has(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in shapes)


def _if_there(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return name if name in shapes else ""


def _supported() -> str:
    return "supported are names as in " + ", ".join(naming.family for naming in NAMINGS)
