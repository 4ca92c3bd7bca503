"""Real prefill and decode worker processes without a router or Redis, and a router's end of their stream."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc
import grpc.aio
from tandem.v1 import common_pb2, worker_pb2, worker_pb2_grpc

from cluster.rpc import open_channel
from cluster.rpc_security import RpcSecurity, write_secret
from cluster.sampling_params import SamplingParams
from cluster.settings_flags import settings_to_arguments
from cluster.worker_settings import WorkerSettings

Role = Literal["prefill", "decode", "aggregated"]
REPOSITORY = Path(__file__).parents[2]
READY_TIMEOUT_S = 150.0  # the ranks of a worker import torch one after the other, on a machine that others use
ANSWER_TIMEOUT_S = 120.0
POLL_S = 0.02
SECURITY = RpcSecurity("a-token-of-this-test")


@dataclass
class WorkerProcess:
    """One worker and its admin stub."""

    settings: WorkerSettings
    process: subprocess.Popen[bytes]
    log_path: Path
    channel: grpc.aio.Channel

    @property
    def address(self) -> str:
        return self.settings.listen

    @property
    def placement(self) -> worker_pb2.PrefillPlacement:
        return worker_pb2.PrefillPlacement(worker_id=self.settings.worker_id, control_address=self.address)

    async def status(self) -> worker_pb2.WorkerStatus:
        stub = worker_pb2_grpc.WorkerAdminStub(self.channel)
        answer: worker_pb2.WorkerStatus = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=30)
        return answer

    async def reset_prefix_cache(self) -> None:
        stub = worker_pb2_grpc.WorkerAdminStub(self.channel)
        await stub.ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest(), timeout=30)

    async def wait_for(
        self, is_reached: Callable[[worker_pb2.WorkerStatus], bool], timeout_s: float, what: str
    ) -> worker_pb2.WorkerStatus:
        deadline = time.monotonic() + timeout_s
        while not is_reached(status := await self.status()):
            assert time.monotonic() < deadline, f"not reached in {timeout_s} s: {what}; last status: {status}"
            await asyncio.sleep(POLL_S)
        return status

    async def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            assert self.process.poll() is None, f"{self.settings.worker_id} ended: {self.log()}"
            assert time.monotonic() < deadline, f"{self.settings.worker_id} is not ready: {self.log()}"
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self.status()
                return
            await asyncio.sleep(POLL_S)

    def log(self) -> str:
        return self.log_path.read_text()[-4000:]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def all_blocks_are_back(status: worker_pb2.WorkerStatus) -> bool:
    load = status.load
    return (
        load.free_blocks == load.total_blocks
        and load.quarantined_blocks == 0
        and status.block_conservation_error == 0
        and status.active_transfers == 0
    )


class WorkerFleet:
    """Starts workers in a folder of their own; stops what is left."""

    def __init__(self, folder: Path, model: Path, module: str = "") -> None:
        """`module`: what to run instead of the two workers' own programs."""
        self._folder = folder
        self._module = module
        self._model = model
        self._token_file = folder / "token"
        write_secret(self._token_file, SECURITY.token)
        self.workers: list[WorkerProcess] = []

    async def start(self, role: Role, worker_id: str, **settings: object) -> WorkerProcess:
        """A ready worker. Raises AssertionError with its log when it does not get there."""
        worker = self.spawn(role, worker_id, **settings)
        await worker.wait_until_ready()
        return worker

    async def start_pair(self) -> tuple[WorkerProcess, WorkerProcess]:
        """One prefill and one decode worker."""
        return await asyncio.gather(self.start("prefill", "prefill-0"), self.start("decode", "decode-0"))

    def settings(self, role: Role, worker_id: str, **settings: object) -> WorkerSettings:
        """What `spawn` tells a worker."""
        values = {
            "model": str(self._model),
            "dtype": "float32",
            "num_kv_blocks": 300,
            "drain_timeout_s": 10.0,
            "parent_pid": os.getpid(),
            "listen": f"unix:{self._folder}/{worker_id}.sock",
            **settings,
        }
        return WorkerSettings(
            worker_id=worker_id,
            role=role,
            runtime_dir=self._folder,
            cluster_token_file=self._token_file,
            **values,  # type: ignore[arg-type]
        )

    def spawn(self, role: Role, worker_id: str, **settings: object) -> WorkerProcess:
        worker_settings = self.settings(role, worker_id, **settings)
        module = self._module or ("prefill_worker" if role == "prefill" else "decode_worker")
        log_path = self._folder / f"{worker_id}.log"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "proto")))}
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *settings_to_arguments(worker_settings)],
                stdout=log,
                stderr=log,
                env=environment,
                cwd=REPOSITORY,
            )
        worker = WorkerProcess(worker_settings, process, log_path, open_channel(worker_settings.listen, SECURITY))
        self.workers.append(worker)
        return worker

    async def stop_all(self) -> None:
        for worker in self.workers:
            await worker.channel.close(None)
            if worker.process.poll() is None:
                worker.process.kill()
                worker.process.wait()


@dataclass
class Answer:
    """What one request gave."""

    token_ids: list[int] = field(default_factory=list)
    first: worker_pb2.RequestEvent = field(default_factory=worker_pb2.RequestEvent)
    last: worker_pb2.RequestEvent = field(default_factory=worker_pb2.RequestEvent)
    failure: common_pb2.Failure | None = None
    is_lost: bool = False  # the decode worker's stream broke first


class Router:
    """A router's Session with one decode worker: many requests at once."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._stream = worker_pb2_grpc.DecodeWorkerStub(worker.channel).Session()  # type: ignore[call-arg]
        self._answers: dict[str, Answer] = {}
        self._ended: dict[str, asyncio.Event] = {}
        self._first: dict[str, asyncio.Event] = {}
        self._reader: asyncio.Task[None] | None = None
        self._is_writing = asyncio.Lock()  # a stream takes one message at a time

    async def __aenter__(self) -> Router:
        hello = worker_pb2.RouterHello(router_id="router-0", incarnation="1", protocol_version=1)
        await self._stream.write(worker_pb2.RouterMessage(hello=hello))
        await asyncio.wait_for(self._stream.read(), ANSWER_TIMEOUT_S)
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.hang_up()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    def hang_up(self) -> None:
        self._stream.cancel()

    async def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        prefill: Sequence[WorkerProcess] = (),
        *,
        allow_local_prefill: bool = False,
        deadline_ms: int = 0,
        sampling: SamplingParams | None = None,
    ) -> Answer:
        """The whole answer, or its failure."""
        await self.submit(
            request_id, prompt, max_tokens, prefill,
            allow_local_prefill=allow_local_prefill, deadline_ms=deadline_ms, sampling=sampling,
        )  # fmt: skip
        return await self.answer(request_id)

    async def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        prefill: Sequence[WorkerProcess] = (),
        *,
        allow_local_prefill: bool = False,
        deadline_ms: int = 0,
        sampling: SamplingParams | None = None,
    ) -> None:
        self._answers[request_id] = Answer()
        self._ended[request_id] = asyncio.Event()
        self._first[request_id] = asyncio.Event()
        sampling = sampling or SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        submit = worker_pb2.SubmitRequest(
            request_id=request_id,
            token_ids=prompt,
            sampling=sampling.to_proto(),
            prefill=[worker.placement for worker in prefill],
            allow_local_prefill=allow_local_prefill,
            deadline_ms=deadline_ms,
            fence=1,
        )
        async with self._is_writing:
            await self._stream.write(worker_pb2.RouterMessage(submit=submit))

    async def cancel(self, request_id: str) -> None:
        cancel = worker_pb2.CancelRequest(request_id=request_id, fence=1)
        async with self._is_writing:
            await self._stream.write(worker_pb2.RouterMessage(cancel=cancel))

    async def first_token(self, request_id: str) -> None:
        await asyncio.wait_for(self._first[request_id].wait(), ANSWER_TIMEOUT_S)

    async def answer(self, request_id: str) -> Answer:
        await asyncio.wait_for(self._ended[request_id].wait(), ANSWER_TIMEOUT_S)
        return self._answers[request_id]

    async def _read(self) -> None:
        try:
            await self._read_until_broken()
        finally:
            for request_id, ended in self._ended.items():
                self._answers[request_id].is_lost = not ended.is_set()
                ended.set()

    async def _read_until_broken(self) -> None:
        while isinstance(message := await self._stream.read(), worker_pb2.DecodeMessage):
            if message.HasField("failed"):
                self._answers[message.failed.request_id].failure = message.failed.failure
                self._ended[message.failed.request_id].set()
            self._take_step(message.step)

    def _take_step(self, step: worker_pb2.StepTokens) -> None:
        position = 0
        for request_id, count in zip(step.request_ids, step.token_counts, strict=True):
            self._answers[request_id].token_ids += step.token_ids[position : position + count]
            position += count
        for event in step.events:
            answer = self._answers[event.request_id]
            if not self._first[event.request_id].is_set():
                answer.first = event
                self._first[event.request_id].set()
            if event.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED:
                answer.last = event
                self._ended[event.request_id].set()


@contextlib.asynccontextmanager
async def fleet_in(folder: Path, model: Path, module: str = "") -> AsyncIterator[WorkerFleet]:
    fleet = WorkerFleet(folder, model, module)
    try:
        yield fleet
    finally:
        await fleet.stop_all()
