"""What one tenant may take: rates, debts, concurrency, on a virtual clock; and the key file's words for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import RateLimited, StartupError
from cluster.identity import Tenant
from router.tenant_limits import TenantLimit, TenantLimiter
from router.tenants import read_api_keys

ALICE, BOB = Tenant("alice"), Tenant("bob")


def limiter(**limits: float) -> TenantLimiter:
    return TenantLimiter(TenantLimit(), {ALICE: TenantLimit(**limits)})  # type: ignore[arg-type]


def test_requests_a_second_refill_with_time_and_say_when_to_come_back() -> None:
    limits = limiter(requests_per_s=2)
    for _ in range(2):
        limits.enter(ALICE, 0.0)
    with pytest.raises(RateLimited) as refused:
        limits.enter(ALICE, 0.0)
    assert refused.value.retry_after_s == pytest.approx(0.5)
    limits.enter(ALICE, 0.5)
    for _ in range(100):
        limits.enter(BOB, 0.0)


def test_a_long_idle_time_saves_one_second_and_no_more() -> None:
    limits = limiter(requests_per_s=3)
    limits.enter(ALICE, 0.0)
    for _ in range(3):
        limits.enter(ALICE, 1000.0)
    with pytest.raises(RateLimited):
        limits.enter(ALICE, 1000.0)


def test_a_prompt_beyond_the_rate_is_served_and_paid_for_afterwards() -> None:
    limits = limiter(tokens_per_s=100)
    limits.enter(ALICE, 0.0)
    limits.charge(ALICE, 500, 0.0)
    with pytest.raises(RateLimited) as refused:
        limits.enter(ALICE, 1.0)
    assert refused.value.retry_after_s == pytest.approx(3.0)
    limits.enter(ALICE, 4.0)


def test_concurrent_requests_are_bounded_and_a_refusal_holds_nothing() -> None:
    limits = limiter(max_concurrent=1)
    limits.enter(ALICE, 0.0)
    for _ in range(3):
        with pytest.raises(RateLimited):
            limits.enter(ALICE, 0.0)
    limits.leave(ALICE)
    limits.enter(ALICE, 0.0)
    assert limits.running() == {ALICE: 1}


def test_a_clock_that_steps_back_gives_nothing_and_breaks_nothing() -> None:
    limits = limiter(requests_per_s=1)
    limits.enter(ALICE, 10.0)
    with pytest.raises(RateLimited):
        limits.enter(ALICE, 5.0)
    limits.enter(ALICE, 11.0)


def key_file(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return path


def test_the_key_file_says_what_a_tenant_may_take(tmp_path: Path) -> None:
    path = key_file(
        tmp_path / "keys",
        f"alice {'a' * 64} requests_per_s=2.5 tokens_per_s=1000 max_concurrent=4 weight=2 critical",
        f"bob {'b' * 64}",
    )
    keys = read_api_keys(path)
    assert len(keys.tenants) == 2
    assert keys.limits == {ALICE: TenantLimit(2.5, 1000.0, 4, 2.0, True)}


@pytest.mark.parametrize("words", ["requests_per_s=-1", "requests_per_s=nan", "colour=blue", "weight=0", "weight="])
def test_a_wrong_word_in_the_key_file_fails_the_start_with_its_line(tmp_path: Path, words: str) -> None:
    path = key_file(tmp_path / "keys", "# comment", f"alice {'a' * 64} {words}")
    with pytest.raises(StartupError, match="line 2"):
        read_api_keys(path)
