"""`engine.runner_factory`: which backend, dtype and number of blocks; nothing silent, all closed on failure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.errors import StartupError
from cluster.worker_settings import WorkerSettings
from engine import native_library, runner_factory
from engine.kv_memory import layout_of
from engine.model_loader import open_weights
from engine.native_runner import NativeRunner
from engine.runner_factory import MAX_DEFAULT_KV_BYTES, build_runner, free_memory_bytes, model_length, num_blocks
from tests.engine.native_model import compressing_isas
from tests.engine.steps import BlockDealer, prompt_logits
from tests.engine.tiny_models import random_model, save_gguf, save_safetensors
from tests.engine.weights.quantized_checkpoints import awq_parts, quantize, save_quantized


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    return save_safetensors(random_model("llama"), tmp_path / "model")


def settings(model: Path, **values: Any) -> WorkerSettings:
    return WorkerSettings(
        worker_id="w",
        model=str(model),
        listen="127.0.0.1:0",
        runtime_dir=model.parent,
        **({"num_kv_blocks": 16} | values),
    )


def test_torch_backend_runs_the_model_of_the_settings(model_directory: Path) -> None:
    built = build_runner(settings(model_directory, backend="torch", dtype="float32", block_tokens=8))
    assert (built.runner.backend, built.fallback) == ("torch", None)
    assert (built.memory.num_blocks, built.memory.layout.block_tokens, built.memory.layout.dtype) == (16, 8, "float32")
    assert built.max_model_len == built.config.max_model_len == 512
    logits = prompt_logits(built.runner, BlockDealer(built.memory), [1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    assert logits.isfinite().all()
    assert torch.get_num_threads() == 1
    built.memory.close()


def test_auto_takes_native_and_torch_agrees_with_it(tmp_path: Path) -> None:
    if not native_library.is_available():
        pytest.skip("the native library is not built on this machine")
    # The native kernels take head sizes that are multiples of 32.
    model_directory = save_safetensors(random_model("qwen3"), tmp_path / "model")
    native = build_runner(settings(model_directory, dtype="float32"))
    reference = build_runner(settings(model_directory, dtype="float32", backend="torch"))
    assert (native.fallback, native.runner.backend) == (None, "native")
    prompt = list(range(40))
    own, expected = (
        prompt_logits(built.runner, BlockDealer(built.memory), prompt, 17) for built in (native, reference)
    )
    assert torch.allclose(own, expected, atol=1e-3)


def test_native_and_torch_agree_on_yarns_attention(tmp_path: Path) -> None:
    if not native_library.is_available():
        pytest.skip("the native library is not built on this machine")
    model_directory = save_safetensors(random_model("yarn", head_dim=32, num_attention_heads=2), tmp_path / "model")
    native, reference = (
        build_runner(settings(model_directory, dtype="float32", backend=backend)) for backend in ("native", "torch")
    )
    prompt = list(range(150))
    own, expected = (
        prompt_logits(built.runner, BlockDealer(built.memory), prompt, 64) for built in (native, reference)
    )
    assert torch.allclose(own, expected, atol=1e-3)


def test_a_mixture_of_experts_runs_in_torch_and_says_that_native_cannot(tmp_path: Path) -> None:
    model_directory = save_safetensors(random_model("mixtral"), tmp_path / "model")
    built = build_runner(settings(model_directory, dtype="float32"))
    assert built.runner.backend == "torch"
    assert built.fallback is not None
    if native_library.is_available():
        assert "is a mixture of experts" in built.fallback.reason
    with pytest.raises(StartupError, match=r"mixture of experts|was not built"):
        build_runner(settings(model_directory, backend="native"))
    built.memory.close()


def test_a_quantised_checkpoint_runs_as_its_values_and_as_its_own_blocks(tmp_path: Path) -> None:
    """AWQ's integers in float32 are the weights of the torch backend; natively they stay in 4 bits."""
    if not native_library.is_available():
        pytest.skip("the native library is not built on this machine")
    model = save_quantized(
        tmp_path / "awq",
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        lambda module, weight: awq_parts(quantize(weight)),
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    weights = open_weights(tmp_path / "awq")
    model.load_state_dict({name: weights.tensor(name) for name in weights.names()}, strict=False)
    weights.close()
    save_safetensors(model, tmp_path / "plain")
    prompt = list(range(60))
    blocks, values, plain = (
        build_runner(settings(tmp_path / name, dtype="float32", **options))
        for name, options in (
            ("awq", {"quantization": "file", "backend": "native"}),
            ("awq", {"backend": "torch"}),
            ("plain", {"backend": "torch"}),
        )
    )
    expected = prompt_logits(plain.runner, BlockDealer(plain.memory), prompt, 17)
    assert torch.equal(prompt_logits(values.runner, BlockDealer(values.memory), prompt, 17), expected)
    own = prompt_logits(blocks.runner, BlockDealer(blocks.memory), prompt, 17)
    # Activations are rounded to 8 bits for the native product of 4-bit blocks.
    assert float((own - expected).abs().mean() / expected.abs().mean()) < 0.05
    assert isinstance(blocks.runner, NativeRunner)
    assert "Q4_1" in blocks.runner.kernel_details()["weights"]


@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
def test_weights_are_compressed_where_few_rows_are_computed(tmp_path: Path, role: str) -> None:
    if not native_library.is_available():
        pytest.skip("the native library is not built on this machine")
    model_directory = save_safetensors(random_model("qwen3"), tmp_path / "model")
    built = build_runner(settings(model_directory, dtype="bfloat16", role=role))
    plain = build_runner(settings(model_directory, dtype="bfloat16", role=role, weight_compression="off"))
    assert isinstance(built.runner, NativeRunner)
    assert isinstance(plain.runner, NativeRunner)
    is_plain = built.runner.kernel_details()["weights"] == plain.runner.kernel_details()["weights"]
    assert is_plain is (role == "prefill" or not _compresses())


def test_the_instruction_set_of_the_settings_is_the_one_that_runs(tmp_path: Path) -> None:
    if not native_library.is_available():
        pytest.skip("the native library is not built on this machine")
    model_directory = save_safetensors(random_model("qwen3"), tmp_path / "model")
    best, *others = native_library.usable_isas()
    for wanted, runs in (("", best), (others[0], others[0])):
        built = build_runner(settings(model_directory, backend="native", dtype="bfloat16", native_isa=wanted))
        assert isinstance(built.runner, NativeRunner)
        assert built.runner.kernel_details()["isa"] == runs
    with pytest.raises(StartupError, match="sse9"):
        build_runner(settings(model_directory, backend="native", dtype="bfloat16", native_isa="sse9"))


def test_auto_without_native_falls_back_to_torch_and_says_why(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_native(monkeypatch)
    built = build_runner(settings(model_directory, dtype="float32"))
    assert built.runner.backend == "torch"
    assert built.fallback is not None
    assert (built.fallback.component, built.fallback.wanted, built.fallback.used) == ("backend", "native", "torch")
    assert "not built" in built.fallback.reason


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backend": "native"}, "not built"),
        ({"quantization": "int8"}, "not built"),
        ({"backend": "triton", "quantization": "file"}, "keeps weights as"),
        ({"backend": "native", "kv_dtype": "fp8"}, "kv_dtype fp8 needs backend torch or triton"),
        ({"backend": "triton", "transports": ("shm", "nixl")}, "nixl writes into the KV pool by its address"),
        ({"quantization": "fp8"}, "needs backend triton"),
        ({"backend": "torch", "quantization": "file"}, "needs backend native"),
        ({"dtype": "float16"}, "needs a GPU"),
        ({"max_model_len": 513}, "beyond the model's own 512"),
        ({"num_kv_blocks": 0, "kv_cache_bytes": 100}, "hold no KV block"),
    ],
)
def test_what_was_asked_for_by_name_is_never_replaced(
    values: dict[str, Any], message: str, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_native(monkeypatch)
    with pytest.raises(StartupError, match=message) as caught:
        build_runner(settings(model_directory, **values))
    assert "\n" not in caught.value.message


def test_fp8_kv_takes_the_backend_that_has_it_and_says_so(model_directory: Path) -> None:
    built = build_runner(settings(model_directory, dtype="float32", kv_dtype="fp8"))
    assert built.runner.backend == "torch"
    assert built.memory.layout.dtype == "fp8_e4m3"
    assert built.fallback is not None
    assert (built.fallback.component, built.fallback.wanted, built.fallback.used) == ("backend", "native", "torch")
    logits = prompt_logits(built.runner, BlockDealer(built.memory), [1, 2, 3, 4, 5], 3)
    assert logits.isfinite().all()
    built.memory.close()


def test_failed_start_leaves_no_file_descriptor_behind(model_directory: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(StartupError):
            build_runner(settings(model_directory, quantization="fp8"), shareable_pool=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_s_b12_pickled_and_missing_models_are_refused_in_one_line(tmp_path: Path) -> None:
    pickled = tmp_path / "pytorch_model.bin"
    pickled.write_bytes(b"\x80\x04")
    for path, message in [(pickled, "convert the model to safetensors or GGUF"), (tmp_path / "absent.gguf", "absent")]:
        with pytest.raises(StartupError, match=message) as caught:
            build_runner(settings(path))
        assert "\n" not in caught.value.message


def test_shareable_pool_has_a_memfd(tmp_path: Path) -> None:
    path = save_gguf(random_model("qwen2"), tmp_path / "m.gguf")
    built = build_runner(settings(path, backend="torch", dtype="float32"), shareable_pool=True)
    assert built.memory.memfd is not None
    built.memory.close()


def test_number_of_blocks_follows_settings_then_bytes_then_free_memory(model_directory: Path) -> None:
    weights = open_weights(model_directory)
    layout = layout_of(weights.config, "float32", 16)
    assert num_blocks(settings(model_directory, num_kv_blocks=7, kv_cache_bytes=10**9), layout, 0) == 7
    by_bytes = settings(model_directory, num_kv_blocks=0, kv_cache_bytes=10 * layout.block_bytes + 1)
    assert num_blocks(by_bytes, layout, 0) == 10
    by_share = settings(model_directory, num_kv_blocks=0)
    assert num_blocks(by_share, layout, 1000 * layout.block_bytes) == 100
    assert num_blocks(by_share, layout, 2**50) == MAX_DEFAULT_KV_BYTES // layout.block_bytes
    assert model_length(settings(model_directory, max_model_len=100), weights.config) == 100


def test_free_memory_respects_a_cgroup_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_factory, "_CGROUP", tmp_path)
    machine = free_memory_bytes()
    assert machine > 0
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(free_memory_bytes() - machine) < 2**30
    (tmp_path / "memory.max").write_text("5000\n")
    assert free_memory_bytes() == 4000


def _compresses() -> bool:
    """By what the library runs here: a processor may name AMX on a machine that does not let it be used."""
    return native_library.usable_isas()[0] in compressing_isas()


def _without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_library() -> None:
        raise StartupError("the native CPU library is not built: use backend torch")

    monkeypatch.setattr(native_library, "load_library", load_library)
