"""Requests that wait for a worker: who is next, who is shed. Bounded, pure: every call is given the time.

    tier      critical before normal before sheddable; who waited `AGEING_S` moves up one tier, so nobody starves
    tenant    within a tier in turn, by deficit round robin: each turn gives tokens by weight, a request costs its own
    deadline  within a tenant the earliest first

When the queue is full somebody of the lowest tier goes, of the tenant that has most waiting there: one tenant's flood
pushes out its own requests, not those of others.
Source: deficit round robin, Shreedhar and Varghese 1995; longest queue drop, Suter et al. 1998.
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
    # The queue's own: the number of its entry (0: not queued), the tier that it has grown into, and since when.
    place: int = field(default=0, init=False)
    ranked_as: Tier = field(default=Tier.NORMAL, init=False)
    ranked_at_s: float = field(default=0.0, init=False)

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
    """One tier."""

    def __init__(self) -> None:
        self.turns: OrderedDict[Tenant, _Turn] = OrderedDict()  # the first one's turn is next
        self.by_arrival: deque[tuple[int, Waiting]] = deque()
        self.num_tokens = 0


class FairQueue:
    """Owned by the router's admission."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._ranks = {tier: _Rank() for tier in Tier}
        self._num_waiting = 0
        self._num_pushed = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, waiting: Waiting, now_s: float) -> Waiting | None:
        """Takes it in. Returns who had to go for it: nobody, another request, or itself when it ranks lowest."""
        shed = self.shed_for(waiting) if self._num_waiting >= self._max_waiting else None
        if shed is waiting:
            return waiting
        self._num_waiting += 1
        self._enter(waiting, waiting.tier, now_s)
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
        self._leave(waiting)

    def pop(self, now_s: float) -> Waiting | None:
        """Who is next."""
        self._age(now_s)
        for rank in self._ranks.values():
            if rank.turns:
                waiting = self._next_of(rank)
                self.remove(waiting)
                return waiting
        return None

    def tokens_before(self, newcomer: Waiting) -> float:
        """Tokens of all who would go before it: higher tiers, its own tenant's, and of other tenants of its tier what
        goes by turns meanwhile, or all that is there when that is less."""
        higher = sum(rank.num_tokens for tier, rank in self._ranks.items() if tier < newcomer.tier)
        turns = self._ranks[newcomer.tier].turns
        own = turns[newcomer.tenant].num_tokens if newcomer.tenant in turns else 0
        rounds = math.ceil((own + newcomer.cost_tokens) / (QUANTUM_TOKENS * newcomer.weight))
        others = (
            min(turn.num_tokens, rounds * QUANTUM_TOKENS * turn.head().weight)
            for tenant, turn in turns.items()
            if tenant != newcomer.tenant
        )
        return higher + own + sum(others)

    def waiting_by_tier(self) -> dict[str, int]:
        return {
            tier.name.lower(): sum(turn.num_waiting for turn in rank.turns.values())
            for tier, rank in self._ranks.items()
        }

    # --- inside -------------------------------------------------------------------------------------------------------

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

    def _age(self, now_s: float) -> None:
        """Who has waited long enough moves up a tier."""
        for tier in (Tier.NORMAL, Tier.SHEDDABLE):
            by_arrival = self._ranks[tier].by_arrival
            while by_arrival:
                place, waiting = by_arrival[0]
                is_here = waiting.place == place
                if is_here and now_s - waiting.ranked_at_s < AGEING_S:
                    break
                by_arrival.popleft()
                if is_here:
                    self._leave(waiting)
                    self._enter(waiting, Tier(tier - 1), now_s)

    def _enter(self, waiting: Waiting, tier: Tier, now_s: float) -> None:
        self._num_pushed += 1
        waiting.place, waiting.ranked_as, waiting.ranked_at_s = self._num_pushed, tier, now_s
        rank = self._ranks[tier]
        rank.turns.setdefault(waiting.tenant, _Turn()).enter(waiting.place, waiting)
        rank.num_tokens += waiting.num_tokens
        if tier is not Tier.CRITICAL:
            rank.by_arrival.append((waiting.place, waiting))

    def _leave(self, waiting: Waiting) -> None:
        waiting.place = 0
        rank = self._ranks[waiting.ranked_as]
        turn = rank.turns[waiting.tenant]
        turn.num_waiting -= 1
        turn.num_tokens -= waiting.num_tokens
        rank.num_tokens -= waiting.num_tokens
        if not turn.num_waiting:  # who has nothing waiting saves nothing up
            del rank.turns[waiting.tenant]
