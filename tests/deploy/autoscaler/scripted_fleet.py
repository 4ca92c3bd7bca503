"""A fleet that does at once what it is told, on a manual clock, and reports that one writes by hand."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.v1 import membership_pb2

from cluster.identity import WorkerId
from deploy.autoscaler.fleet import FleetState, FleetWorker
from deploy.autoscaler.sampler import Reports
from deploy.autoscaler.signals import Pool
from tests.deploy.autoscaler.test_sampler import worker


class ScriptedFleet:
    """`clock` is moved by hand; workers become ready when `finish_starts` says so."""

    def __init__(self, **counts: int) -> None:
        self.now_s = 0.0
        self.entries: dict[str, FleetWorker] = {}
        self.stopped: list[str] = []
        self.running: dict[str, int] = {}
        self.arrived = 0
        self.prompt_tokens = 1000
        self.num_refused = 0  # of every four that arrive
        self.is_redis_up = True
        self._numbers = dict.fromkeys(Pool, 0)
        for name, count in counts.items():
            for _ in range(count):
                self._enter(Pool(name), FleetState.READY)

    def clock(self) -> float:
        return self.now_s

    def workers(self) -> Sequence[FleetWorker]:
        return tuple(self.entries.values())

    def start_up_s(self, pool: Pool) -> float | None:
        return None

    def start(self, pool: Pool) -> str:
        return self._enter(pool, FleetState.STARTING)

    def stop(self, worker_id: str) -> None:
        self.stopped.append(worker_id)
        del self.entries[worker_id]

    def flip(self, worker_id: str, pool: Pool) -> str:
        self.stop(worker_id)
        return self.start(pool)

    def become(self, state: FleetState, *worker_ids: str) -> None:
        for name in worker_ids:
            self.entries[name] = FleetWorker(name, self.entries[name].pool, state, self.now_s)

    def count(self, pool: Pool, state: FleetState | None = None) -> int:
        return sum(one.pool is pool and state in (None, one.state) for one in self.entries.values())

    async def read(self) -> Reports:
        """`ReportReader`: every ready worker says so, and the router has counted `arrived` prompts."""
        ready = [one.worker_id for one in self.entries.values() if one.state is FleetState.READY]
        served = self.arrived * (4 - self.num_refused) // 4
        router = membership_pb2.RouterRecord(
            router_id="router-0",
            prompts_arrived=self.arrived,
            prompts_encoded=self.arrived,
            prompt_tokens_encoded=self.arrived * self.prompt_tokens,
            prompts_ended=served,
            prompt_tokens_ended=served * self.prompt_tokens,
            generation_tokens=served * 10,
        )
        records = {
            WorkerId(name): worker(
                name, running_requests=self.running.get(name, 0), total_blocks=6250, free_blocks=6250
            )
            for name in ready
        }
        return Reports(self.is_redis_up, [router], records)

    def _enter(self, pool: Pool, state: FleetState) -> str:
        name = f"{pool.value}-{self._numbers[pool]}"
        self._numbers[pool] += 1
        self.entries[name] = FleetWorker(name, pool, state, self.now_s)
        return name
