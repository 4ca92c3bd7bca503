"""Traffic for caches that evict: its order, its prefixes, and the hits that are to be had of it."""

from __future__ import annotations

import pytest

from benchmarks.crowded_traffic import SHAPES, as_planned
from benchmarks.hit_ceiling import Prompt, found_tokens, most_hits, num_distinct_blocks, quickest_ms
from benchmarks.mock_server import BLOCK_TOKENS
from cluster.identity import BlockHash

WORDS = ("red", "green", "blue")


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_traffic_is_its_seeds_in_order_and_starts_with_what_others_started_with(shape: str) -> None:
    requests = SHAPES[shape](20.0, 30.0, 1)
    assert requests == SHAPES[shape](20.0, 30.0, 1)
    assert requests != SHAPES[shape](20.0, 30.0, 2)
    times = [request.time_s for request in requests]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 30.0
    openings = [request.messages[0] for request in requests]
    assert len(set(openings)) < len(openings) / 2


def test_a_later_turn_begins_with_all_that_was_said_before() -> None:
    planned = as_planned(SHAPES["tenants"](20.0, 60.0, 1), WORDS)
    last: dict[int, int] = {}
    for index, request in enumerate(planned):
        if request.turn:
            before = planned[last[request.session]].messages
            assert request.messages[: len(before)] == before
            assert len(request.messages) == len(before) + 2
        last[request.session] = index
    assert any(request.turn for request in planned)


def prompt(*names: str) -> Prompt:
    return len(names) * BLOCK_TOKENS + 1, [BlockHash(name.encode()) for name in names]


def test_most_hits_are_of_whole_prefixes_and_fewer_where_a_cache_evicts() -> None:
    prompts = [prompt("a", "b"), prompt("a", "c"), prompt("d", "b"), prompt("a", "b")]
    num_tokens = sum(length for length, _ in prompts)
    assert num_distinct_blocks(prompts) == 4
    assert most_hits(prompts) == 3 * BLOCK_TOKENS / num_tokens  # a; nothing behind d; a and b
    assert most_hits(prompts, num_blocks=2) == BLOCK_TOKENS / num_tokens  # a alone, until d and b took its place
    assert most_hits([]) == 0.0


def test_nobody_is_faster_than_who_finds_all_there_is_and_waits_for_nobody() -> None:
    prompts = [prompt("a", "b"), prompt("a", "c"), prompt("d", "b"), prompt("a", "b")]
    assert found_tokens(prompts, num_blocks=2) == [0, BLOCK_TOKENS, 0, 0]
    first, second, third, _ = quickest_ms(prompts, (10.0, 1.0, 0.01), num_blocks=2)
    assert first == third == pytest.approx(10 + 33 + 0.01 * 33 * 33 / 2)
    assert second == pytest.approx(10 + 17 + 0.01 * 17 * (16 + 17 / 2))
