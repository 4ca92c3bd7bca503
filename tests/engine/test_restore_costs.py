"""A fetch is made where it is measured to be faster than computing, and a tier that was slow once is tried again."""

from __future__ import annotations

import pytest

from engine.restore_costs import FIRST_TOKEN_S, FIXED_FETCH_S, RestoreCosts

BLOCK_TOKENS = 16


def costs(block_bytes: int = 360_000) -> RestoreCosts:
    return RestoreCosts(block_bytes, BLOCK_TOKENS)


def test_a_long_prefix_pays_and_a_short_one_does_not() -> None:
    known = costs()
    known.saw_step(500, 500 * 1e-4)
    known.saw_fetch("host", 1, 1e-4)
    meet = FIXED_FETCH_S / (BLOCK_TOKENS * 1e-4 - 1e-4)
    assert not known.pays(["host"] * int(meet))
    assert known.pays(["host"] * (int(meet) + 1))


def test_each_tier_has_its_own_price() -> None:
    known = costs()
    known.saw_step(500, 500 * 1e-4)
    known.saw_fetch("host", 4, 4e-4)
    known.saw_fetch("disk", 4, 4e-2)  # 10 ms each
    assert known.fetch_s(["host", "disk"]) == pytest.approx(FIXED_FETCH_S + 1e-4 + 1e-2)
    assert known.dearest_block_s == pytest.approx(1e-2)
    assert known.pays(["host"] * 100)
    assert not known.pays(["disk"] * 100)


def test_the_best_step_is_what_computing_costs() -> None:
    known = costs()
    assert known.token_s == FIRST_TOKEN_S
    known.saw_step(1, 0.010)
    known.saw_step(500, 0.5)
    known.saw_step(8, 0.020)
    assert known.token_s == pytest.approx(1e-3)


def test_a_tier_that_was_slow_once_is_asked_again_after_a_while() -> None:
    known = costs()
    known.saw_step(500, 500 * 1e-4)
    known.saw_fetch("disk", 1, 0.05)
    num_declined = 0
    while not known.pays(["disk"] * 100):
        num_declined += 1
    assert 5 < num_declined < 100


def test_fetches_are_averaged() -> None:
    known = costs()
    known.saw_fetch("host", 1, 1e-4)
    known.saw_fetch("host", 1, 6e-4)
    assert known.block_s("host") == pytest.approx(2e-4)
