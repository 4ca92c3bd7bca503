"""Who may start now, who waits, who is refused: the router's one door for generation requests.

    admitted draining, too many in all, the tenant's limits               refused before anything is spent
    submit   room on the workers and nobody waits: starts at once
             else predicted time to first token above what its tier takes: refused, with the time after which to retry
             else waits in the fair queue; its client, its deadline or a full queue may take it out again
    pump     room came back: the next ones start

Room is kept small: what waits here goes by tier, deadline and tenant, what waits on a worker only by arrival. A request
starts in the same breath as it is let through, so that the next one sees its booking.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.errors import ServerOverloaded, TandemError
from cluster.identity import RequestId, Tenant
from router.fair_queue import FairQueue, Tier, Waiting, tier_of
from router.load_policies import prefill_queue_ms
from router.placement import ClusterSnapshot
from router.tenant_limits import TenantLimiter
from router.timing_model import TimingModel
from router.worker_state import Role, WorkerState

# How late a first token may be, in units of the objective; None: however late.
SLO_FACTORS: dict[Tier, float | None] = {Tier.CRITICAL: None, Tier.NORMAL: 2.0, Tier.SHEDDABLE: 1.0}
# A worker that has one prompt to compute takes another one, however long both are: it must not run dry.
PROMPTS_AHEAD = 2
RETRY_AFTER_S = 1.0
# Room may also come back without a word to this router: other routers' requests end as well.
PUMP_INTERVAL_S = 0.05
MAX_UNSERVED_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """What the operator decided."""

    max_requests: int  # running and waiting
    max_waiting: int
    ttft_slo_ms: float  # 0: nobody is refused for a long wait
    max_worker_queue_ms: float  # predicted prefill booked on a worker before requests wait here instead


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that wants to start."""

    request_id: RequestId
    tenant: Tenant
    priority: int  # lower runs first
    deadline_s: float
    count_tokens: Callable[[], int]  # prompt tokens that no worker holds; asked for only when it has to wait
    begin: Callable[[], None]  # places it; raises when it cannot be placed
    fail: Callable[[TandemError], None]  # tells its client, which waits for the answer already


class Workers(Protocol):
    """Who could take a request now, and a word when that changes: the router's registry, or a simulated one."""

    def snapshot(self) -> ClusterSnapshot: ...

    def on_change(self, listener: Callable[[], None]) -> None: ...


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class Timers(Protocol):
    """As an event loop has them; a simulation has them on its own clock."""

    def call_soon(self, callback: Callable[[], None], /) -> Cancellable: ...

    def call_later(self, delay_s: float, callback: Callable[[], None], /) -> Cancellable: ...


class AdmissionListener(Protocol):
    """Hears who had to wait, for metrics and explanations."""

    def let_in(self, request_id: RequestId, tier: Tier, waited_s: float) -> None: ...


class Admission:
    """Owned by the router's event loop."""

    def __init__(
        self,
        registry: Workers,
        timing: TimingModel,
        limiter: TenantLimiter,
        settings: AdmissionSettings,
        listeners: Iterable[AdmissionListener] = (),
        *,
        may_choose_local: bool = False,
        clock: Callable[[], float] = time.monotonic,
        timers: Callable[[], Timers] = asyncio.get_running_loop,
    ) -> None:
        self.is_draining = False
        self._registry = registry
        self._timing = timing
        self._limiter = limiter
        self._settings = settings
        self._listeners = tuple(listeners)
        self._may_choose_local = may_choose_local
        self._clock = clock
        self._timers = timers
        self._queue = FairQueue(settings.max_waiting)
        self._arrivals: dict[Waiting, Arrival] = {}
        self._num_requests = 0
        self._pump_timer: Cancellable | None = None
        self._unserved_since_s: float | None = None  # no worker could take anybody
        registry.on_change(self.room_changed)

    @property
    def num_requests(self) -> int:
        """Running and waiting."""
        return self._num_requests

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @contextlib.contextmanager
    def admitted(self, tenant: Tenant) -> Iterator[None]:
        """Inside, the request counts as one of the tenant's. Raises `RateLimited` or `ServerOverloaded`."""
        self._enter(tenant)
        try:
            yield
        finally:
            self._num_requests -= 1
            self._limiter.leave(tenant)

    def _enter(self, tenant: Tenant) -> None:
        if self.is_draining:
            raise _overloaded("the server is stopping", RETRY_AFTER_S)
        now_s = self._clock()
        self._limiter.enter(tenant, now_s)
        if self._num_requests >= self._settings.max_requests and not self._make_place(tenant, now_s):
            self._limiter.leave(tenant)
            raise _overloaded(f"{self._num_requests} requests are running, the most this server takes", RETRY_AFTER_S)
        self._num_requests += 1

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Tokens that the tenant used."""
        self._limiter.charge(tenant, num_tokens, self._clock())

    def submit(self, arrival: Arrival) -> Waiting | None:
        """Begins it at once, or lets it wait: then its place in the queue, for `withdraw`.

        Raises what `begin` raises, and `ServerOverloaded`.
        """
        now_s = self._clock()
        snapshot = self._registry.snapshot()
        # Without workers nothing is gained by waiting: `begin` says what is missing.
        if not snapshot.can_serve or (not self._queue and self._has_room(snapshot, now_s)):
            arrival.begin()
            return None
        waiting = self._waiting(arrival, now_s)
        self._refuse_if_late(waiting, snapshot, now_s)
        shed = self._queue.push(waiting)
        if shed is waiting:
            raise _overloaded(f"{len(self._queue)} requests wait for a worker, the most this server lets wait", 1.0)
        self._arrivals[waiting] = arrival
        if shed is not None:
            self._shed(shed)
        self.room_changed()
        return waiting

    def withdraw(self, waiting: Waiting) -> None:
        """Nobody wants it any more. One that does not wait changes nothing."""
        self._queue.remove(waiting)
        self._arrivals.pop(waiting, None)

    def room_changed(self) -> None:
        """A worker may have room again: looks after what is being done now is done."""
        if not self._queue:
            return
        if self._pump_timer is not None:
            self._pump_timer.cancel()
        self._pump_timer = self._timers().call_soon(self.pump)

    def pump(self) -> None:
        """Starts those who are next, as long as there is room."""
        now_s = self._clock()
        while self._queue:
            if not self._may_begin(self._registry.snapshot(), now_s):
                self._pump_timer = self._timers().call_later(PUMP_INTERVAL_S, self.pump)
                return
            waiting = self._queue.pop(now_s)
            if waiting is None:
                return
            arrival = self._arrivals.pop(waiting)
            for listener in self._listeners:
                listener.let_in(arrival.request_id, waiting.tier, now_s - waiting.arrived_s)
            try:
                arrival.begin()
            except TandemError as error:
                arrival.fail(error)

    def close(self) -> None:
        if self._pump_timer is not None:
            self._pump_timer.cancel()

    def predicted_ms(self, waiting: Waiting, snapshot: ClusterSnapshot, now_s: float) -> float:
        """How long until it could begin: all that goes before it, shared by who computes, behind the shortest queue."""
        computing = snapshot.computing
        num_computing = max(1.0, len(computing) + (_share_beside_streams(snapshot) if self._may_choose_local else 0.0))
        before_ms = self._timing.prefill_ms(self._queue.tokens_before(waiting, now_s), 0) / num_computing
        return before_ms + min(prefill_queue_ms(worker, self._timing, now_s) for worker in computing)

    def status(self) -> dict[str, Any]:
        """For `/statusz`."""
        return {
            "requests": self._num_requests,
            "waiting": self._queue.waiting_by_tier(),
            "tenants": {str(tenant): count for tenant, count in self._limiter.running().items()},
        }

    # --- inside -------------------------------------------------------------------------------------------------------

    def _waiting(self, arrival: Arrival, now_s: float) -> Waiting:
        """As the queue sees it. A tenant that may not be critical is normal at most."""
        limit = self._limiter.limit_of(arrival.tenant)
        tier = tier_of(arrival.priority if limit.may_be_critical else max(0, arrival.priority))
        return Waiting(arrival.tenant, tier, arrival.count_tokens(), arrival.deadline_s, now_s, limit.weight)

    def _may_begin(self, snapshot: ClusterSnapshot, now_s: float) -> bool:
        """Whether the next one shall try. A crashed worker is back within seconds: until then nobody is turned away."""
        if snapshot.can_serve:
            self._unserved_since_s = None
            return self._has_room(snapshot, now_s)
        if self._unserved_since_s is None:
            self._unserved_since_s = now_s
        return now_s - self._unserved_since_s >= MAX_UNSERVED_S

    def _has_room(self, snapshot: ClusterSnapshot, now_s: float) -> bool:
        may_prefill = any(self._may_prefill(worker, now_s) for worker in snapshot.computing)
        may_prefill = may_prefill or (self._may_choose_local and _may_prefill_beside_streams(snapshot))
        return may_prefill and any(map(_has_kv, snapshot.decode))

    def _may_prefill(self, worker: WorkerState, now_s: float) -> bool:
        if worker.booked_prefills < PROMPTS_AHEAD:
            return True
        return prefill_queue_ms(worker, self._timing, now_s) < self._settings.max_worker_queue_ms

    def _refuse_if_late(self, waiting: Waiting, snapshot: ClusterSnapshot, now_s: float) -> None:
        factor = SLO_FACTORS[waiting.tier]
        if factor is None or not self._settings.ttft_slo_ms:
            return
        wait_ms = self.predicted_ms(waiting, snapshot, now_s)
        first_token_ms = wait_ms + self._timing.prefill_ms(waiting.num_tokens, 0)
        late_ms = first_token_ms - factor * self._settings.ttft_slo_ms
        # Its own compute is the same whenever it comes back: only the wait is a reason.
        if late_ms > 0 and wait_ms > 0:
            raise _overloaded(
                f"the first token would come after {first_token_ms / 1000:.1f} s, too late for this priority",
                max(RETRY_AFTER_S, min(late_ms, wait_ms) / 1000),
            )

    def _make_place(self, tenant: Tenant, now_s: float) -> bool:
        """Sheds a waiting request of whoever has most of them, for a tenant that has fewer."""
        newcomer = Waiting(tenant, Tier.NORMAL, 0, 0.0, now_s)
        shed = self._queue.shed_for(newcomer)
        if shed is newcomer:
            return False
        self._shed(shed)
        return True

    def _shed(self, waiting: Waiting) -> None:
        _log.info("a waiting request is shed", extra={"tier": waiting.tier.name.lower()})
        self._arrivals.pop(waiting).fail(_overloaded("other requests came first while this one waited", RETRY_AFTER_S))


def _may_prefill_beside_streams(snapshot: ClusterSnapshot) -> bool:
    """Whether a decode worker that keeps its streams in time meanwhile has no prompt to compute."""
    return snapshot.allows_local_prefill and any(
        worker.prefill_share and not worker.booked_prefills for worker in snapshot.decode
    )


def _share_beside_streams(snapshot: ClusterSnapshot) -> float:
    """What decode workers that keep their streams in time meanwhile add to the prefill pool, in workers."""
    if not (snapshot.prefill and snapshot.allows_local_prefill):
        return 0.0
    able = [worker for worker in snapshot.decode if worker.role is Role.DECODE and worker.prefill_share]
    return sum(worker.share_beside(worker.num_in_flight) for worker in able)


def _has_kv(worker: WorkerState) -> bool:
    capacity = worker.capacity_tokens
    return not capacity or worker.booked_kv_tokens < capacity


def _overloaded(message: str, retry_after_s: float) -> ServerOverloaded:
    return ServerOverloaded(message, retry_after_s=retry_after_s, stage="route")
