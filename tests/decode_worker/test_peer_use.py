"""When a prefill worker is pinged, on a clock that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from decode_worker.peer_use import PeerUse
from tests.benchmarks.virtual_loop import run_virtually

INTERVAL_S, IDLE_S = 1.0, 10.0


async def pinged_at(use: PeerUse, until_s: float, answer: Callable[[float], int | None]) -> list[float]:
    """When pings go out until then; `answer` says how many of ours the pong lists, None: there is none."""
    loop = asyncio.get_running_loop()
    times: list[float] = []
    unanswered: list[float] = []
    while True:
        await use.until_ping_is_due(INTERVAL_S, IDLE_S, lambda: bool(unanswered))
        if loop.time() > until_s:
            return times
        times.append(round(loop.time(), 3))
        use.ping_sent(num_live=0)
        if (listed := answer(loop.time())) is None:
            unanswered.append(loop.time())
        else:
            use.pong_came(listed)


def test_an_idle_peer_is_kept_alive_slowly() -> None:
    async def run() -> list[float]:
        return await pinged_at(PeerUse(asyncio.get_running_loop().time), 45, lambda _: 0)

    assert run_virtually(run()) == [10, 20, 30, 40]


def test_who_comes_into_use_is_pinged_every_interval_until_a_pong_lists_nothing() -> None:
    async def run() -> list[float]:
        loop = asyncio.get_running_loop()
        use = PeerUse(loop.time)
        loop.call_at(12.4, use.began)
        return await pinged_at(use, 30, lambda now_s: int(now_s < 15))  # an orphan there, until the lists ended it

    assert run_virtually(run()) == [10, 11, 12, 13, 14, 15, 25]


def test_kv27_a_silent_peer_is_found_as_fast_as_one_that_was_never_idle() -> None:
    """Three unanswered pings an interval apart, however slow the pace was before."""

    async def run() -> list[float]:
        loop = asyncio.get_running_loop()
        use = PeerUse(loop.time)
        loop.call_at(12.4, use.began)
        return await pinged_at(use, 17, lambda now_s: 0 if now_s < 12 else None)

    assert run_virtually(run()) == [10, 13.4, 14.4, 15.4, 16.4]


def test_use_is_remembered_for_as_long_as_asked() -> None:
    now_s = 0.0
    use = PeerUse(lambda: now_s)
    assert not use.was_used_within(1e9)
    use.began()
    now_s = 59.0
    assert use.was_used_within(60)
    use.ping_sent(num_live=1)  # a transfer that takes long
    now_s = 118.0
    assert use.was_used_within(60)
    now_s = 119.0
    assert not use.was_used_within(60)
