"""One `DecodeWorker.Session` stream: all of this router's requests on one worker incarnation.

    Sequence ──submit, cancel──> outbox ──RouterMessage──> decode worker
    Sequence <──on_step, on_failure── one StepTokens for each engine step

While the stream stands the worker is routable. When it breaks, for whatever reason, the worker is dead at once for
routing, every sequence on it hears `WorkerUnavailable`, and the session connects again with back-off. A worker that
left the membership keeps its stream for as long as it stands: what runs there goes on.
It knows nothing of HTTP, of text or of placement.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import grpc
import grpc.aio
from tandem.v1 import worker_pb2, worker_pb2_grpc

from cluster.ended_tasks import end_tasks
from cluster.errors import TandemError, WorkerUnavailable, from_failure
from cluster.rpc import open_channel
from cluster.rpc_errors import from_rpc_error
from cluster.rpc_security import RpcSecurity
from router.worker_state import WorkerState

PROTOCOL_VERSION = 1
CONNECT_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 10.0
# A network that parts resets nothing: who owes tokens and says nothing for so long is asked whether it is there. A
# worker that stands still for three seconds is not given up; one that does not answer for five is.
SILENCE_S, PROBE_TIMEOUT_S = 2.0, 3.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 2.0
# Submissions and cancels that the worker has not taken yet. Its queue is shorter; only a stuck stream gets here.
MAX_OUTBOX_MESSAGES = 8192

_END_OF_STREAM = cast(Any, grpc.aio).EOF  # the type stubs do not have it

_log = logging.getLogger(__name__)


class SessionSequence(Protocol):
    """What a session tells of one sequence. Called on the event loop; must not block."""

    fence: int

    @property
    def submission_id(self) -> str: ...

    def on_step(self, token_ids: Sequence[int], event: worker_pb2.RequestEvent | None) -> None: ...

    def on_failure(self, error: TandemError) -> None: ...


class WorkerSession:
    """Owned by the registry: `start`, later `stop`."""

    def __init__(
        self,
        worker: WorkerState,
        hello: worker_pb2.RouterHello,
        security: RpcSecurity,
        on_link_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = worker
        self._hello = hello
        self._security = security
        self._on_link_change = on_link_change
        self._clock = clock
        self._live: dict[str, SessionSequence] = {}
        self._outbox: deque[worker_pb2.RouterMessage] = deque()
        self._outbox_filled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._heard_s = 0.0  # when the worker last said something
        self._writing_since_s: float | None = None
        self._gave_up: asyncio.Future[str] | None = None  # why this stream is of no use any more
        # No new stream after this one: the worker has left the membership.
        self.is_retired = False

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def is_over(self) -> bool:
        """Retired, and its last stream has ended."""
        return self.is_retired and not self.worker.is_connected

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"session {self.worker.worker_id}")

    async def stop(self) -> None:
        """Ends the stream; what is still live fails."""
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None
        self._disconnected("the worker has left")

    def submit(self, sequence: SessionSequence, request: worker_pb2.SubmitRequest) -> None:
        """Sends a request to the worker. Raises `WorkerUnavailable` when the stream is down."""
        if not self.worker.is_connected:
            raise WorkerUnavailable(f"worker {self.worker.worker_id} is not connected", stage="route")
        if len(self._outbox) >= MAX_OUTBOX_MESSAGES:
            raise WorkerUnavailable(f"worker {self.worker.worker_id} takes no requests", stage="route")
        self._live[sequence.submission_id] = sequence
        self._send(worker_pb2.RouterMessage(submit=request))

    def cancel(self, sequence: SessionSequence, reason: str) -> None:
        """Tells the worker to stop at once; nothing more is heard of the sequence. Unknown sequences change nothing."""
        if self._live.pop(sequence.submission_id, None) is None:
            return
        cancel = worker_pb2.CancelRequest(request_id=sequence.submission_id, fence=sequence.fence, reason=reason)
        self._send(worker_pb2.RouterMessage(cancel=cancel))

    def forget(self, sequence: SessionSequence) -> None:
        """The sequence has ended by itself."""
        self._live.pop(sequence.submission_id, None)

    # --- the stream -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            started_s = self._clock()
            try:
                reason = await self._connect_and_read()
            except grpc.aio.AioRpcError as error:
                reason = from_rpc_error(error).message
            except (TandemError, TimeoutError) as error:
                reason = str(error) or "no answer in time"
            self._disconnected(reason)
            if self.is_retired:
                self._on_link_change()
                return
            if self._clock() - started_s > MAX_BACKOFF_S:
                backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _connect_and_read(self) -> str:
        """Until the stream ends; why it did."""
        async with open_channel(self.worker.control_address, self._security) as channel:
            stub: Any = worker_pb2_grpc.DecodeWorkerStub(channel)
            call = stub.Session()
            helpers: list[asyncio.Task[None]] = []
            self._gave_up = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await call.write(worker_pb2.RouterMessage(hello=self._hello))
                    self._check_hello(await call.read())
                self._connected()
                name = self.worker.worker_id
                helpers = [
                    asyncio.create_task(self._write(call), name=f"session writer {name}"),
                    asyncio.create_task(self._watch(channel), name=f"session watch {name}"),
                    reader := asyncio.create_task(self._read(call), name=f"session reader {name}"),
                ]
                await asyncio.wait((reader, self._gave_up), return_when=asyncio.FIRST_COMPLETED)
                if self._gave_up.done():
                    return self._gave_up.result()
                if reader.cancelled():
                    return "the stream was cut off"
                reader.result()
                return f"the worker closed the stream ({(await call.code()).name})"
            finally:
                call.cancel()
                await end_tasks(*helpers)

    async def _read(self, call: Any) -> None:
        """Until the worker ends the stream."""
        while (message := await call.read()) is not _END_OF_STREAM:
            self._heard_s = self._clock()
            self._on_message(message)

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Asks who is silent, over the stream's own connection: what parts one parts the other. Looks after writes."""
        admin: Any = worker_pb2_grpc.WorkerAdminStub(channel)
        self._heard_s = self._clock()
        while True:
            await asyncio.sleep(SILENCE_S / 2)
            if self._writing_since_s is not None and self._clock() - self._writing_since_s >= WRITE_TIMEOUT_S:
                self._give_up("it takes no requests")
                return
            if not self._live:
                self._heard_s = self._clock()
            elif self._clock() - self._heard_s >= SILENCE_S:
                try:
                    await admin.GetStatus(worker_pb2.GetStatusRequest(), timeout=PROBE_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    self._give_up(f"it owes tokens and does not answer ({error.code().name})")
                    return
                self._heard_s = self._clock()

    def _give_up(self, reason: str) -> None:
        """This stream is of no use any more."""
        if self._gave_up is not None and not self._gave_up.done():
            self._gave_up.set_result(reason)

    async def _write(self, call: Any) -> None:
        """The outbox in order. A write that gets stuck ends the stream: `_watch` sees it, without a timer for each."""
        try:
            while True:
                while self._outbox:
                    self._writing_since_s = self._clock()
                    await call.write(self._outbox.popleft())
                self._writing_since_s = None
                self._outbox_filled.clear()
                await self._outbox_filled.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self._give_up("the stream broke")

    def _check_hello(self, message: Any) -> None:
        if message is _END_OF_STREAM or message.WhichOneof("message") != "hello":
            raise WorkerUnavailable("the worker did not say hello")
        identity = message.hello.identity
        if (identity.worker_id, identity.incarnation) != (self.worker.worker_id, self.worker.incarnation):
            raise WorkerUnavailable(f"another process answers at its address: {identity.worker_id}")
        if message.hello.protocol_version != PROTOCOL_VERSION:
            raise WorkerUnavailable(f"it speaks protocol {message.hello.protocol_version}, not {PROTOCOL_VERSION}")

    def _connected(self) -> None:
        self._outbox.clear()
        self._writing_since_s = None
        self.worker.is_connected = True
        _log.info("worker connected", extra={"peer": self.worker.worker_id})
        self._on_link_change()

    def _disconnected(self, reason: str) -> None:
        was_connected, self.worker.is_connected = self.worker.is_connected, False
        self._outbox.clear()
        lost, self._live = self._live, {}
        if was_connected:
            _log.warning("worker lost", extra={"peer": self.worker.worker_id, "reason": reason, "lost": len(lost)})
            self._on_link_change()
        for sequence in lost.values():
            sequence.on_failure(
                WorkerUnavailable(
                    f"worker {self.worker.worker_id} was lost: {reason}", code="worker_lost", stage="decode"
                )
            )

    def _send(self, message: worker_pb2.RouterMessage) -> None:
        self._outbox.append(message)
        self._outbox_filled.set()

    # --- messages ---------------------------------------------------------------------------------------------------

    def _on_message(self, message: worker_pb2.DecodeMessage) -> None:
        match message.WhichOneof("message"):
            case "step":
                self._on_step(message.step)
            case "failed":
                self._on_failed(message.failed)
            case "load":
                self.worker.take_report(message.load, self._clock())
            case other:
                raise WorkerUnavailable(f"the worker sent {other} in mid-stream")

    def _on_step(self, step: worker_pb2.StepTokens) -> None:
        token_ids = list(step.token_ids)
        if len(step.request_ids) != len(step.token_counts) or sum(step.token_counts) != len(token_ids):
            raise WorkerUnavailable("the worker sent a step whose columns do not fit together")
        if step.HasField("load"):
            self.worker.take_report(step.load, self._clock())
        events = {event.request_id: event for event in step.events}
        start = 0
        for request_id, count in zip(step.request_ids, step.token_counts, strict=True):
            sequence = self._live.get(request_id)
            if sequence is not None:
                event = events.get(request_id)
                if event is None or event.fence == sequence.fence:
                    sequence.on_step(token_ids[start : start + count], event)
            start += count

    def _on_failed(self, failed: worker_pb2.RequestFailed) -> None:
        sequence = self._live.get(failed.request_id)
        if sequence is not None and sequence.fence == failed.fence:
            del self._live[failed.request_id]
            sequence.on_failure(from_failure(failed.failure))
