"""A decode worker whose answers are scripted: a real gRPC server with the real contract and no engine.

Without a script a request's tokens are a fixed function of (prompt, seed, choice, position), as the engine's are: so a
request that goes on at another worker must have the tokens it would have had.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from tandem.v1 import common_pb2, membership_pb2, worker_pb2, worker_pb2_grpc

from cluster.rpc import bind, build_server
from cluster.rpc_security import RpcSecurity

SECURITY = RpcSecurity("test-token")
TOTAL_BLOCKS = 64
BLOCK_TOKENS = 16
FIRST_LETTER, NUM_LETTERS = ord("a"), 26  # token ids of letters in the tests' byte vocabulary

ROLES = {
    "prefill": common_pb2.WORKER_ROLE_PREFILL,
    "decode": common_pb2.WORKER_ROLE_DECODE,
    "aggregated": common_pb2.WORKER_ROLE_AGGREGATED,
}


def expected_token(submit: worker_pb2.SubmitRequest, position: int) -> int:
    """The token at a position of the generated text."""
    sampling = submit.sampling
    noise = "" if sampling.temperature == 0 else f"{sampling.seed}/{sampling.choice_index}"
    key = f"{list(submit.token_ids)}/{noise}/{position}".encode()
    return FIRST_LETTER + hashlib.blake2b(key).digest()[0] % NUM_LETTERS


@dataclass
class Step:
    """What one engine step gives a request."""

    token_ids: Sequence[int]
    event: worker_pb2.RequestEvent | None = None


Script = Callable[[worker_pb2.SubmitRequest], Iterable[Step]]


def position_logprobs(token_id: int, num_top: int) -> common_pb2.PositionLogprobs:
    top = [
        common_pb2.TokenLogprob(token_id=FIRST_LETTER + rank, logprob=-0.5 * (rank + 1), rank=rank + 1)
        for rank in range(num_top)
    ]
    chosen = common_pb2.TokenLogprob(token_id=token_id, logprob=-0.25, rank=1)
    return common_pb2.PositionLogprobs(chosen=chosen, top=top)


@dataclass
class ScriptedWorker:
    """One worker process's worth of behaviour. `pace` decides when the next step of a request may come."""

    address: str
    worker_id: str = "decode-0"
    incarnation: str = "one"
    role: str = "decode"
    script: Script | None = None
    # Awaited before each step with (request, number of tokens so far).
    pace: Callable[[worker_pb2.SubmitRequest, int], Any] | None = None
    refuse: Callable[[worker_pb2.SubmitRequest], common_pb2.Failure | None] | None = None
    die_after_tokens: int | None = None  # then the stream breaks
    answers_status: asyncio.Event = field(default_factory=asyncio.Event)  # set: as at first
    submits: list[worker_pb2.SubmitRequest] = field(default_factory=list)
    cancels: list[worker_pb2.CancelRequest] = field(default_factory=list)
    num_tokens_sent: int = 0
    num_sessions: int = 0
    num_status_asks: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _server: grpc.aio.Server | None = None

    def __post_init__(self) -> None:
        self.answers_status.set()

    async def start(self) -> None:
        self._server = build_server(SECURITY)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(_Session(self), self._server)
        worker_pb2_grpc.add_WorkerAdminServicer_to_server(_Admin(self), self._server)
        bind(self._server, self.address, SECURITY)
        await self._server.start()

    async def stop(self) -> None:
        """At once, as a killed process."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def record(self, *, ready: bool = True) -> membership_pb2.WorkerRecord:
        from tandem.v1 import handoff_pb2

        return membership_pb2.WorkerRecord(
            identity=self.identity(),
            control_address=self.address,
            model="test-model",
            layout=handoff_pb2.KvLayout(
                num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=BLOCK_TOKENS
            ),
            ready=ready,
            load=self.load(),
            heartbeat_seq=1,
        )

    def identity(self) -> common_pb2.WorkerIdentity:
        return common_pb2.WorkerIdentity(worker_id=self.worker_id, incarnation=self.incarnation, role=ROLES[self.role])

    def load(self) -> worker_pb2.LoadReport:
        return worker_pb2.LoadReport(total_blocks=TOTAL_BLOCKS, free_blocks=TOTAL_BLOCKS)

    async def wait_for(self, is_reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not is_reached():
                self.changed.clear()
                await self.changed.wait()

    def steps(self, submit: worker_pb2.SubmitRequest) -> Iterable[Step]:
        if self.script is not None:
            return self.script(submit)
        sampling = submit.sampling
        first = len(submit.generated_token_ids)
        steps = []
        for position in range(first, sampling.max_tokens):
            token_id = expected_token(submit, position)
            event = None
            if position in (first, sampling.max_tokens - 1) or sampling.logprobs >= 0:
                event = self.event(submit, position, token_id)
            steps.append(Step([token_id], event))
        return steps

    def event(self, submit: worker_pb2.SubmitRequest, position: int, token_id: int) -> worker_pb2.RequestEvent:
        sampling = submit.sampling
        is_first = position == len(submit.generated_token_ids)
        is_last = position == sampling.max_tokens - 1
        prompt = []
        if is_first and sampling.prompt_logprobs >= 0:
            prompt = [position_logprobs(t, sampling.prompt_logprobs) for t in submit.token_ids[1:]]
        return worker_pb2.RequestEvent(
            request_id=submit.request_id,
            fence=submit.fence,
            logprobs=[position_logprobs(token_id, sampling.logprobs)] if sampling.logprobs >= 0 else [],
            prompt_logprobs=prompt,
            cached_tokens=min(16, len(submit.token_ids)) if is_first and len(submit.token_ids) > 16 else 0,
            prompt_tokens=len(submit.token_ids),
            finish_reason=common_pb2.FINISH_REASON_LENGTH if is_last else common_pb2.FINISH_REASON_UNSPECIFIED,
            completion_tokens=position + 1 if is_last else 0,
            timeline=common_pb2.Timeline(
                decode_worker_id=self.worker_id,
                prefill_worker_id=submit.prefill[0].worker_id if submit.prefill else "",
                first_token_us=1234,
                kv_bytes=4096,
                transport="shm",
                attempts=1,
            ),
        )


class _Session(worker_pb2_grpc.DecodeWorkerServicer):
    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker
        self._one_writer = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()

    async def Session(  # type: ignore[override]
        self, messages: AsyncIterator[worker_pb2.RouterMessage], context: Any
    ) -> None:
        worker = self._worker
        await anext(messages)
        worker.num_sessions += 1
        worker.changed.set()
        hello = worker_pb2.DecodeHello(identity=worker.identity(), protocol_version=1)
        await context.write(worker_pb2.DecodeMessage(hello=hello))
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
            async for message in messages:
                if message.WhichOneof("message") == "submit":
                    worker.submits.append(message.submit)
                    task = asyncio.create_task(self._run(message.submit, context))
                    tasks[message.submit.request_id] = task
                else:
                    worker.cancels.append(message.cancel)
                    if message.cancel.request_id in tasks:
                        tasks[message.cancel.request_id].cancel()
                worker.changed.set()
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), *self._writes, return_exceptions=True)

    async def _run(self, submit: worker_pb2.SubmitRequest, context: Any) -> None:
        worker = self._worker
        failure = worker.refuse(submit) if worker.refuse is not None else None
        if failure is not None:
            failed = worker_pb2.RequestFailed(request_id=submit.request_id, fence=submit.fence, failure=failure)
            await self._write(context, worker_pb2.DecodeMessage(failed=failed))
            return
        num_sent = 0
        for step in worker.steps(submit):
            if worker.pace is not None:
                await worker.pace(submit, num_sent)
            if worker.die_after_tokens is not None and num_sent >= worker.die_after_tokens:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
            columns = worker_pb2.StepTokens(
                request_ids=[submit.request_id],
                token_counts=[len(step.token_ids)],
                token_ids=step.token_ids,
                events=[] if step.event is None else [step.event],
                load=worker.load(),
            )
            await self._write(context, worker_pb2.DecodeMessage(step=columns))
            num_sent += len(step.token_ids)
            worker.num_tokens_sent += len(step.token_ids)
            worker.changed.set()

    async def _write(self, context: Any, message: worker_pb2.DecodeMessage) -> None:
        """Whole even when the request is cancelled meanwhile: a write that is cut off takes the next one with it."""

        async def in_turn() -> None:
            async with self._one_writer:
                await context.write(message)

        writing = asyncio.create_task(in_turn())
        self._writes.add(writing)
        writing.add_done_callback(self._writes.discard)
        await asyncio.shield(writing)


class _Admin(worker_pb2_grpc.WorkerAdminServicer):
    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Any) -> worker_pb2.WorkerStatus:
        self._worker.num_status_asks += 1
        self._worker.changed.set()
        await self._worker.answers_status.wait()
        return worker_pb2.WorkerStatus(
            identity=self._worker.identity(),
            model="test-model",
            load=self._worker.load(),
            counters={"max_batch_size": 3.0},
            details={"pid": "1"},
        )

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
        return worker_pb2.DrainResponse()

    async def ResetPrefixCache(
        self, request: worker_pb2.ResetPrefixCacheRequest, context: Any
    ) -> worker_pb2.ResetPrefixCacheResponse:
        return worker_pb2.ResetPrefixCacheResponse()
