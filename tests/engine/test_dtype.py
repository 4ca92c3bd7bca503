"""`engine.dtype`: what `auto` becomes on which CPU."""

from __future__ import annotations

import pytest
import torch

from cluster.errors import StartupError
from engine.dtype import cpu_features, resolve_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("setting", "features", "expected"),
    [
        ("auto", {"avx2"}, "float32"),
        ("auto", {"avx512f"}, "float32"),
        ("auto", {"avx512_bf16"}, "bfloat16"),
        ("auto", {"amx_bf16"}, "bfloat16"),
        ("float32", {"avx512_bf16"}, "float32"),
        ("bfloat16", set(), "bfloat16"),
    ],
)
def test_auto_takes_bfloat16_only_where_the_cpu_multiplies_it(setting: str, features: set[str], expected: str) -> None:
    assert resolve_dtype(setting, CPU, frozenset(features)) == expected


@pytest.mark.parametrize("setting", ["float16", "int8", ""])
def test_dtypes_that_cannot_run_are_refused(setting: str) -> None:
    with pytest.raises(StartupError) as caught:
        resolve_dtype(setting, CPU, frozenset())
    assert caught.value.param == "dtype"


def test_cpu_features_of_this_machine_are_words() -> None:
    features = cpu_features()
    assert features
    assert all(" " not in feature for feature in features)
