"""Where tenants stand, for all router processes on one port: a file in memory that they map.

    RUNTIME_DIR/tenants-DIGEST.use, cells of 8 bytes
        processes   of each place: its pid and when that process started
        buckets     of each tenant: when its requests and its tokens are full again, seconds on the machine's clock
        running     of each place and tenant: requests at a time, written by that place's process alone

So limits hold together without a message: a request costs a lock and a few cells, microseconds. A killed process's
lock is the kernel's to give back, and its requests count no more. One that stands still with the lock in its hand keeps
nobody waiting: after some tries a turn is taken without it, and two requests may be let in for one. The digest is of
the machine's boot, the tenants and their limits: after a change of the key file new processes count anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster.errors import StartupError
from cluster.identity import Tenant
from router.tenant_limits import TenantLimit, TenantUse

MAX_PROCESSES = 64
CELL_BYTES = 8
LOCK_TRIES = 500  # half a millisecond
# How long the requests of a killed process still count.
LIVENESS_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


class SharedTenantLedger:
    """Implements `TenantLedger`. Owned by the router process, which closes it."""

    def __init__(self, directory: Path, limits: Mapping[Tenant, TenantLimit]) -> None:
        """`limits` of every tenant. Raises `StartupError` when there is no place for the file, or for this process."""
        self._numbers = {tenant: number for number, tenant in enumerate(sorted(limits))}
        self._path = directory / f"tenants-{_digest(limits)}.use"
        self._buckets_at = 2 * MAX_PROCESSES
        self._running_at = self._buckets_at + 2 * len(limits)
        num_cells = self._running_at + MAX_PROCESSES * len(limits)
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._file, num_cells * CELL_BYTES)  # as large as it is already, or zeros
            self._memory: mmap.mmap | None = mmap.mmap(self._file, num_cells * CELL_BYTES)
        except OSError as error:
            raise StartupError(f"tenants' use cannot be kept in {self._path}: {error}") from None
        self._counts: memoryview[int] | array[int] = memoryview(self._memory).cast("Q")
        self._times_s: memoryview[float] | array[float] = memoryview(self._memory).cast("d")
        self._has_waited = False
        self._live: list[int] = []
        self._looked_s = -LIVENESS_INTERVAL_S
        with self.turn():
            self._place = self._take_place()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        is_locked = self._lock()
        try:
            yield
        finally:
            if is_locked:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def use_of(self, tenant: Tenant) -> TenantUse:
        cell = self._buckets_at + 2 * self._numbers[tenant]
        return TenantUse(self._times_s[cell], self._times_s[cell + 1])

    def put(self, tenant: Tenant, use: TenantUse) -> None:
        cell = self._buckets_at + 2 * self._numbers[tenant]
        self._times_s[cell], self._times_s[cell + 1] = use.requests_full_s, use.tokens_full_s

    def num_running(self, tenant: Tenant, now_s: float) -> int:
        """In all processes that live."""
        if now_s - self._looked_s >= LIVENESS_INTERVAL_S:
            self._looked_s = now_s
            self._live = [place for place in range(MAX_PROCESSES) if self._is_alive(place)]
        return sum(self._counts[self._running_cell(place, tenant)] for place in self._live)

    def enter(self, tenant: Tenant) -> None:
        self._counts[self._running_cell(self._place, tenant)] += 1

    def leave(self, tenant: Tenant) -> None:
        self._counts[self._running_cell(self._place, tenant)] -= 1

    def close(self) -> None:
        """Gives its place back. The file stays: a process that starts again finds how things stand."""
        if self._memory is None:
            return
        self._counts[2 * self._place] = 0
        # Requests that end after this are counted where nobody looks.
        self._counts, self._times_s = array("Q", self._counts), array("d", self._times_s)
        self._memory.close()
        self._memory = None
        os.close(self._file)

    def _lock(self) -> bool:
        if self._memory is None:
            return False
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.sched_yield()
            else:
                return True
        if not self._has_waited:
            self._has_waited = True
            _log.warning("a router process stands still and holds the tenants' ledger: limits may be passed by a few")
        return False

    def _take_place(self) -> int:
        """A free place, or a dead process's."""
        pid = os.getpid()
        for place in range(MAX_PROCESSES):
            if not self._is_alive(place):
                first = self._running_cell(place, min(self._numbers))
                for cell in range(first, first + len(self._numbers)):
                    self._counts[cell] = 0
                self._counts[2 * place], self._counts[2 * place + 1] = pid, _started(pid)
                return place
        raise StartupError(f"more than {MAX_PROCESSES} router processes share {self._path}")

    def _is_alive(self, place: int) -> bool:
        pid, started = self._counts[2 * place], self._counts[2 * place + 1]
        return pid != 0 and _started(pid) == started

    def _running_cell(self, place: int, tenant: Tenant) -> int:
        return self._running_at + place * len(self._numbers) + self._numbers[tenant]


def _started(pid: int) -> int:
    """When the process started, in the kernel's ticks; 0: it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0
    return 0 if state in "ZX" else int(fields[18])


def _digest(limits: Mapping[Tenant, TenantLimit]) -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    described = boot + "\n".join(f"{tenant} {limits[tenant]}" for tenant in sorted(limits))
    return hashlib.blake2b(described.encode(), digest_size=8).hexdigest()
