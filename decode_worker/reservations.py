"""Blocks for prompts that will land: all that a request needs in one step, or nothing and a place in a bounded queue.

A reservation holds the prefix that this worker has cached, a block for every missing part of the prompt, the
speculative look-ahead and one decode block. So what has landed can run without asking for anything more, and no two
requests can each hold half of what they need. The queue is tried again whenever blocks come back.

It knows nothing of peers or of transfers.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import dataclass, field

from cluster.errors import KvCapacityExhausted, ServerOverloaded
from cluster.identity import BlockRef
from decode_worker.request_check import AcceptedRequest
from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixChain, TokenIds

# Quarantined blocks may be written by somebody we cannot stop: beyond this share something is wrong with a peer, and
# admitting more would only move the damage.
MAX_QUARANTINE_SHARE = 0.25
# How often a small request may pass the one at the head of the queue before everybody waits for the head.
MAX_OVERTAKES = 8
# Requests that may fail to fit in one round of trying: bounds the round, whatever the queue's length.
MAX_TRIED = 8
OVERLOAD_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class Reservation:
    """One request's blocks, as they were taken. Owned by its landing."""

    pool: BlockPool
    chain: PrefixChain
    token_ids: TokenIds
    matched: list[BlockRef]  # a cached prefix, shared
    fresh: list[BlockRef]  # ours alone: the rest of the prompt, look-ahead, one decode block
    num_prompt_blocks: int

    @property
    def have_tokens(self) -> int:
        return len(self.matched) * self.pool.block_tokens

    @property
    def destination(self) -> list[BlockRef]:
        """Where the missing part of the prompt goes."""
        return self.fresh[: self.num_prompt_blocks - len(self.matched)]

    def give_back(self) -> None:
        """Nobody has asked for anything to be written into the blocks."""
        self.pool.release([*self.matched, *self.fresh])


@dataclass(order=True, slots=True)
class _Waiter:
    priority: int
    arrival: int
    request: AcceptedRequest = field(compare=False)
    chain: PrefixChain = field(compare=False)
    granted: asyncio.Future[Reservation] = field(compare=False)
    num_overtaken: int = field(compare=False, default=0)


class Reservations:
    """The queue in front of one pool. Used on the event loop; blocks may come back on any thread."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_waiting: int,
        lookahead_tokens: int = 0,
    ) -> None:
        self._pool = pool
        self._max_waiting = max_waiting
        self._lookahead_tokens = lookahead_tokens
        self._waiters: list[_Waiter] = []
        self._arrivals = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._is_retry_due = False
        pool.add_freed_listener(self._blocks_freed)

    @property
    def pool(self) -> BlockPool:
        return self._pool

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    @property
    def waiting_tokens(self) -> int:
        return sum(waiter.request.num_tokens for waiter in self._waiters)

    @property
    def is_admission_stopped(self) -> bool:
        """Whether too much of the pool is in quarantine to admit anything that needs blocks."""
        return self._pool.census().quarantined > MAX_QUARANTINE_SHARE * self._pool.num_blocks

    async def take(self, request: AcceptedRequest) -> Reservation:
        """The request's blocks, as soon as they are free and its turn has come.

        Raises `ServerOverloaded` when the queue is full, `KvCapacityExhausted` while admission is stopped.
        Cancelling the caller leaves the queue and takes nothing.
        """
        if self.is_admission_stopped:
            raise KvCapacityExhausted(
                f"more than {MAX_QUARANTINE_SHARE:.0%} of the KV blocks are in quarantine",
                retry_after_s=OVERLOAD_RETRY_AFTER_S,
                stage="reserve",
            )
        chain = self._pool.new_chain(request.scope_key)
        if not self._waiters and (reservation := self._try(request, chain)) is not None:
            return reservation
        if len(self._waiters) >= self._max_waiting:
            raise ServerOverloaded(
                f"{self._max_waiting} requests wait for KV blocks",
                retry_after_s=OVERLOAD_RETRY_AFTER_S,
                stage="reserve",
            )
        waiter = _Waiter(request.priority, next(self._arrivals), request, chain, self._loop.create_future())
        self._waiters.append(waiter)
        self._retry()
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise

    def _withdraw(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        elif waiter.granted.done() and not waiter.granted.cancelled():
            waiter.granted.result().give_back()  # granted in the same turn in which the caller was cancelled
        self._retry()

    def _blocks_freed(self) -> None:
        """Any thread. Many frees in one turn of the loop make one retry."""
        if self._waiters and not self._is_retry_due:
            self._is_retry_due = True
            self._loop.call_soon_threadsafe(self._retry)

    def _retry(self) -> None:
        """In order of priority and arrival; a smaller request may pass the head, but only so often."""
        self._is_retry_due = False
        if self.is_admission_stopped:  # also for who waits already; the blocks that end it come back, and bring us here
            return
        blocked: list[_Waiter] = []
        for waiter in sorted(self._waiters):
            if len(blocked) == MAX_TRIED or any(earlier.num_overtaken >= MAX_OVERTAKES for earlier in blocked):
                return
            if waiter.granted.done():
                continue  # cancelled, on its way out
            reservation = self._try(waiter.request, waiter.chain)
            if reservation is None:
                blocked.append(waiter)
                continue
            self._waiters.remove(waiter)
            waiter.granted.set_result(reservation)
            for earlier in blocked:
                earlier.num_overtaken += 1

    def _try(self, request: AcceptedRequest, chain: PrefixChain) -> Reservation | None:
        pool = self._pool
        blocks = pool.reserve(chain, request.token_ids, self._num_blocks(request))
        if blocks is None:
            return None
        matched, fresh = blocks[: chain.num_blocks], blocks[chain.num_blocks :]
        num_prompt_blocks = math.ceil(request.num_tokens / pool.block_tokens)
        return Reservation(pool, chain, request.token_ids, matched, fresh, num_prompt_blocks)

    def _num_blocks(self, request: AcceptedRequest) -> int:
        """Prompt, look-ahead and one decode block, but never more than the request could fill to its last token."""
        num_prompt_tokens = request.num_tokens - request.num_generated
        longest = num_prompt_tokens + request.sampling.max_tokens + self._lookahead_tokens
        block_tokens = self._pool.block_tokens
        wanted = math.ceil((request.num_tokens + self._lookahead_tokens) / block_tokens) + 1
        return min(wanted, math.ceil(longest / block_tokens), self._pool.num_blocks)
