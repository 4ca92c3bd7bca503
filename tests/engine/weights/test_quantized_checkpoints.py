"""Quantised checkpoints (`engine.weights.quantized_layouts`): every layout, value for value, and real files' faults."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from cluster.errors import StartupError
from engine.model_loader import open_weights
from tests.engine.weights.quantized_checkpoints import (
    Quantized,
    awq_parts,
    gptq_parts,
    packed_parts,
    quantize,
    save_quantized,
)

Parts = dict[str, torch.Tensor]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq"}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


class Case:
    """One way of storing a matrix: what the config says, how it is quantised, what is stored."""

    def __init__(
        self, stated: dict[str, Any], store: Callable[[Quantized], Parts], kind: str | None = "Q4_1", **quantized: Any
    ) -> None:
        self.stated, self.store, self.kind, self.quantized = stated, store, kind, quantized


CASES = {
    "gptq": Case(GPTQ, gptq_parts),
    "gptq v2": Case(GPTQ | {"checkpoint_format": "gptq_v2"}, lambda q: gptq_parts(q, stored_less=0)),
    "gptq symmetric": Case(GPTQ | {"sym": True}, gptq_parts, symmetric=True),
    "gptq activation order": Case(GPTQ | {"desc_act": True}, gptq_parts, None, shuffled=True),
    "gptq 2 bits": Case(GPTQ | {"bits": 2}, lambda q: gptq_parts(q, bits=2), bits=2),
    "gptq 8 bits": Case(GPTQ | {"bits": 8}, lambda q: gptq_parts(q, bits=8), None, bits=8),
    "gptq 8 bits symmetric": Case(
        GPTQ | {"bits": 8, "sym": True}, lambda q: gptq_parts(q, bits=8), "Q8_0", bits=8, symmetric=True
    ),
    "gptq without indices": Case(GPTQ, lambda q: {k: v for k, v in gptq_parts(q).items() if k != "g_idx"}),
    "awq": Case(AWQ, awq_parts),
    "packed": Case(PACKED, packed_parts, symmetric=True),
    "packed zero points": Case(PACKED, lambda q: packed_parts(q, zero_points="packed")),
    "plain zero points": Case(PACKED, lambda q: packed_parts(q, zero_points="plain")),
    "packed 8 bits": Case(PACKED, lambda q: packed_parts(q, bits=8), "Q8_0", bits=8, symmetric=True),
    "packed groups of 16": Case(PACKED, packed_parts, None, symmetric=True, group=16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_layout_gives_the_quantised_values_exactly(case: Case, tmp_path: Path) -> None:
    expected: dict[str, torch.Tensor] = {}

    def store(module: str, weight: torch.Tensor) -> Parts:
        matrix = quantize(weight, **case.quantized)
        expected[f"{module}.weight"] = matrix.weight
        return case.store(matrix)

    model = save_quantized(tmp_path, case.stated, store)
    weights = open_weights(tmp_path)
    parameters = dict(model.named_parameters())
    assert weights.names() == sorted(parameters)
    for name in weights.names():
        assert torch.equal(weights.tensor(name), expected[name] if name in expected else parameters[name]), name
        raw = weights.raw_blocks(name)
        if name not in expected or case.kind is None:
            assert raw is None
            continue
        assert raw is not None
        assert raw.kind == case.kind
        decoded = torch.from_numpy(quants.dequantize(raw.data, GGMLQuantizationType[raw.kind]))
        step = float(expected[name].abs().max()) / 2 ** (3 if case.kind == "Q4_1" else 7)
        assert float((decoded - expected[name]).abs().max()) <= step / 100, name  # float16 rounds a minimum
    weights.close()


def test_q1_zero_points_are_read_by_what_the_data_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Symmetric files hold 7 (v1) or 8 (v2) and mean the middle. Files whose `checkpoint_format` lies are found out."""
    matrices = {}

    def opened(name: str, stated: dict[str, Any], stored_less: int, symmetric: bool) -> torch.Tensor:
        def store(module: str, weight: torch.Tensor) -> Parts:
            matrices[name, module] = quantize(weight, symmetric=symmetric)
            return gptq_parts(matrices[name, module], stored_less=stored_less)

        save_quantized(tmp_path / name, stated, store)
        return open_weights(tmp_path / name).tensor("model.layers.0.mlp.up_proj.weight")

    symmetric = GPTQ | {"sym": True}
    sevens = opened("sevens", symmetric, 1, True)
    eights = opened("eights", symmetric, 0, True)
    assert torch.equal(sevens, eights)
    assert torch.equal(sevens, matrices["sevens", "model.layers.0.mlp.up_proj"].weight)
    for name, says, stored_less in (("v1 says v2", "gptq_v2", 1), ("v2 says v1", "gptq", 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            weight = opened(name, GPTQ | {"checkpoint_format": says}, stored_less, False)
        assert torch.equal(weight, matrices[name, "model.layers.0.mlp.up_proj"].weight)
        assert "other than checkpoint_format says" in caplog.text


def test_q2_a_zero_point_of_zero_wraps_and_comes_back(tmp_path: Path) -> None:
    """Weights of one sign have zero point 0 or 15; v1 stores 0 as 15."""
    expected = {}

    def store(module: str, weight: torch.Tensor) -> Parts:
        with torch.no_grad():
            weight[0, :32] = weight[0, :32].abs() + 0.1
            weight[1, :32] = -weight[1, :32].abs() - 0.1
        matrix = quantize(weight)
        assert (matrix.zeros[0, 0], matrix.zeros[1, 0]) == (0, 15)
        expected[f"{module}.weight"] = matrix.weight
        return gptq_parts(matrix)

    save_quantized(tmp_path, GPTQ, store)
    weights = open_weights(tmp_path)
    for name, weight in expected.items():
        assert torch.equal(weights.tensor(name), weight)
        assert bool(torch.isfinite(weight).all())


def test_q3_a_symmetric_file_whose_zero_points_say_otherwise_is_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, GPTQ | {"sym": True}, lambda module, weight: gptq_parts(quantize(weight)))
    with pytest.raises(StartupError, match="says sym, but its zero points are not all 8 or all 7"):
        open_weights(tmp_path).tensor("model.layers.0.mlp.up_proj.weight")


def test_q4_packed_zero_points_of_outputs_that_do_not_fill_a_word(tmp_path: Path) -> None:
    """100 gate outputs are twelve and a half words: the last one is cut, and the inputs of `down` are, too."""

    def store(module: str, weight: torch.Tensor) -> Parts:
        matrix = quantize(weight, group=weight.shape[1])
        expected[f"{module}.weight"] = matrix.weight
        return packed_parts(matrix, zero_points="packed")

    expected: dict[str, torch.Tensor] = {}
    save_quantized(tmp_path, PACKED, store, intermediate_size=100)
    weights = open_weights(tmp_path)
    for name, weight in expected.items():
        assert torch.equal(weights.tensor(name), weight), name


@pytest.mark.parametrize("scale", [0.05, 1.0, 0.0, -1.0, float("nan")])
@pytest.mark.parametrize("present", [(), ("k_scale",), ("v_scale",), ("k_scale", "v_scale")])
def test_q6_q7_q8_scales_of_kv_in_a_checkpoint_change_nothing(
    scale: float, present: tuple[str, ...], tmp_path: Path
) -> None:
    """FP8 KV here has a scale for each token and head. So neither absent, lone, wrong nor dummy ones can do harm."""

    def store(module: str, weight: torch.Tensor) -> Parts:
        expected[f"{module}.weight"] = quantize(weight, symmetric=True).weight
        parts = packed_parts(quantize(weight, symmetric=True))
        if module.endswith(("k_proj", "v_proj")):
            parts |= {part: torch.tensor(scale) for part in present if part[0] == module[-6]}
        return parts

    expected: dict[str, torch.Tensor] = {}
    save_quantized(tmp_path, PACKED | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, store)
    weights = open_weights(tmp_path)
    for name, weight in expected.items():
        assert torch.equal(weights.tensor(name), weight)


@pytest.mark.parametrize(
    ("stated", "scale_shape", "part"),
    [
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, (-1, 1), "weight_scale"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, (1,), "weight_scale"),
        (FP8, (), "weight_scale"),
        (FP8 | {"weight_block_size": [48, 40]}, (48, 40), "weight_scale_inv"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, (-1, 1), "weight_scale"),
    ],
    ids=["float8 by output", "float8 by matrix", "fp8 by matrix", "fp8 by ragged blocks", "int8 by output"],
)
def test_stored_bytes_times_scales(
    stated: dict[str, Any], scale_shape: tuple[int, ...], part: str, tmp_path: Path
) -> None:
    is_integer = stated.get("format") == "int-quantized"

    def store(module: str, weight: torch.Tensor) -> Parts:
        outputs, inputs = weight.shape
        stored = (
            (weight * 100).round().clamp(-127, 127).to(torch.int8) if is_integer else weight.to(torch.float8_e4m3fn)
        )
        rng = np.random.default_rng(outputs)
        if part == "weight_scale_inv":
            rows, columns = scale_shape
            scales = torch.from_numpy(rng.uniform(0.5, 2, (-(-outputs // rows), -(-inputs // columns)))).float()
            full = torch.empty(outputs, inputs)
            for row in range(outputs):
                for column in range(inputs):
                    full[row, column] = scales[row // rows, column // columns]
        else:
            shape = tuple(outputs if size == -1 else size for size in scale_shape)
            scales = torch.from_numpy(rng.uniform(0.5, 2, shape)).float()
            full = scales.reshape(-1, 1).expand(outputs, inputs)
        expected[f"{module}.weight"] = stored.float() * full
        return {"weight": stored, part: scales, "input_scale": torch.tensor(1.0)}

    expected: dict[str, torch.Tensor] = {}
    save_quantized(tmp_path, stated, store)
    weights = open_weights(tmp_path)
    for name, weight in expected.items():
        assert torch.equal(weights.tensor(name), weight), name
        raw = weights.raw_blocks(name)
        assert (raw is None) is not is_integer
    weights.close()


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported: use gptq"),
        ({"quant_method": "modelopt"}, "quant_method 'modelopt'"),
        (GPTQ | {"bits": 3}, "bits 3"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (PACKED | {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (PACKED | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        ("int4", "quantization_config is 'int4'"),
    ],
)
def test_what_is_not_understood_is_refused_by_its_name(stated: Any, message: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, stated, lambda module, weight: {"weight": weight.detach().clone()})
    with pytest.raises(StartupError, match=message):
        open_weights(tmp_path)


def test_parts_that_contradict_each_other_are_refused_naming_the_matrix(tmp_path: Path) -> None:
    def cut(module: str, weight: torch.Tensor) -> Parts:
        parts = awq_parts(quantize(weight))
        return parts | {"qzeros": parts["qzeros"][:, :-1].clone()} if module.endswith("up_proj") else parts

    save_quantized(tmp_path, AWQ, cut)
    with pytest.raises(StartupError, match=r"up_proj.weight: its stored parts do not fit together"):
        open_weights(tmp_path).tensor("model.layers.0.mlp.up_proj.weight")


def test_missing_parts_are_refused_at_once(tmp_path: Path) -> None:
    def without_scales(module: str, weight: torch.Tensor) -> Parts:
        return {name: part for name, part in awq_parts(quantize(weight)).items() if name != "scales"}

    save_quantized(tmp_path, AWQ, without_scales)
    with pytest.raises(StartupError, match=r"lacks tensor model.layers.0.self_attn.q_proj.weight"):
        open_weights(tmp_path)


def test_zeros_that_exporters_write_as_biases_are_no_biases(tmp_path: Path) -> None:
    def store(module: str, weight: torch.Tensor) -> Parts:
        return gptq_parts(quantize(weight)) | {"bias": torch.full((weight.shape[0],), bias_value)}

    bias_value = 0.0
    save_quantized(tmp_path / "zeros", GPTQ, store)
    assert not [name for name in open_weights(tmp_path / "zeros").names() if name.endswith("bias")]
    bias_value = 0.5
    save_quantized(tmp_path / "real", GPTQ, store)
    with pytest.raises(StartupError, match=r"\.bias', which a llama model has no place for"):
        open_weights(tmp_path / "real")


def test_other_values_of_the_same_shapes_give_another_fingerprint(tmp_path: Path) -> None:
    fingerprints = set()
    for seed in (0, 1):

        def store(module: str, weight: torch.Tensor, scale: float = 1.0 + seed) -> Parts:
            return awq_parts(quantize(weight * scale))

        save_quantized(tmp_path / str(seed), AWQ, store)
        fingerprints.add(open_weights(tmp_path / str(seed)).config.fingerprint)
    assert len(fingerprints) == 2
