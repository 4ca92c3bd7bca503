"""What one tenant may take: requests and tokens a second, requests at a time. Pure: every call is given the time.

    enter    before anything is spent on a request: rate, concurrency, and no debt of tokens
    charge   tokens once they are known: the prompt's after tokenising, the answer's at its end
    leave    one request fewer

A bucket may go into debt by one request, so a prompt longer than a second's tokens is served, and paid for afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.errors import RateLimited
from cluster.identity import Tenant

UNLIMITED = 0


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """One tenant's share. 0 is no limit."""

    requests_per_s: float = UNLIMITED
    tokens_per_s: float = UNLIMITED
    max_concurrent: int = UNLIMITED
    weight: float = 1.0  # of its turn when several tenants wait
    may_be_critical: bool = False  # may ask for a priority above the normal one


class TokenBucket:
    """Fills at `rate_per_s` up to one second's worth (at least one)."""

    def __init__(self, rate_per_s: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = max(1.0, rate_per_s)
        self._level = self._burst
        self._at_s = now_s

    def take(self, amount: float, now_s: float) -> None:
        """May leave a debt."""
        self._level = self._level_at(now_s) - amount
        self._at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until the level is `amount`; 0 when it is already."""
        return max(0.0, amount - self._level_at(now_s)) / self._rate_per_s

    def _level_at(self, now_s: float) -> float:
        return min(self._burst, self._level + max(0.0, now_s - self._at_s) * self._rate_per_s)


@dataclass(slots=True)
class _Account:
    """One tenant's use."""

    limit: TenantLimit
    requests: TokenBucket | None
    tokens: TokenBucket | None
    num_running: int = field(default=0)


class TenantLimiter:
    """Owned by the router's admission. Tenants come from the key file, so there are as many accounts as keys."""

    def __init__(self, default: TenantLimit, limits: Mapping[Tenant, TenantLimit] | None = None) -> None:
        self._default = default
        self._limits = dict(limits or {})
        self._accounts: dict[Tenant, _Account] = {}

    def enter(self, tenant: Tenant, now_s: float) -> None:
        """One more request. Raises `RateLimited` with the time after which it would be let in."""
        account = self._account(tenant, now_s)
        limit = account.limit
        if limit.max_concurrent and account.num_running >= limit.max_concurrent:
            raise _limited(f"{account.num_running} requests are running, this key's limit", 1.0)
        if account.requests is not None and (wait_s := account.requests.wait_s(1.0, now_s)) > 0:
            raise _limited(f"more than {limit.requests_per_s:g} requests a second, this key's limit", wait_s)
        if account.tokens is not None and (wait_s := account.tokens.wait_s(0.0, now_s)) > 0:
            raise _limited(f"more than {limit.tokens_per_s:g} tokens a second, this key's limit", wait_s)
        if account.requests is not None:
            account.requests.take(1.0, now_s)
        account.num_running += 1

    def charge(self, tenant: Tenant, num_tokens: int, now_s: float) -> None:
        tokens = self._account(tenant, now_s).tokens
        if tokens is not None:
            tokens.take(num_tokens, now_s)

    def leave(self, tenant: Tenant) -> None:
        self._accounts[tenant].num_running -= 1

    def limit_of(self, tenant: Tenant) -> TenantLimit:
        return self._limits.get(tenant, self._default)

    def running(self) -> dict[Tenant, int]:
        """Requests of each tenant that has any."""
        return {tenant: account.num_running for tenant, account in self._accounts.items() if account.num_running}

    def _account(self, tenant: Tenant, now_s: float) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            limit = self.limit_of(tenant)
            requests = TokenBucket(limit.requests_per_s, now_s) if limit.requests_per_s else None
            tokens = TokenBucket(limit.tokens_per_s, now_s) if limit.tokens_per_s else None
            account = self._accounts[tenant] = _Account(limit, requests, tokens)
        return account


def _limited(reason: str, wait_s: float) -> RateLimited:
    return RateLimited(f"rate limit: {reason}", code="rate_limit_exceeded", retry_after_s=wait_s, stage="route")
