"""Runs told by numbers are the views that they stand for, and nothing outside their buffer."""

from __future__ import annotations

import mmap

import pytest

from cluster.byte_runs import EqualRuns, MappedBytes, address_of, addresses_of, sizes_of

SIZE = 4096


def buffer() -> memoryview:
    return memoryview(bytearray(index % 251 for index in range(SIZE)))


def equal_runs(of: memoryview, places: list[int]) -> EqualRuns:
    return EqualRuns(of, address_of(of), 64, places, 512, 128)


def test_as_a_sequence_it_is_its_views_in_order() -> None:
    of = buffer()
    runs = equal_runs(of, [3, 0, 7])
    expected = [of[64 + place * 512 : 192 + place * 512] for place in (3, 0, 7)]
    assert list(runs) == expected
    assert [runs[index] for index in range(3)] == expected
    assert runs[1:] == expected[1:]
    assert runs.num_bytes == 384


def test_its_numbers_are_where_its_views_are() -> None:
    runs = equal_runs(buffer(), [5, 1])
    assert addresses_of(runs).tolist() == [address_of(view) for view in runs]
    assert sizes_of(runs).tolist() == [128, 128]
    assert addresses_of(list(runs)).tolist() == addresses_of(runs).tolist()


@pytest.mark.parametrize("places", [[8], [0, -1], [2**40]])
def test_a_run_outside_its_buffer_is_refused(places: list[int]) -> None:
    with pytest.raises(IndexError, match="outside"):
        equal_runs(buffer(), places)


def test_what_it_points_into_stays_mapped() -> None:
    mapping = mmap.mmap(-1, SIZE)
    owners_view = memoryview(mapping)
    runs = EqualRuns(owners_view, address_of(owners_view), 0, [0], 64, 64)
    owners_view.release()
    with pytest.raises(BufferError):
        mapping.close()
    del runs
    mapping.close()


def test_a_mapping_gives_places_of_the_sizes_that_somebody_else_has() -> None:
    mapped, of = MappedBytes(whole := buffer()), buffer()
    alike = mapped.from_start(100, equal_runs(of, [1, 2, 3]))
    assert isinstance(alike, EqualRuns)
    assert list(alike) == [whole[100:228], whole[228:356], whole[356:484]]
    assert mapped.from_start(10, [of[:7], of[:9]]) == [whole[10:17], whole[17:26]]
    assert list(mapped.at([9, 3], [4, 4])) == [whole[9:13], whole[3:7]]
    assert mapped.at([9, 3], [4, 5]) == [whole[9:13], whole[3:8]]


@pytest.mark.parametrize(("places", "sizes"), [([4090, 0], [8, 8]), ([0, 4090], [1, 8]), ([-1, 0], [1, 2])])
def test_places_outside_a_mapping_are_refused(places: list[int], sizes: list[int]) -> None:
    with pytest.raises(IndexError, match="outside"):
        MappedBytes(buffer()).at(places, sizes)
    with pytest.raises(IndexError, match="outside"):
        MappedBytes(buffer()).from_start(SIZE - 8, [buffer()[:7], buffer()[:9]])
