"""Which way a ring is written, by what each way took."""

from __future__ import annotations

from kv_transfer.transports.ring_stores import USE_RINGS, RingStores

RING_BYTES = 4 * 1024 * 1024
FRAME_BYTES = 1024 * 1024
FRAMES_OF_A_RING = RING_BYTES // FRAME_BYTES
# Seconds for a frame: through the caches, past them.
SHARED_CACHE, APART = (70e-6, 90e-6), (300e-6, 60e-6)


def write(stores: RingStores, num_frames: int, cost: tuple[float, float], frame_bytes: int = FRAME_BYTES) -> list[bool]:
    """The kind of each frame."""
    kinds = []
    for _ in range(num_frames):
        kinds.append(stores.is_past_caches)
        stores.wrote(frame_bytes, cost[stores.is_past_caches] * frame_bytes / FRAME_BYTES)
    return kinds


def test_both_ways_are_tried_before_the_link_is_measured_to_its_end_and_the_faster_one_stays() -> None:
    for cost, is_past_caches in ((SHARED_CACHE, False), (APART, True)):
        stores = RingStores(RING_BYTES)
        assert write(stores, 16, cost) == [False] * 8 + [True] * 8
        assert write(stores, 100, cost) == [is_past_caches] * 100


def test_a_process_that_moved_to_another_core_is_noticed_within_one_use_and_one_trial() -> None:
    stores = RingStores(RING_BYTES)
    write(stores, 16, SHARED_CACHE)
    longest = (USE_RINGS + 2) * FRAMES_OF_A_RING
    write(stores, longest, APART)
    assert stores.is_past_caches
    write(stores, 2 * longest, SHARED_CACHE)
    assert not stores.is_past_caches


def test_a_trial_costs_a_small_part_of_what_is_sent() -> None:
    stores = RingStores(RING_BYTES)
    write(stores, 16, APART)
    kinds = write(stores, 10_000, APART)
    assert kinds.count(False) < 0.07 * len(kinds)


def test_one_frame_that_a_neighbour_held_up_decides_nothing() -> None:
    stores = RingStores(RING_BYTES)
    for number in range(16):
        is_held_up = number in (6, 14)
        stores.wrote(FRAME_BYTES, 0.1 if is_held_up else SHARED_CACHE[stores.is_past_caches])
    assert not stores.is_past_caches


def test_a_little_faster_is_not_enough_to_change() -> None:
    stores = RingStores(RING_BYTES)
    write(stores, 16, (70e-6, 68e-6))
    assert not stores.is_past_caches


def test_small_frames_say_nothing_and_change_nothing() -> None:
    stores = RingStores(RING_BYTES)
    assert write(stores, 10_000, APART, frame_bytes=4096) == [False] * 10_000
