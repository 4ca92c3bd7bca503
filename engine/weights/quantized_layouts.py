"""From the tensors that a quantised checkpoint stores of one module to its matrix. Pure functions of tensors.

A stored tensor `model.layers.0.mlp.up_proj.qweight` belongs to module `model.layers.0.mlp.up_proj` as part `qweight`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from cluster.errors import StartupError
from engine.weights.quantization_config import CheckpointQuantization
from engine.weights.quantized_matrix import QuantizedMatrix

logger = logging.getLogger(__name__)

Parts = Mapping[str, torch.Tensor]
WORD_BITS = 32
# The output (of eight in a word) that each nibble of an AWQ word holds, lowest first.
AWQ_NIBBLE_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
# Zero points that are off by one move the mean of all values by one step; a right one leaves it near none.
CLEAR_MEAN_DIFFERENCE = 0.5
# With more, a step is too small beside the spread of the values for their mean to tell, and too small to do harm.
MAX_TELLING_BITS = 4


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[..., n * 32 / bits]` from int32 words `[..., n]`, the lowest bits first."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    values: torch.Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return values.to(torch.uint8).flatten(-2)


def read_gptq(name: str, parts: Parts, quantization: CheckpointQuantization) -> QuantizedMatrix:
    """qweight `[inputs / n, outputs]`, qzeros `[groups, outputs / n]`, scales `[groups, outputs]`, g_idx `[inputs]`."""
    inputs, outputs = _gptq_inputs(parts), parts["scales"].shape[1]
    bits = WORD_BITS * parts["qweight"].shape[0] // inputs
    values = unpack_words(parts["qweight"].t().contiguous(), bits)
    scales = parts["scales"].float().t().contiguous()
    groups = _groups(parts.get("g_idx"), values.shape[1], scales.shape[1])
    zeros = torch.full_like(scales, 2 ** (bits - 1))
    if "qzeros" in parts:
        stored = unpack_words(parts["qzeros"], bits)[:, :outputs].t()
        if quantization.is_symmetric:
            _check_symmetric(name, stored, bits)
        else:
            zeros = _zero_points(name, values, stored, groups, bits, quantization.zero_offset).float()
    if bits == 8 and bool((zeros == 128).all()):
        return QuantizedMatrix((values ^ 128).view(torch.int8), scales, None, groups, bits)
    return QuantizedMatrix(values, scales, zeros, groups, bits)


def read_awq(name: str, parts: Parts, quantization: CheckpointQuantization) -> QuantizedMatrix:
    """qweight `[inputs, outputs / 8]`, qzeros `[groups, outputs / 8]`, scales `[groups, outputs]`."""
    values, zeros = (_unpack_awq(parts[part]).t().contiguous() for part in ("qweight", "qzeros"))
    return QuantizedMatrix(values, parts["scales"].float().t().contiguous(), zeros.float(), None, bits=4)


def read_packed(name: str, parts: Parts, quantization: CheckpointQuantization) -> QuantizedMatrix:
    """weight_packed `[outputs, inputs / n]`, weight_scale `[outputs, groups]`; zero points packed along the outputs,
    or as int8 `[outputs, groups]`. Signed values are stored from 0 on."""
    outputs, inputs = (int(size) for size in parts["weight_shape"])
    bits = _packed_bits(parts["weight_packed"].shape[1], inputs)
    values = unpack_words(parts["weight_packed"], bits)[:, :inputs].contiguous()
    scales = parts["weight_scale"].float()
    middle = 2 ** (bits - 1)
    zeros = torch.full_like(scales, middle)
    stored = parts.get("weight_zero_point")
    if stored is not None and stored.dtype == torch.int32 and stored.shape != scales.shape:
        zeros = unpack_words(stored.t().contiguous(), bits)[:, :outputs].t().float().contiguous()
    elif stored is not None:
        zeros = stored.float() + middle
    groups = _groups(parts.get("weight_g_idx"), inputs, scales.shape[1])
    if bits == 8 and stored is None:
        return QuantizedMatrix((values ^ 128).view(torch.int8), scales, None, groups, bits)
    return QuantizedMatrix(values, scales, zeros, groups, bits)


def read_scaled(name: str, parts: Parts, quantization: CheckpointQuantization) -> QuantizedMatrix:
    """weight `[outputs, inputs]` in int8 or float8, its scales for all, by output, by group of inputs or by block."""
    values = parts["weight"]
    outputs, inputs = values.shape
    scales = parts["weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"].float()
    scales = scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(scales.shape[0], -1)
    zeros = parts["weight_zero_point"].float().reshape(scales.shape) if "weight_zero_point" in parts else None
    block_outputs = quantization.block_outputs or -(-outputs // scales.shape[0])
    block_inputs = quantization.block_inputs or -(-inputs // scales.shape[1])
    groups = None
    if inputs != block_inputs * scales.shape[1]:
        groups = torch.arange(inputs) // block_inputs
        if int(groups[-1]) >= scales.shape[1]:
            raise StartupError(f"{name}: {scales.shape[1]} scales do not cover {inputs} inputs", param="model")
    if scales.shape[0] * block_outputs < outputs:
        raise StartupError(f"{name}: {scales.shape[0]} scales do not cover {outputs} outputs", param="model")
    return QuantizedMatrix(
        values,
        _by_output(scales, block_outputs, outputs),
        None if zeros is None else _by_output(zeros, block_outputs, outputs),
        groups,
        bits=8,
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of storing a matrix: which parts it has, how large it is, how it is read."""

    required: frozenset[str]
    optional: frozenset[str]
    shape: Callable[[Parts], tuple[int, int]]
    read: Callable[[str, Parts, CheckpointQuantization], QuantizedMatrix]


GPTQ = Layout(
    frozenset({"qweight", "scales"}),
    frozenset({"qzeros", "g_idx"}),
    lambda parts: (parts["scales"].shape[1], _gptq_inputs(parts)),
    read_gptq,
)
AWQ = Layout(
    frozenset({"qweight", "qzeros", "scales"}),
    frozenset(),
    lambda parts: (parts["scales"].shape[1], parts["qweight"].shape[0]),
    read_awq,
)
PACKED = Layout(
    frozenset({"weight_packed", "weight_scale", "weight_shape"}),
    frozenset({"weight_zero_point", "weight_g_idx"}),
    lambda parts: (int(parts["weight_shape"][0]), int(parts["weight_shape"][1])),
    read_packed,
)
SCALED = Layout(
    frozenset({"weight", "weight_scale"}),
    frozenset({"weight_zero_point"}),
    lambda parts: (parts["weight"].shape[0], parts["weight"].shape[1]),
    read_scaled,
)
SCALED_INVERSELY = Layout(frozenset({"weight", "weight_scale_inv"}), frozenset(), SCALED.shape, read_scaled)
LAYOUTS: Mapping[str, tuple[Layout, ...]] = {
    "gptq": (GPTQ,),
    "awq": (AWQ,),
    "compressed-tensors": (PACKED, SCALED),
    "fp8": (SCALED, SCALED_INVERSELY),
}
# Scales of activations and of KV, which nobody reads here.
IGNORED_PARTS = frozenset({"input_scale", "input_zero_point", "k_scale", "v_scale", "kv_scale", "q_scale"})


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    nibbles = unpack_words(words, 4).view(*words.shape, len(AWQ_NIBBLE_OUTPUTS))
    ordered = torch.empty_like(nibbles)
    ordered[..., list(AWQ_NIBBLE_OUTPUTS)] = nibbles
    return ordered.flatten(-2)


def _gptq_inputs(parts: Parts) -> int:
    """From the group indices; old files lack them, and their zero points give the bits instead."""
    if "g_idx" in parts:
        return parts["g_idx"].shape[0]
    words_per_row = parts["qzeros"].shape[1] if "qzeros" in parts else parts["scales"].shape[1] // 8
    return parts["qweight"].shape[0] * parts["scales"].shape[1] // words_per_row


def _packed_bits(words: int, inputs: int) -> int:
    """The most bits with which so many inputs fill so many words: 4 or 8, as exporters pack."""
    for bits in (8, 4, 2):
        if -(-inputs * bits // WORD_BITS) == words:
            return bits
    raise StartupError(f"{inputs} inputs in {words} words are not packed by 2, 4 or 8 bits", param="model")


def _groups(group_of_input: torch.Tensor | None, inputs: int, num_groups: int) -> torch.Tensor | None:
    """None where groups of equal size follow each other, which is what most files say at length."""
    if group_of_input is None:
        return None
    groups = group_of_input.long()
    if inputs % num_groups == 0 and torch.equal(groups, torch.arange(inputs) // (inputs // num_groups)):
        return None
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise StartupError(f"group indices lie outside the {num_groups} groups of scales", param="model")
    return groups


def _check_symmetric(name: str, stored: torch.Tensor, bits: int) -> None:
    """Symmetric files carry zero points all the same: the middle, or one less. Anything else contradicts the config."""
    middle = 2 ** (bits - 1)
    if not (bool((stored == middle).all()) or bool((stored == middle - 1).all())):
        raise StartupError(
            f"{name}: the checkpoint says sym, but its zero points are not all {middle} or all {middle - 1}",
            param="model",
        )


def _zero_points(
    name: str, values: torch.Tensor, stored: torch.Tensor, groups: torch.Tensor | None, bits: int, declared: int
) -> torch.Tensor:
    """Zero points from stored ones, which wrap. What the file declares may be wrong: the values themselves tell, since
    quantised weights lie around zero."""
    candidates: dict[int, torch.Tensor] = {offset: (stored + offset) & (2**bits - 1) for offset in (0, 1)}
    means = {offset: abs(_mean_value(values, zeros, groups)) for offset, zeros in candidates.items()}
    other = 1 - declared
    if bits <= MAX_TELLING_BITS and means[declared] - means[other] > CLEAR_MEAN_DIFFERENCE:
        logger.warning(
            "%s: zero points are stored %s, other than checkpoint_format says; they are read so",
            name,
            "less one (gptq)" if other else "as they are (gptq_v2)",
        )
        return candidates[other]
    return candidates[declared]


def _mean_value(values: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor | None) -> float:
    by_input = zeros if groups is None else zeros[:, groups]
    return float(values.float().mean()) - float(by_input.float().mean())


def _by_output(scales: torch.Tensor, block_outputs: int, outputs: int) -> torch.Tensor:
    return scales.repeat_interleave(block_outputs, dim=0)[:outputs].contiguous()
