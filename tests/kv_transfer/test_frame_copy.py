"""One pass copies and digests: the bytes are in place, and the digest is the library's, natively and in Python."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.byte_runs import EqualRuns, address_of
from cluster.compiler import BuildError, find_compiler
from kv_transfer import frame_copy
from kv_transfer.frame import digest_of
from kv_transfer.frame_copy import copy_frame
from kv_transfer.native.build import build

Shape = tuple[int, int]  # runs, bytes of each


both_ways = pytest.mark.usefixtures("way")


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of copying."""
    if request.param == "python":
        monkeypatch.setattr(frame_copy, "_load_library", lambda: None)
    else:
        try:
            build()
        except BuildError as error:
            pytest.skip(str(error))
        frame_copy._load_library.cache_clear()
        assert frame_copy.is_native()
    return str(request.param)


def pool(num_runs: int, run_bytes: int, offset: int = 0) -> tuple[memoryview, EqualRuns]:
    """A buffer aligned as a pool is (but for `offset`), and runs that lie scattered in it."""
    stride = run_bytes + 192
    whole = np.random.default_rng(run_bytes).integers(0, 256, 64 + num_runs * stride + 256, np.uint8)
    first = -whole.ctypes.data % 64 + offset
    buffer = whole.data
    return buffer, EqualRuns(buffer, address_of(buffer), first, [*range(num_runs)][::-1], stride, run_bytes)


@both_ways
@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("offset", [0, 8])
@pytest.mark.parametrize(
    "shape", [(1, 256), (1, 1024), (1, 1088), (2, 1024), (5, 64), (16, 64), (17, 64), (3, 960), (7, 4096), (2, 100)]
)
def test_the_bytes_and_the_digest_are_right_and_nothing_else_is_touched(
    shape: Shape, offset: int, past_caches: bool
) -> None:
    _, sources = pool(*shape)
    buffer, targets = pool(*shape, offset)
    buffer[:] = bytes(buffer.nbytes)
    digest = copy_frame(sources, targets, past_caches=past_caches)
    assert list(targets) == list(sources)
    assert digest == digest_of(list(sources))
    for run in targets:
        run[:] = bytes(run.nbytes)
    assert not any(buffer)


@both_ways
@pytest.mark.parametrize("make", [lambda runs: list(runs), lambda runs: runs], ids=["views", "numbers"])
def test_views_copy_like_numbers(make: Callable[[EqualRuns], list[memoryview]]) -> None:
    for num_runs in (1, 3):
        sources, targets = pool(num_runs, 512)[1], pool(num_runs, 512)[1]
        targets[0][:] = bytes(512)
        assert copy_frame(make(sources), make(targets)) == digest_of(list(sources))
        assert list(targets) == list(sources)


@both_ways
def test_runs_that_are_not_alike_are_refused() -> None:
    for here, there in itertools.permutations((pool(2, 512)[1], pool(2, 256)[1], pool(3, 512)[1]), 2):
        with pytest.raises(ValueError):  # noqa: PT011  # memoryview's own words in Python
            copy_frame(here, there)


@both_ways
@given(data=st.data(), num_runs=st.integers(1, 40), stripes=st.integers(1, 40))
def test_the_digest_is_the_librarys_whatever_the_shape(data: st.DataObject, num_runs: int, stripes: int) -> None:
    _, sources = pool(num_runs, stripes * 64)
    sources[0][:8] = data.draw(st.binary(min_size=8, max_size=8))
    assert copy_frame(sources, pool(num_runs, stripes * 64)[1]) == digest_of(list(sources))


@both_ways
def test_one_changed_bit_anywhere_changes_the_digest() -> None:
    _, sources = pool(3, 1088)
    right = copy_frame(sources, pool(3, 1088)[1])
    for run in sources:
        for position in range(0, 1088, 61):
            run[position] ^= 4
            assert copy_frame(sources, pool(3, 1088)[1]) != right
            run[position] ^= 4


@pytest.mark.parametrize("narrower", ["TANDEM_NO_AVX512", "TANDEM_PORTABLE"])
def test_processors_with_narrower_registers_get_the_same(
    narrower: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", shlex.join([*find_compiler(), f"-D{narrower}"]))
    monkeypatch.setattr(frame_copy, "SOURCE_DIR", build(tmp_path).parent)
    frame_copy._load_library.cache_clear()
    try:
        assert frame_copy.is_native()
        for shape in ((1, 256), (17, 64), (3, 1088), (7, 4096)):
            for past_caches in (False, True):
                sources, targets = pool(*shape)[1], pool(*shape)[1]
                targets[0][:] = bytes(shape[1])
                assert copy_frame(sources, targets, past_caches=past_caches) == digest_of(list(sources))
                assert list(targets) == list(sources)
    finally:
        frame_copy._load_library.cache_clear()
