"""Block hashes: frozen, chained, scoped, incremental."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.block_hash import HASH_BYTES, HashChain, HashScope, hash_blocks, hash_test_vector

SCOPE = HashScope(scope_key=b"tenant-a", model_fingerprint="model", block_tokens=4)


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def test_the_definition_is_frozen() -> None:
    assert hash_test_vector(16).hex() == "16a8822a978dfbc76cc303dd46c32408"
    assert hash_test_vector(32).hex() == "ecf41ac3542cb5ea8a8f215744717b30"


def test_rt24_two_processes_hash_the_same_tokens_alike() -> None:
    program = "from cluster.block_hash import hash_test_vector; print(hash_test_vector(16).hex())"
    other = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert other.stdout.strip() == hash_test_vector(16).hex()


def test_only_full_blocks_are_hashed() -> None:
    assert [len(hash_blocks(np.arange(n, dtype=np.int32), SCOPE)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert all(len(name) == HASH_BYTES for name in hash_blocks(np.arange(8, dtype=np.int32), SCOPE))


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_extending_piece_by_piece_gives_the_hashes_of_the_whole(ids: list[int], cuts: list[int]) -> None:
    sequence = np.array(ids, dtype=np.int32)
    chain = HashChain(SCOPE)
    for cut in sorted(cuts):
        chain.extend(sequence[:cut])
    chain.extend(sequence)
    assert chain.hashes == hash_blocks(sequence, SCOPE)


@pytest.mark.parametrize(
    "other",
    [
        HashScope(scope_key=b"tenant-b", model_fingerprint="model", block_tokens=4),
        HashScope(scope_key=b"tenant-a", model_fingerprint="model-2", block_tokens=4),
        HashScope(scope_key=b"tenant-a", model_fingerprint="model", block_tokens=4, lora_name="adapter"),
        HashScope(scope_key=b"tenant-a", model_fingerprint="mod", block_tokens=4, lora_name="el"),
        HashScope(scope_key=b"tenant-a", model_fingerprint="model", block_tokens=8),
    ],
)
def test_rt22_another_scope_never_meets(other: HashScope) -> None:
    sequence = np.arange(16, dtype=np.int32)
    assert not set(hash_blocks(sequence, SCOPE)) & set(hash_blocks(sequence, other))


def test_rt23_equal_last_blocks_after_different_prefixes_differ() -> None:
    left = hash_blocks(tokens(1, 2, 3, 4, 9, 9, 9, 9), SCOPE)
    right = hash_blocks(tokens(1, 2, 3, 5, 9, 9, 9, 9), SCOPE)
    assert left[1] != right[1]


def test_s_b42_a_linear_shift_of_tokens_changes_the_hash() -> None:
    assert hash_blocks(tokens(100, 200, 300, 400), SCOPE) != hash_blocks(tokens(131, 199, 300, 400), SCOPE)


def test_a_slice_and_its_copy_hash_alike() -> None:
    wide = np.arange(32, dtype=np.int32)
    assert hash_blocks(wide[::2], SCOPE) == hash_blocks(wide[::2].copy(), SCOPE)
