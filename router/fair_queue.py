"""Requests that wait for a worker: who is next, who is shed. Bounded, pure: every call is given the time.

    tier      critical before normal before sheddable; a tier whose oldest request has waited `AGEING_S` takes turns
              with the one above it, after twice that with the next one as well, so nobody starves
    tenant    within a tier in turn, by deficit round robin: each turn gives tokens by weight, a request costs its own
    deadline  within a tenant the earliest first

Tiers age, not requests: requests that moved up by themselves would go before every newcomer of their old tier, and so
would all of one tenant's flood, once it is old enough.

When the queue is full somebody of the lowest tier goes, of the tenant that has most waiting there: one tenant's flood
pushes out its own requests, not those of others.
Source: deficit round robin, Shreedhar and Varghese 1995; tiers in turn by start-time fair queueing, Goyal et al. 1996;
longest queue drop, Suter et al. 1998.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from cluster.identity import Tenant

AGEING_S = 5.0
# What one turn of a tenant of weight 1 gives, and what the smallest request costs: decoding it is work as well.
QUANTUM_TOKENS = 512
MIN_COST_TOKENS = 256
MAX_STALE = 64


class Tier(enum.IntEnum):
    CRITICAL = 0
    NORMAL = 1
    SHEDDABLE = 2


def tier_of(priority: int) -> Tier:
    """Lower numbers run first, as in the engines: below 0 is critical, above it may be shed."""
    if priority < 0:
        return Tier.CRITICAL
    return Tier.NORMAL if priority == 0 else Tier.SHEDDABLE


@dataclass(slots=True, eq=False)
class Waiting:
    """One request in the queue."""

    tenant: Tenant
    tier: Tier
    num_tokens: int  # of its prompt, that no worker holds
    deadline_s: float
    arrived_s: float
    weight: float = 1.0
    place: int = field(default=0, init=False)  # the queue's own: the number of its entry; 0: not queued

    @property
    def is_queued(self) -> bool:
        return self.place != 0

    @property
    def cost_tokens(self) -> int:
        return max(self.num_tokens, MIN_COST_TOKENS)


@dataclass(slots=True)
class _Turn:
    """One tenant's requests in one tier. Entries whose request left stay in the heap until they are met."""

    deficit: float = 0.0
    by_deadline: list[tuple[float, int, Waiting]] = field(default_factory=list)
    num_waiting: int = 0
    num_tokens: int = 0

    def enter(self, place: int, waiting: Waiting) -> None:
        heapq.heappush(self.by_deadline, (waiting.deadline_s, place, waiting))
        self.num_waiting += 1
        self.num_tokens += waiting.num_tokens
        if len(self.by_deadline) > 2 * self.num_waiting + MAX_STALE:
            self.by_deadline = [entry for entry in self.by_deadline if entry[2].place == entry[1]]
            heapq.heapify(self.by_deadline)

    def head(self) -> Waiting:
        heap = self.by_deadline
        while heap[0][2].place != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][2]

    def newest(self) -> Waiting:
        live = (waiting for _, place, waiting in self.by_deadline if waiting.place == place)
        return max(live, key=lambda waiting: waiting.arrived_s)

    def rounds_to_pay(self) -> int:
        """Turns until the head can pay."""
        head = self.head()
        return math.ceil((head.cost_tokens - self.deficit) / (QUANTUM_TOKENS * head.weight))


class _Rank:
    """The requests of one tier."""

    def __init__(self, tier: Tier) -> None:
        self.turns: OrderedDict[Tenant, _Turn] = OrderedDict()  # the first one's turn is next
        self.num_waiting = 0
        self.num_tokens = 0
        self.served_tokens = 0  # its place among tiers that take turns: the least goes first
        self._tier = tier
        self._by_arrival: deque[tuple[int, Waiting]] = deque()  # as in a turn: who left stays until met

    def enter(self, waiting: Waiting) -> None:
        self.turns.setdefault(waiting.tenant, _Turn()).enter(waiting.place, waiting)
        self.num_waiting += 1
        self.num_tokens += waiting.num_tokens
        self._by_arrival.append((waiting.place, waiting))
        if len(self._by_arrival) > 2 * self.num_waiting + MAX_STALE:
            self._by_arrival = deque(entry for entry in self._by_arrival if entry[1].place == entry[0])

    def leave(self, waiting: Waiting) -> None:
        turn = self.turns[waiting.tenant]
        turn.num_waiting -= 1
        turn.num_tokens -= waiting.num_tokens
        self.num_waiting -= 1
        self.num_tokens -= waiting.num_tokens
        if not turn.num_waiting:  # who has nothing waiting saves nothing up
            del self.turns[waiting.tenant]

    def level(self, now_s: float) -> int:
        """The tier that it has grown into: its own, less one for each `AGEING_S` that its oldest request has waited."""
        by_arrival = self._by_arrival
        while by_arrival and by_arrival[0][1].place != by_arrival[0][0]:
            by_arrival.popleft()
        waited_s = max(0.0, now_s - by_arrival[0][1].arrived_s) if by_arrival else 0.0
        return max(Tier.CRITICAL, self._tier - int(waited_s / AGEING_S))


class FairQueue:
    """Owned by the router's admission."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._ranks = {tier: _Rank(tier) for tier in Tier}
        self._num_waiting = 0
        self._num_pushed = 0
        self._served_tokens = 0  # where the tier that was served last began: who comes back saves nothing up

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, waiting: Waiting) -> Waiting | None:
        """Takes it in. Returns who had to go for it: nobody, another request, or itself when it ranks lowest."""
        shed = self.shed_for(waiting) if self._num_waiting >= self._max_waiting else None
        if shed is waiting:
            return waiting
        self._num_waiting += 1
        self._num_pushed += 1
        waiting.place = self._num_pushed
        self._ranks[waiting.tier].enter(waiting)
        return shed

    def shed_for(self, newcomer: Waiting) -> Waiting:
        """Takes out who should go so that the newcomer may come in; itself when nobody ranks below it."""
        for tier in reversed(Tier):
            turns = self._ranks[tier].turns
            if tier < newcomer.tier or not turns:
                continue
            longest = max(turns, key=lambda tenant: turns[tenant].num_waiting)
            own = turns[newcomer.tenant].num_waiting if newcomer.tenant in turns else 0
            if tier == newcomer.tier and turns[longest].num_waiting <= own + 1:
                continue
            victim = turns[longest].newest()
            self.remove(victim)
            return victim
        return newcomer

    def remove(self, waiting: Waiting) -> None:
        """Its client left, or its deadline passed. One that is not queued changes nothing."""
        if not waiting.is_queued:
            return
        self._num_waiting -= 1
        waiting.place = 0
        self._ranks[waiting.tier].leave(waiting)

    def pop(self, now_s: float) -> Waiting | None:
        """Who is next."""
        if not self._num_waiting:
            return None
        rank = self._next_rank(now_s)
        waiting = self._next_of(rank)
        self._served_tokens = max(self._served_tokens, rank.served_tokens)
        rank.served_tokens = self._served_tokens + waiting.cost_tokens
        self.remove(waiting)
        return waiting

    def tokens_before(self, newcomer: Waiting, now_s: float) -> float:
        """Tokens of all who would go before it: tiers above its own, its own tenant's, and of other tenants of its tier
        and of tiers that take turns with it what goes by turns meanwhile, or all that is there when that is less."""
        rank = self._ranks[newcomer.tier]
        own = rank.turns[newcomer.tenant].num_tokens if newcomer.tenant in rank.turns else 0
        rounds = math.ceil((own + newcomer.cost_tokens) / (QUANTUM_TOKENS * newcomer.weight))
        within = own + sum(
            min(turn.num_tokens, rounds * QUANTUM_TOKENS * turn.head().weight)
            for tenant, turn in rank.turns.items()
            if tenant != newcomer.tenant
        )
        level, before = rank.level(now_s), within
        for other in self._ranks.values():
            if other is rank or not other.turns or other.level(now_s) > level:
                continue
            is_in_turn = other.level(now_s) == level
            before += min(other.num_tokens, within + newcomer.cost_tokens) if is_in_turn else other.num_tokens
        return before

    def waiting_by_tier(self) -> dict[str, int]:
        return {
            tier.name.lower(): sum(turn.num_waiting for turn in rank.turns.values())
            for tier, rank in self._ranks.items()
        }

    # --- inside -------------------------------------------------------------------------------------------------------

    def _next_rank(self, now_s: float) -> _Rank:
        """The highest tier with requests, or of those that take turns the one that was served least."""
        tier = min(
            (tier for tier, rank in self._ranks.items() if rank.turns),
            key=lambda tier: (
                self._ranks[tier].level(now_s),
                max(self._ranks[tier].served_tokens, self._served_tokens),
                tier,
            ),
        )
        return self._ranks[tier]

    def _next_of(self, rank: _Rank) -> Waiting:
        """By deficit round robin. Rounds in which nobody could pay are added at once."""
        while True:
            for tenant, turn in list(rank.turns.items()):
                head = turn.head()
                if head.cost_tokens <= turn.deficit:
                    turn.deficit -= head.cost_tokens
                    return head
                rank.turns.move_to_end(tenant)
            rounds = min(turn.rounds_to_pay() for turn in rank.turns.values())
            for turn in rank.turns.values():
                turn.deficit += rounds * QUANTUM_TOKENS * turn.head().weight
