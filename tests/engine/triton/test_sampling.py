"""The GPU's drawn tokens equal the definition, bit for bit, and its filters those of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from cluster.sampling_params import SamplingParams
from engine.device_sampler import draw, keep_thresholds, scale_and_filter
from engine.kernels.triton.sampling import gumbel_argmax
from engine.logit_filters import drop_filtered, keep_threshold
from engine.noise import NoiseKeys
from tests.engine.test_native_sampler import defined_argmax, make_rows
from tests.engine.triton.paged_batch import DEVICE

FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 100_000},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.2},
]


def on_device(keys: NoiseKeys) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.from_numpy(keys.seeds.view(np.int64)).to(DEVICE),
        torch.from_numpy(keys.choice_indices.astype(np.int32)).to(DEVICE),
        torch.from_numpy(keys.positions.astype(np.int32)).to(DEVICE),
    )


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1024, 1025, 4099])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_tokens_equal_the_definition(vocab_size: int, spread: float) -> None:
    scaled, _, keys = make_rows(vocab_size, spread, num_rows=6)
    chosen = gumbel_argmax(torch.from_numpy(scaled).to(DEVICE), *on_device(keys))
    assert chosen.tolist() == defined_argmax(scaled, keys)


def test_filtered_tokens_are_never_chosen_even_where_a_whole_part_is() -> None:
    scaled, _, keys = make_rows(2050, 1.0, num_rows=6)
    scaled[:, :1500] = -np.inf
    chosen = gumbel_argmax(torch.from_numpy(scaled).to(DEVICE), *on_device(keys))
    assert min(chosen.tolist()) >= 1500
    assert chosen.tolist() == defined_argmax(scaled, keys)


def test_no_rows_are_no_tokens() -> None:
    keys = NoiseKeys(*(np.zeros(0, np.uint64) for _ in range(3)))
    assert gumbel_argmax(torch.empty((0, 10), device=DEVICE), *on_device(keys)).tolist() == []


@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_thresholds_equal_the_hosts(spread: float) -> None:
    scaled, _, _ = make_rows(777, spread, num_rows=len(FILTERS))
    scaled = np.round(scaled * 8) / 8  # ties in plenty
    scaled[:, 1::7] = -np.inf
    scaled -= scaled.max(axis=1, keepdims=True)
    params = [SamplingParams(max_tokens=1, **filters) for filters in FILTERS]
    found = keep_thresholds(torch.from_numpy(scaled).to(DEVICE), params).cpu().numpy()
    for row, one in enumerate(params):
        expected = keep_threshold(scaled[row], one)
        # What is kept is what counts: below every value there is no difference between two thresholds.
        assert (scaled[row] >= found[row]).tolist() == (scaled[row] >= expected).tolist(), FILTERS[row]


def test_a_mixed_batch_draws_the_hosts_tokens() -> None:
    scaled, _, keys = make_rows(1500, 2.0, num_rows=len(FILTERS))
    logits = scaled + np.float32(4.0)
    params = [SamplingParams(max_tokens=1, **filters) for filters in FILTERS]
    temperatures = np.linspace(0.5, 1.5, len(FILTERS)).astype(np.float32)
    peaks = logits.max(axis=1)
    expected = (logits - peaks[:, None]) / temperatures[:, None]
    for row, one in enumerate(params):
        drop_filtered(expected[row], one)
    chosen = draw(scale_and_filter(torch.from_numpy(logits).to(DEVICE), peaks, temperatures, params), keys)
    assert chosen.tolist() == defined_argmax(expected, keys)
