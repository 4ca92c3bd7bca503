"""Reservations: all or nothing, in turn, and never a half-admitted request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tandem.v1 import worker_pb2

from cluster.errors import KvCapacityExhausted, ServerOverloaded
from cluster.sampling_params import SamplingParams
from decode_worker.request_check import AcceptedRequest, WorkerLimits, check_request
from decode_worker.reservations import MAX_OVERTAKES, Reservation, Reservations
from engine.block_pool import BlockPool

BLOCK_TOKENS = 16
LIMITS = WorkerLimits(vocab_size=10_000, max_model_len=4096, block_tokens=BLOCK_TOKENS, total_blocks=1000)


def request(
    name: str, num_tokens: int, *, max_tokens: int = 64, priority: int = 0, first_token: int = 0
) -> AcceptedRequest:
    submit = worker_pb2.SubmitRequest(
        request_id=name,
        token_ids=[first_token + index for index in range(num_tokens)],
        sampling=SamplingParams(max_tokens=max_tokens).to_proto(),
        priority=priority,
    )
    return check_request(submit, LIMITS)


def new_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, BLOCK_TOKENS, "test")


def publish(reservation: Reservation, num_blocks: int) -> None:
    """The first blocks verified."""
    num_tokens = num_blocks * BLOCK_TOKENS
    reservation.pool.publish(reservation.chain, reservation.token_ids, reservation.fresh, num_tokens)


async def settle() -> None:
    """Lets everything that is due on the loop happen."""
    for _ in range(5):
        await asyncio.sleep(0)


def is_granted(task: asyncio.Task[Reservation]) -> bool:
    return task.done() and not task.cancelled()


@pytest.mark.parametrize(
    ("num_tokens", "lookahead", "max_tokens", "num_blocks"),
    [
        (1, 0, 64, 2),  # one prompt block, one decode block
        (15, 0, 64, 2),
        (16, 0, 64, 2),
        (17, 0, 64, 3),
        (16, 4, 64, 3),
        (16, 0, 1, 2),
        (15, 0, 1, 1),  # never more than the request could fill
        (2000, 0, 64, 126),
    ],
)
async def test_reservation_holds_prompt_look_ahead_and_one_decode_block(
    num_tokens: int, lookahead: int, max_tokens: int, num_blocks: int
) -> None:
    pool = new_pool(200)
    reservations = Reservations(pool, max_waiting=4, lookahead_tokens=lookahead)
    reservation = await reservations.take(request("r", num_tokens, max_tokens=max_tokens))
    assert len(reservation.matched) + len(reservation.fresh) == num_blocks
    assert len(reservation.destination) == -(-num_tokens // BLOCK_TOKENS)
    assert pool.census().owned == num_blocks
    reservation.give_back()
    assert pool.census().free == 200


@pytest.mark.parametrize("num_cached_blocks", [0, 1, 3])
async def test_kv2_cached_prefix_is_not_asked_for_again(num_cached_blocks: int) -> None:
    pool = new_pool(20)
    reservations = Reservations(pool, max_waiting=4)
    wanted = request("r", 70)
    first = await reservations.take(wanted)
    cached = first.fresh[:num_cached_blocks]
    publish(first, num_cached_blocks)
    first.give_back()
    second = await reservations.take(wanted)
    assert second.have_tokens == num_cached_blocks * BLOCK_TOKENS
    assert [ref.block for ref in second.matched] == [ref.block for ref in cached]
    assert len(second.destination) == 5 - num_cached_blocks
    second.give_back()
    assert pool.census().conservation_error == 0


async def test_kv14_nothing_is_taken_while_it_does_not_all_fit() -> None:
    pool = new_pool(4)
    reservations = Reservations(pool, max_waiting=4)
    first = await reservations.take(request("a", 40))  # 3 + 1 blocks: all of the pool
    waiting = asyncio.create_task(reservations.take(request("b", 20, first_token=500)))
    await settle()
    assert not waiting.done()
    assert pool.census().owned == 4
    first.give_back()
    (await waiting).give_back()
    assert pool.census().free == 4


async def test_kv23_requests_of_more_than_half_the_pool_all_make_progress() -> None:
    pool = new_pool(8)
    reservations = Reservations(pool, max_waiting=32)
    order: list[int] = []

    async def serve(index: int) -> None:
        reservation = await reservations.take(request(f"r{index}", 70, first_token=100 * index))
        order.append(index)
        await settle()
        reservation.give_back()

    async with asyncio.timeout(60):
        await asyncio.gather(*(serve(index) for index in range(20)))
    assert order == list(range(20))
    assert pool.census().free == 8


async def test_waiting_for_blocks_does_not_spin() -> None:
    """A retry matches and gives back a cached prefix; that must not count as blocks coming back."""
    pool = new_pool(4)
    reservations = Reservations(pool, max_waiting=4)
    held = await reservations.take(request("held", 16))
    cached = await reservations.take(request("cached", 17, max_tokens=1, first_token=300))
    publish(cached, 1)
    cached.give_back()
    waiting = asyncio.create_task(reservations.take(request("w", 50, first_token=300)))
    await settle()
    assert not waiting.done()
    assert not reservations._is_retry_due
    held.give_back()
    (await waiting).give_back()


async def test_priority_goes_first() -> None:
    pool = new_pool(4)
    reservations = Reservations(pool, max_waiting=8)
    held = await reservations.take(request("held", 40))
    low = asyncio.create_task(reservations.take(request("low", 40, priority=5)))
    await settle()
    high = asyncio.create_task(reservations.take(request("high", 40, priority=1)))
    await settle()
    held.give_back()
    await settle()
    assert (is_granted(high), is_granted(low)) == (True, False)
    high.result().give_back()
    (await low).give_back()


async def test_k15_small_requests_pass_the_head_only_so_often() -> None:
    pool = new_pool(12)
    reservations = Reservations(pool, max_waiting=64)
    held = await reservations.take(request("held", 64))  # 5 blocks; the head below needs 11
    head = asyncio.create_task(reservations.take(request("head", 160, first_token=1000)))
    await settle()
    passed = 0
    for index in range(MAX_OVERTAKES + 5):
        small = asyncio.create_task(reservations.take(request(f"s{index}", 8, first_token=2000 + 50 * index)))
        await settle()
        if not is_granted(small):
            small.cancel()
            await asyncio.gather(small, return_exceptions=True)
            continue
        small.result().give_back()
        passed += 1
    assert passed == MAX_OVERTAKES
    held.give_back()
    (await head).give_back()


async def test_full_queue_is_refused() -> None:
    pool = new_pool(2)
    reservations = Reservations(pool, max_waiting=2)
    held = await reservations.take(request("held", 16))
    waiting = [asyncio.create_task(reservations.take(request(f"w{index}", 16))) for index in range(2)]
    await settle()
    with pytest.raises(ServerOverloaded):
        await reservations.take(request("one too many", 16))
    await _cancel(waiting)
    held.give_back()
    assert pool.census().free == 2


async def test_kv35_cancelled_while_waiting_takes_nothing() -> None:
    pool = new_pool(4)
    reservations = Reservations(pool, max_waiting=4)
    held = await reservations.take(request("held", 40))
    waiting = asyncio.create_task(reservations.take(request("w", 40)))
    await settle()
    held.give_back()  # grants in the same turn in which the waiter is cancelled
    reservations._retry()
    await _cancel([waiting])
    assert reservations.num_waiting == 0
    assert pool.census().free == 4


async def test_too_much_quarantine_stops_admission() -> None:
    pool = new_pool(8)
    reservations = Reservations(pool, max_waiting=4)
    reservation = await reservations.take(request("r", 60))
    pool.quarantine(reservation.fresh[:4])
    assert reservations.is_admission_stopped
    with pytest.raises(KvCapacityExhausted):
        await reservations.take(request("next", 1))
    pool.unquarantine(reservation.fresh[:4])
    pool.release(reservation.fresh[4:])
    (await reservations.take(request("next", 1))).give_back()
    assert pool.census().free == 8


async def test_too_much_quarantine_stops_also_who_waits_already() -> None:
    pool = new_pool(8)
    reservations = Reservations(pool, max_waiting=4)
    holder = await reservations.take(request("holder", 120))
    waiting = asyncio.create_task(reservations.take(request("waiting", 1)))
    await settle()
    pool.quarantine(holder.fresh[:4])
    pool.release(holder.fresh[4:])
    await settle()
    assert not waiting.done()
    pool.unquarantine(holder.fresh[:4])
    await settle()
    waiting.result().give_back()
    assert pool.census().free == 8


async def _cancel(tasks: Sequence[asyncio.Task[Reservation]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
