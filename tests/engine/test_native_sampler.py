"""`engine.native_sampler` chooses the tokens of the Python definition, for every instruction set of this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cluster.errors import EngineFailure
from cluster.sampling_params import SamplingParams
from engine.logit_filters import drop_filtered
from engine.native_sampler import gumbel_argmax, scale_and_filter
from engine.noise import NoiseKeys, gumbel
from tests.engine.native_model import built_isas


def make_rows(vocab_size: int, spread: float, num_rows: int = 24) -> tuple[np.ndarray, np.ndarray, NoiseKeys]:
    """Scaled logits whose largest value is 0, and keys with large seeds, choices and positions."""
    random = np.random.default_rng(vocab_size + int(spread * 10))
    scaled = (random.standard_normal((num_rows, vocab_size)) * spread).astype(np.float32)
    scaled -= scaled.max(axis=1, keepdims=True)
    keys = NoiseKeys(
        random.integers(0, 2**64, num_rows, dtype=np.uint64, endpoint=False),
        random.integers(0, 8, num_rows).astype(np.uint64),
        random.integers(0, 131072, num_rows).astype(np.uint64),
    )
    return scaled, scaled.argmax(axis=1), keys


def defined_argmax(scaled: np.ndarray, keys: NoiseKeys) -> list[int]:
    """The definition itself: noise for every token, in float64."""
    token_ids = np.arange(scaled.shape[1])
    chosen = []
    for row, values in enumerate(scaled):
        key = NoiseKeys(*(np.full(len(values), column[row], np.uint64) for column in keys))
        chosen.append(int((values.astype(np.float64) + gumbel(token_ids, key)).argmax()))
    return chosen


@pytest.mark.parametrize("isa", built_isas())
@pytest.mark.parametrize("vocab_size", [1, 3, 31, 32, 33, 64, 65, 4099])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_tokens_equal_the_definition(isa: str, vocab_size: int, spread: float) -> None:
    scaled, peaks, keys = make_rows(vocab_size, spread)
    assert gumbel_argmax(scaled, peaks, keys, isa=isa).tolist() == defined_argmax(scaled, keys)


def test_tokens_of_a_whole_vocabulary_equal_the_definition() -> None:
    for spread in (0.5, 3.0):
        scaled, peaks, keys = make_rows(49152, spread, num_rows=6)
        assert gumbel_argmax(scaled, peaks, keys).tolist() == defined_argmax(scaled, keys)


def test_filtered_tokens_are_never_chosen() -> None:
    scaled, _, keys = make_rows(1000, 1.0)
    scaled[:, ::2] = -np.inf
    scaled -= scaled.max(axis=1, keepdims=True)
    chosen = gumbel_argmax(scaled, scaled.argmax(axis=1), keys)
    assert (chosen % 2 == 1).all()
    assert chosen.tolist() == defined_argmax(scaled, keys)


def test_rows_of_a_wider_array_are_read_in_place() -> None:
    scaled, peaks, keys = make_rows(100, 1.0)
    wide = np.full((len(scaled), 128), 7.0, np.float32)
    wide[:, :100] = scaled
    assert gumbel_argmax(wide[:, :100], peaks, keys).tolist() == defined_argmax(scaled, keys)


def test_what_cannot_be_read_is_refused() -> None:
    scaled, peaks, keys = make_rows(100, 1.0)
    with pytest.raises(TypeError, match="float32"):
        gumbel_argmax(scaled.astype(np.float64), peaks, keys)
    with pytest.raises(EngineFailure, match="vocabulary"):
        gumbel_argmax(scaled, np.full_like(peaks, 100), keys)


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 3000},
    {"top_k": 100_000},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.95},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.2},
]


@pytest.mark.parametrize("isa", built_isas())
@pytest.mark.parametrize("vocab_size", [1, 3, 63, 64, 65, 4099])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_scaling_and_filters_equal_the_definition(isa: str, vocab_size: int, spread: float) -> None:
    """Every filter in one call, with ties and tokens that are ruled out already."""
    scaled, _, _ = make_rows(vocab_size, spread, num_rows=len(FILTERS))
    logits: np.ndarray = (np.round(scaled * 8) / 8 + 3.25).astype(np.float32)  # ties in plenty
    logits[:, 1::7] = -np.inf
    peaks = logits.max(axis=1)
    params = [SamplingParams(max_tokens=1, **filters) for filters in FILTERS]
    temperatures = np.array([1.0 if index % 2 else 0.7 for index in range(len(params))], np.float32)
    expected = logits.copy()
    for row, one in enumerate(params):
        expected[row] = (expected[row] - peaks[row]) / temperatures[row]
        drop_filtered(expected[row], one)
    found = logits.copy()
    scale_and_filter(
        found,
        peaks,
        temperatures,
        np.array([one.top_k for one in params], np.int32),
        np.array([one.top_p for one in params]),
        np.array([one.min_p for one in params]),
        isa=isa,
    )
    np.testing.assert_array_equal(found, expected)
