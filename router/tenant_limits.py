"""What one tenant may take: requests and tokens a second, requests at a time. Every call is given the time.

    enter    before anything is spent on a request: rate, concurrency, and no debt of tokens
    charge   tokens once they are known: the prompt's after tokenising, the answer's at its end
    leave    one request fewer

A bucket may go into debt by one request, so a prompt longer than a second's tokens is served, and paid for afterwards.
Where a tenant stands is kept in a `TenantLedger`: this process's own, or one that the processes on a port share.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from cluster.errors import RateLimited
from cluster.identity import Tenant

UNLIMITED = 0
# Less is the last bit of a sum of times, not a wait.
SHORTEST_WAIT_S = 1e-6


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """One tenant's share. 0 is no limit."""

    requests_per_s: float = UNLIMITED
    tokens_per_s: float = UNLIMITED
    max_concurrent: int = UNLIMITED
    weight: float = 1.0  # of its turn when several tenants wait
    may_be_critical: bool = False  # may ask for a priority above the normal one
    max_concurrent_here: int = UNLIMITED  # in one router process, whose places others want as well


@dataclass(slots=True)
class TenantUse:
    """Where one tenant stands: when each of its buckets will be full again, on the monotonic clock."""

    requests_full_s: float = 0.0
    tokens_full_s: float = 0.0


class TenantLedger(Protocol):
    """Keeps what tenants use. All but `leave` within `turn`."""

    def turn(self) -> AbstractContextManager[None]:
        """Inside, nobody else reads or writes."""
        ...

    def use_of(self, tenant: Tenant) -> TenantUse: ...

    def put(self, tenant: Tenant, use: TenantUse) -> None: ...

    def num_running(self, tenant: Tenant, now_s: float) -> int: ...

    def enter(self, tenant: Tenant) -> None: ...

    def leave(self, tenant: Tenant) -> None: ...


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """Fills at `rate_per_s` up to one second's worth (at least one). Its state is the time at which it is full."""

    rate_per_s: float

    def taken(self, amount: float, full_s: float, now_s: float) -> float:
        """When it will be full after this. May leave a debt."""
        return max(full_s, now_s) + amount / self.rate_per_s

    def wait_s(self, amount: float, full_s: float, now_s: float) -> float:
        """Until it holds `amount`; 0 when it does already."""
        level = max(1.0, self.rate_per_s) - max(0.0, full_s - now_s) * self.rate_per_s
        wait_s = (amount - level) / self.rate_per_s
        return wait_s if wait_s > SHORTEST_WAIT_S else 0.0


class OwnLedger:
    """Of one process alone. Tenants come from the key file, so there are as many entries as keys."""

    def __init__(self) -> None:
        self._uses: dict[Tenant, TenantUse] = {}
        self._running: Counter[Tenant] = Counter()

    def turn(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def use_of(self, tenant: Tenant) -> TenantUse:
        return self._uses.get(tenant) or TenantUse()

    def put(self, tenant: Tenant, use: TenantUse) -> None:
        self._uses[tenant] = use

    def num_running(self, tenant: Tenant, now_s: float) -> int:
        return self._running[tenant]

    def enter(self, tenant: Tenant) -> None:
        self._running[tenant] += 1

    def leave(self, tenant: Tenant) -> None:
        self._running[tenant] -= 1


class TenantLimiter:
    """Owned by the router's admission."""

    def __init__(
        self,
        default: TenantLimit,
        limits: Mapping[Tenant, TenantLimit] | None = None,
        ledger: TenantLedger | None = None,
    ) -> None:
        self._default = default
        self._limits = dict(limits or {})
        self._ledger = ledger or OwnLedger()
        self._running_here: Counter[Tenant] = Counter()

    def enter(self, tenant: Tenant, now_s: float) -> None:
        """One more request. Raises `RateLimited` with the time after which it would be let in."""
        limit, ledger = self.limit_of(tenant), self._ledger
        if limit.max_concurrent_here and self._running_here[tenant] >= limit.max_concurrent_here:
            raise _limited(f"{self._running_here[tenant]} requests are running, one key's share", 1.0)
        if _is_kept(limit):
            with ledger.turn():
                use = ledger.use_of(tenant)
                _check(limit, use, ledger.num_running(tenant, now_s), now_s)
                if limit.requests_per_s:
                    use.requests_full_s = TokenBucket(limit.requests_per_s).taken(1.0, use.requests_full_s, now_s)
                    ledger.put(tenant, use)
                ledger.enter(tenant)
        self._running_here[tenant] += 1

    def charge(self, tenant: Tenant, num_tokens: int, now_s: float) -> None:
        limit = self.limit_of(tenant)
        if limit.tokens_per_s:
            with self._ledger.turn():
                use = self._ledger.use_of(tenant)
                use.tokens_full_s = TokenBucket(limit.tokens_per_s).taken(num_tokens, use.tokens_full_s, now_s)
                self._ledger.put(tenant, use)

    def leave(self, tenant: Tenant) -> None:
        self._running_here[tenant] -= 1
        if _is_kept(self.limit_of(tenant)):
            self._ledger.leave(tenant)

    def limit_of(self, tenant: Tenant) -> TenantLimit:
        return self._limits.get(tenant, self._default)

    def running(self) -> dict[Tenant, int]:
        """Requests in this process, of each tenant that has any."""
        return {tenant: count for tenant, count in self._running_here.items() if count}


def _is_kept(limit: TenantLimit) -> bool:
    """Whether there is anything to keep in the ledger."""
    return bool(limit.requests_per_s or limit.tokens_per_s or limit.max_concurrent)


def _check(limit: TenantLimit, use: TenantUse, num_running: int, now_s: float) -> None:
    if limit.max_concurrent and num_running >= limit.max_concurrent:
        raise _limited(f"{num_running} requests are running, this key's limit", 1.0)
    if limit.requests_per_s:
        wait_s = TokenBucket(limit.requests_per_s).wait_s(1.0, use.requests_full_s, now_s)
        if wait_s > 0:
            raise _limited(f"more than {limit.requests_per_s:g} requests a second, this key's limit", wait_s)
    if limit.tokens_per_s:
        wait_s = TokenBucket(limit.tokens_per_s).wait_s(0.0, use.tokens_full_s, now_s)
        if wait_s > 0:
            raise _limited(f"more than {limit.tokens_per_s:g} tokens a second, this key's limit", wait_s)


def _limited(reason: str, wait_s: float) -> RateLimited:
    return RateLimited(f"rate limit: {reason}", code="rate_limit_exceeded", retry_after_s=wait_s, stage="route")
