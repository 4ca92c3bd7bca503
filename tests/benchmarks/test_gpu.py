"""The GPU benchmark's arithmetic, and that every case runs: on the CPU, in Triton's interpreter, at tiny shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import gpu
from benchmarks.gpu import Case, ModelShape, Rates

CPU = torch.device("cpu")
TINY = ModelShape(num_heads=4, num_kv_heads=2, head_dim=16, hidden=32, intermediate=32, block_tokens=16)
RATES = Rates(1e9, {"half": 1e12, "int8": 2e12, "fp8": 2e12})


def run_once(call: Callable[[], object]) -> float:
    call()
    return 2e-3


def test_a_floor_is_the_larger_of_bytes_and_operations() -> None:
    assert RATES.floor_s(Case("bytes", lambda: None, num_bytes=1e6, num_operations=1e3)) == pytest.approx(1e-3)
    assert RATES.floor_s(Case("products", lambda: None, num_bytes=1.0, num_operations=4e9)) == pytest.approx(4e-3)
    assert RATES.floor_s(Case("int8", lambda: None, 1.0, 4e9, "int8")) == pytest.approx(2e-3)
    (result,) = gpu.measure(iter([Case("half as fast", lambda: None, num_bytes=1e6)]), RATES, run_once)
    assert result.share_of_floor == pytest.approx(0.5)


def test_every_attention_case_runs_and_counts_its_kv_once() -> None:
    cases = list(gpu.attention_cases(TINY, CPU, torch.float16, [(2, 40, 1), (1, 33, 3)], [(1, 20)], 1, has_fp8=True))
    # 2 sequences x 40 tokens x (key, value) x 2 KV heads x 16 x 2 bytes
    assert cases[0].num_bytes == 2 * 40 * 2 * 2 * 16 * 2
    assert cases[1].num_bytes == 2 * 40 * 2 * 2 * (16 + 4)
    assert cases[2].num_operations == 4 * 3 * 33 * 4 * 16
    results = list(gpu.measure(iter(cases), RATES, run_once))
    assert [result.name.split(",")[0] for result in results] == ["decode attention"] * 4 + ["prefill attention"]


def test_every_other_case_runs() -> None:
    layers = gpu.measure(gpu.layer_cases(TINY, CPU, torch.float16, 20), RATES, run_once)
    products = gpu.measure(gpu.matrix_cases(TINY, CPU, torch.float16, (1, 3), has_fp8=False), RATES, run_once)
    results = [*layers, *products]
    assert len(results) == 5 + 2 * 2
    assert all(result.floor_us > 0 for result in results)
    table = gpu.markdown("some GPU", RATES, results)
    assert "copy 1 GB/s" in table
    assert table.count("\n") == 4 + len(results)


def test_a_decode_step_runs_launched_and_replayed() -> None:
    cases = gpu.step_cases(TINY, CPU, torch.float16, [(2, 20)], lambda compute: compute)
    results = list(gpu.measure(cases, RATES, run_once))
    assert [result.name.rpartition(", ")[2] for result in results] == ["launched by Python", "replayed graph"]
    assert results[0].floor_us == results[1].floor_us > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "no GPU" in capsys.readouterr().err
