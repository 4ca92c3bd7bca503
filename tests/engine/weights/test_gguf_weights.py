"""`engine.weights.gguf_weights`: values, rows in the right order, refusals in one line."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from cluster.errors import StartupError
from engine.model_config import RopeScaling
from engine.model_loader import open_weights
from engine.models.rope import rope_frequencies
from engine.weights.gguf_weights import GgufWeights
from tests.engine.tiny_models import VARIANTS, add_gguf_tensor, gguf_name, random_model, save_gguf


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in ("llama3", "linear")])
def test_f32_file_gives_back_the_models_own_tensors(variant: str, tmp_path: Path) -> None:
    model = random_model(variant)
    weights = GgufWeights(save_gguf(model, tmp_path / "m.gguf"))
    expected = dict(model.named_parameters())
    assert weights.names() == sorted(expected)
    for name in weights.names():
        assert torch.equal(weights.tensor(name), expected[name]), name
        assert weights.raw_blocks(name) is None
    weights.close()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_file_gives_the_rounded_values_in_hugging_face_order(kind: str, tmp_path: Path) -> None:
    model = random_model("llama")
    weights = GgufWeights(save_gguf(model, tmp_path / "m.gguf", kind))
    quantization = gguf.GGMLQuantizationType[kind]
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            # Quantising works by row, so rounding commutes with the permutation of rows.
            rounded = gguf.quants.dequantize(
                gguf.quants.quantize(parameter.detach().numpy(), quantization), quantization
            )
            assert np.array_equal(weights.tensor(name).float().numpy(), rounded.astype(np.float32)), name
    assert weights.tensor("model.norm.weight").dtype == torch.float32
    assert weights.tensor("model.embed_tokens.weight").dtype == (torch.bfloat16 if kind == "BF16" else torch.float32)
    weights.close()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_raw_blocks_are_the_rows_of_the_tensor(kind: str, tmp_path: Path) -> None:
    weights = GgufWeights(save_gguf(random_model("llama"), tmp_path / "m.gguf", kind))
    for name in (
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.2.self_attn.k_proj.weight",
        "model.embed_tokens.weight",
    ):
        raw = weights.raw_blocks(name)
        assert raw is not None
        assert raw.kind == kind
        assert raw.data.dtype == np.uint8
        values = gguf.quants.dequantize(raw.data, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(values, weights.tensor(name).numpy())
    assert weights.raw_blocks("model.norm.weight") is None
    weights.close()


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_k_quants_follow_the_ggml_formula(kind: str, tmp_path: Path) -> None:
    """The package has no quantiser for these: random blocks, read back by the formula of ggml-quants.c."""
    model = random_model("llama", hidden_size=256, head_dim=64)
    path = tmp_path / "m.gguf"
    blocks = {
        name: _random_k_blocks(kind, p.shape, seed)
        for seed, (name, p) in enumerate(model.named_parameters())
        if p.ndim == 2 and p.shape[1] % 256 == 0
    }
    save_gguf(model, path)
    _replace_tensors(path, tmp_path / "k.gguf", blocks, kind)
    weights = GgufWeights(tmp_path / "k.gguf")
    formula = _q4_k_values if kind == "Q4_K" else _q6_k_values
    name = "model.layers.0.mlp.gate_proj.weight"
    expected = np.concatenate([formula(block) for block in blocks[name].reshape(-1, blocks[name].shape[1])])
    assert np.allclose(weights.tensor(name).numpy().reshape(-1), expected, rtol=1e-6, atol=1e-7)
    weights.close()


def test_llama3_rope_factors_become_the_published_parameters(tmp_path: Path) -> None:
    model = random_model("llama3")
    scaling = RopeScaling("llama3", factor=32.0)
    divisors = rope_frequencies(16, 10_000.0, None) / rope_frequencies(16, 10_000.0, scaling)
    save_gguf(model, tmp_path / "m.gguf")
    _replace_tensors(
        tmp_path / "m.gguf", tmp_path / "r.gguf", {}, "F32", {"rope_freqs.weight": divisors.astype(np.float32)}
    )
    weights = GgufWeights(tmp_path / "r.gguf")
    assert weights.config.rope_scaling is not None
    assert weights.config.rope_scaling.factor == pytest.approx(32.0)
    weights.close()
    _replace_tensors(
        tmp_path / "m.gguf", tmp_path / "x.gguf", {}, "F32", {"rope_freqs.weight": (divisors * 1.5).astype(np.float32)}
    )
    with pytest.raises(StartupError, match="no Llama 3 rope scaling"):
        GgufWeights(tmp_path / "x.gguf")


def test_config_comes_from_the_metadata(tmp_path: Path) -> None:
    config = GgufWeights(save_gguf(random_model("mistral"), tmp_path / "m.gguf")).config
    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 3, 4, 2)
    assert (config.head_dim, config.hidden_size, config.vocab_size, config.max_model_len) == (16, 64, 160, 512)
    assert (config.sliding_window, config.tie_embeddings, config.eos_token_ids) == (24, False, (1,))
    assert GgufWeights(save_gguf(random_model("qwen2"), tmp_path / "q2.gguf")).config.attention_bias
    qwen3 = GgufWeights(save_gguf(random_model("qwen3"), tmp_path / "q3.gguf")).config
    assert qwen3.qk_norm
    assert qwen3.head_dim == 32


def test_every_truncation_is_refused_in_one_line(tmp_path: Path) -> None:
    data = save_gguf(random_model("llama"), tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 1200, 37), *range(1200, len(data), len(data) // 40), len(data) - 64]:
        path.write_bytes(data[:size])
        with pytest.raises(StartupError) as caught:
            GgufWeights(path)
        assert "\n" not in caught.value.message
        assert str(path) in caught.value.message


def test_f35_flipped_header_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    data = bytearray(save_gguf(random_model("llama"), tmp_path / "m.gguf").read_bytes())
    path = tmp_path / "flipped.gguf"
    rng = np.random.default_rng(0)
    messages: list[str] = []
    for position in rng.integers(0, 6000, 300):
        flipped = data.copy()
        flipped[position] ^= 0xFF
        path.write_bytes(flipped)
        try:
            GgufWeights(path).close()
        except StartupError as error:
            messages.append(error.message)
    assert len(messages) > 30
    assert not any("\n" in message for message in messages)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma3"}, "'gemma3' model: supported are"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.value_length": 8}, "value_length is 8, only 16"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"llama.block_count": 2}, "has tensor 'model.layers.2"),
        ({"llama.block_count": 4}, "lacks tensor model.layers.3"),
        ({"llama.feed_forward_length": 128}, "its config asks for"),
    ],
)
def test_unsupported_files_say_what_is_unsupported(
    metadata: dict[str, int | str | list[int]], message: str, tmp_path: Path
) -> None:
    save_gguf(random_model("llama"), tmp_path / "m.gguf")
    _replace_tensors(tmp_path / "m.gguf", tmp_path / "x.gguf", {}, "F32", metadata=metadata)
    with pytest.raises(StartupError, match=message):
        GgufWeights(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        *(
            ({"general.architecture": name}, f"'{name}' model: supported are")
            for name in ("gemma3", "jamba", "gpt-oss")
        ),
        ({"llama.attention.head_count_kv": [2, 0, 2]}, "head_count_kv is"),
        ({"llama.attention.sliding_window": [24, 0, 24]}, "sliding_window is"),
    ],
)
def test_kv25_rt11_a_file_whose_layers_keep_several_kinds_of_kv_is_refused(
    metadata: dict[str, int | str | list[int]], message: str, tmp_path: Path
) -> None:
    save_gguf(random_model("llama"), tmp_path / "m.gguf")
    _replace_tensors(tmp_path / "m.gguf", tmp_path / "x.gguf", {}, "F32", metadata=metadata)
    with pytest.raises(StartupError, match=message):
        GgufWeights(tmp_path / "x.gguf")


def test_missing_pickled_and_foreign_files_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model at all, only some text that is long enough")
    for name in ("pytorch_model.bin", "model.pt", "weights.pth"):
        (tmp_path / name).write_bytes(b"\x80\x04")
    cases = {
        "absent.gguf": "is not there: check the path",
        "text.gguf": "is not a GGUF file",
        "pytorch_model.bin": "convert the model to safetensors or GGUF",
        "model.pt": "convert the model to safetensors or GGUF",
        "weights.pth": "convert the model to safetensors or GGUF",
    }
    for name, message in cases.items():
        with pytest.raises(StartupError, match=message):
            open_weights(tmp_path / name)


def test_fingerprint_tells_weights_and_configs_apart_and_is_stable(tmp_path: Path) -> None:
    def fingerprint(variant: str, seed: int, kind: str = "F32") -> str:
        weights = GgufWeights(save_gguf(random_model(variant, seed), tmp_path / f"{variant}{seed}{kind}.gguf", kind))
        weights.close()
        return weights.config.fingerprint

    assert fingerprint("llama", 0) == fingerprint("llama", 0)
    others = {
        fingerprint("llama", 0),
        fingerprint("llama", 1),
        fingerprint("mistral", 0),
        fingerprint("llama", 0, "Q8_0"),
    }
    assert len(others) == 4


@pytest.mark.model
def test_default_model_opens_in_under_200_ms_of_processor_time(default_model_path: Path) -> None:
    GgufWeights(default_model_path).close()
    durations = []
    for _ in range(5):
        started = time.process_time()
        weights = GgufWeights(default_model_path)
        durations.append(time.process_time() - started)
        weights.close()
    assert min(durations) < 0.2
    assert weights.config.eos_token_ids == (2,)
    assert weights.config.tie_embeddings


def _replace_tensors(
    source: Path,
    target: Path,
    blocks: dict[str, npt.NDArray[np.uint8]],
    kind: str,
    extra: dict[str, npt.NDArray[np.float32]] | None = None,
    metadata: dict[str, int | str | list[int]] | None = None,
) -> None:
    """Rewrites a GGUF file with some tensors, further tensors or metadata in place of its own."""
    stored_blocks = {gguf_name(name): data for name, data in blocks.items()}
    reader = gguf.GGUFReader(source)
    values = metadata or {}
    architecture = str(values.get("general.architecture", reader.fields["general.architecture"].contents()))
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in values:
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif key != "general.architecture":
            writer.add_key_value(
                key, value, gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
            )
    for tensor in reader.tensors:
        if tensor.name in stored_blocks:
            writer.add_tensor(tensor.name, stored_blocks[tensor.name], raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    for name, weight in (extra or {}).items():
        add_gguf_tensor(writer, name, weight, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _random_k_blocks(kind: str, shape: torch.Size, seed: int) -> npt.NDArray[np.uint8]:
    """Random blocks with finite scales, `[rows, bytes of a row]`."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // 256, block_bytes), dtype=np.uint8)
    scale_bytes = np.frombuffer(struct.pack("<2e", 0.011, 0.007), dtype=np.uint8)
    if kind == "Q4_K":
        blocks[:, :4] = scale_bytes
    else:
        blocks[:, -2:] = scale_bytes[:2]
    return blocks.reshape(shape[0], -1)


def _q4_k_values(block: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """dequantize_row_q4_K, one element at a time, over a row of blocks."""
    values = []
    for data in block.reshape(-1, 144):
        d, dmin = struct.unpack("<2e", data[:4].tobytes())
        scales, quants = data[4:16].astype(int), data[16:].astype(int)
        for j in range(8):
            if j < 4:
                scale, minimum = scales[j] & 63, scales[j + 4] & 63
            else:
                scale = (scales[j + 4] & 0xF) | ((scales[j - 4] >> 6) << 4)
                minimum = (scales[j + 4] >> 4) | ((scales[j] >> 6) << 4)
            nibbles = quants[32 * (j // 2) : 32 * (j // 2) + 32]
            nibbles = nibbles & 0xF if j % 2 == 0 else nibbles >> 4
            values.append(d * scale * nibbles - dmin * minimum)
    return np.concatenate(values)


def _q6_k_values(block: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """dequantize_row_q6_K, over a row of blocks."""
    values = []
    for data in block.reshape(-1, 210):
        low, high = data[:128].astype(int), data[128:192].astype(int)
        scales = data[192:208].view(np.int8).astype(int)
        (d,) = struct.unpack("<e", data[208:].tobytes())
        for half in range(2):
            ql, qh, sc = low[64 * half :], high[32 * half :], scales[8 * half :]
            out = np.zeros(128)
            for i in range(32):
                q = [
                    ((ql[i] & 0xF) | ((qh[i] & 3) << 4)) - 32,
                    ((ql[i + 32] & 0xF) | (((qh[i] >> 2) & 3) << 4)) - 32,
                    ((ql[i] >> 4) | (((qh[i] >> 4) & 3) << 4)) - 32,
                    ((ql[i + 32] >> 4) | (((qh[i] >> 6) & 3) << 4)) - 32,
                ]
                for quarter in range(4):
                    out[i + 32 * quarter] = d * sc[i // 16 + 2 * quarter] * q[quarter]
            values.append(out)
    return np.concatenate(values)
