"""One prefill worker as this decode worker sees it: one Handoff stream, kept up with bounded back-off.

    CONNECTING ──HelloAck accepted──> READY ──stream broken, 3 pings missed, new incarnation──> BROKEN
      ^ │ ^                             │                                                         │
      │ │ ├─────────────────────────────│────────── back-off ─────────────────────────────────────┘
      │ │ └──new incarnation, or refused_retry_s──┐
      │ └──────HelloAck refused───────────────> REFUSED
      └──a request names it── IDLE <────┘ one of many, and no request has needed it for a while

Messages of a transfer go to the listener that registered its key. When the stream breaks every listener hears
`peer_gone` at once. It knows nothing of blocks or of requests.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import NamedTuple, TypeAlias

import grpc
from tandem.v1 import handoff_pb2, handoff_pb2_grpc, worker_pb2

from cluster.ended_tasks import end_tasks
from cluster.errors import KvLinkBroken, TandemError, WorkerUnavailable
from cluster.identity import Incarnation, WorkerId
from cluster.racing_tasks import first_of
from cluster.rpc_errors import from_rpc_error
from decode_worker.peer_link import PeerLink, PeerResources, PeerState, TransferListener
from decode_worker.peer_use import PeerUse
from kv_transfer.transfer_ref import TransferRef

MAX_MISSED_PINGS = 3
# Control messages that may wait for one peer's socket: more means that it does not read.
MAX_QUEUED_MESSAGES = 4096

HandoffCall: TypeAlias = grpc.aio.StreamStreamCall[handoff_pb2.DecodeToPrefill, handoff_pb2.PrefillToDecode]

logger = logging.getLogger(__name__)


class _Listening(NamedTuple):
    """One attempt's ear, and how many pings were sent before it was asked for.

    A busy peer answers pings late and in a row, and had not read of the attempt when it did: only a ping that was sent
    after it asks whether the attempt is live.
    """

    listener: TransferListener
    num_pings: int


class PrefillPeer:
    """Owned by `PrefillPeers`; lives as long as the worker id is known. Used on the event loop only."""

    def __init__(self, worker_id: WorkerId, address: str, resources: PeerResources) -> None:
        self.worker_id = worker_id
        self.address = address
        self.state = PeerState.CONNECTING
        self.reason = ""
        self.link: PeerLink | None = None
        self.refused_incarnation = Incarnation("")
        self.refused_field = ""
        self._resources = resources
        self._timing = resources.timing
        self._use = PeerUse()
        self._listeners: dict[TransferRef, _Listening] = {}
        self._num_pings = 0  # over all streams
        self._outgoing: asyncio.Queue[handoff_pb2.DecodeToPrefill] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self._state_changed = asyncio.Condition()
        self._retry_now = asyncio.Event()
        self._last_expected = Incarnation("")
        self._is_retired = False
        self._hang_up_reason = ""
        self._unanswered_pings = 0
        self._task = asyncio.create_task(self._keep_connected(), name=f"peer {worker_id}")

    async def ready(self, timeout_s: float) -> PeerLink:
        """The link once there is one. Raises `WorkerUnavailable` at once while the peer is refused or in back-off,
        and after `timeout_s` while it is connecting or about to: a placement may be first to speak of a restart."""
        self._use.began()
        if self.state is PeerState.IDLE:
            self._retry_now.set()
        try:
            async with asyncio.timeout(timeout_s), self._state_changed:
                await self._state_changed.wait_for(lambda: not self._is_about_to_change)
        except TimeoutError:
            raise self._unavailable(f"no handshake within {timeout_s:.1f} s") from None
        if self.state is not PeerState.READY or self.link is None:
            raise self._unavailable(self.reason or self.state.value)
        return self.link

    @property
    def _is_about_to_change(self) -> bool:
        is_changing = self.state in (PeerState.CONNECTING, PeerState.IDLE)
        return self.state is not PeerState.CLOSED and (is_changing or self._retry_now.is_set())

    def register(self, ref: TransferRef, listener: TransferListener) -> None:
        self._listeners[ref] = _Listening(listener, self._num_pings)
        self._use.began()

    def unregister(self, ref: TransferRef) -> None:
        self._listeners.pop(ref, None)

    def send(self, message: handoff_pb2.DecodeToPrefill) -> None:
        """Queues a message. Raises `WorkerUnavailable` when there is no stream, or when the peer does not read."""
        if self.state is not PeerState.READY:
            raise self._unavailable(self.reason or self.state.value)
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            raise self._unavailable(f"{MAX_QUEUED_MESSAGES} control messages wait for its socket") from None

    def expect_incarnation(self, incarnation: Incarnation) -> None:
        """Somebody saw this incarnation at the peer's name: another one that we hold is dead, and a pause is over."""
        self._is_retired = False
        if not incarnation or (self.link is not None and self.link.incarnation == incarnation):
            return
        if self._last_expected != incarnation:
            self._last_expected = incarnation
            self._retry_now.set()

    def status(self) -> worker_pb2.PeerStatus:
        link = self.link
        return worker_pb2.PeerStatus(
            worker_id=self.worker_id,
            incarnation=link.incarnation if link else self.refused_incarnation,
            transport=link.transport if link else "",
            measured_gb_per_s=link.measured_gb_per_s if link else 0.0,
            state=self.state.value,
            reason=self.reason,
        )

    def hang_up(self, link: PeerLink, reason: str) -> None:
        """Ends the stream of this link, unless another has taken its place: the peer must let go of everything of ours.
        It is connected to anew, and everybody else on this link hears `KvLinkBroken`."""
        if self.link is link:
            self._hang_up_reason = reason
            self._retry_now.set()

    def retire(self) -> None:
        """Membership lists it no more: what runs on its stream goes on, but a broken stream is the end."""
        self._is_retired = True
        if self.state is not PeerState.READY:
            self._retry_now.set()  # ends its pause, and with it the task

    async def close(self) -> None:
        await end_tasks(self._task)
        await self._enter(PeerState.CLOSED, "closed")

    async def _keep_connected(self) -> None:
        failures = 0
        while await self._is_wanted():
            await self._enter(PeerState.CONNECTING, "")
            self._retry_now.clear()
            try:
                await self._serve_one_connection()
                gone: TandemError = WorkerUnavailable("the peer ended the stream")
            except _Unused:
                logger.info("prefill worker %s: its link was not needed and is closed", self.worker_id)
                continue
            except asyncio.CancelledError:
                self._drop_listeners(WorkerUnavailable("this worker closes"))
                raise
            except _Refused as error:
                await self._enter(PeerState.REFUSED, str(error))
                logger.warning("prefill worker %s refused: %s", self.worker_id, error)
                await self._pause(self._timing.refused_retry_s)
                continue
            except grpc.aio.AioRpcError as error:
                gone = _without_traceback(from_rpc_error(error), error.details() or "broken")
            except (TandemError, TimeoutError, OSError) as error:
                gone = _without_traceback(error, str(error) or "broken")
            except Exception as error:  # our own bug: without this task the peer would look ready for ever
                logger.exception("prefill worker %s", self.worker_id)
                gone = WorkerUnavailable(f"internal error: {type(error).__name__}")
            was_ready = self.state is PeerState.READY
            failures = 0 if was_ready else failures + 1
            if isinstance(gone, KvLinkBroken):
                self._retry_now.set()  # it is there: no pause, and who asks for it meanwhile waits
            await self._enter(PeerState.BROKEN, gone.message)
            self._drop_listeners(gone)
            if was_ready:
                logger.warning("prefill worker %s is gone: %s", self.worker_id, gone.message)
            await self._pause(min(self._timing.max_backoff_s, self._timing.min_backoff_s * 2**failures))
        await self._enter(PeerState.CLOSED, "left the cluster")

    async def _is_wanted(self) -> bool:
        """Returns once there shall be a connection; False when there shall be none any more."""
        self._retry_now.clear()
        while not self._is_retired and self._may_rest() and self.state is not PeerState.REFUSED:
            if self.state is not PeerState.IDLE:
                await self._enter(PeerState.IDLE, "")
                continue  # a request may have come meanwhile
            await self._retry_now.wait()
            self._retry_now.clear()
        return not self._is_retired

    def _may_rest(self) -> bool:
        return not self._resources.connects_ahead() and not self._use.was_used_within(self._timing.unused_after_s)

    async def _serve_one_connection(self) -> None:
        """Returns when the peer ends the stream; raises when it breaks or falls silent, or when nobody needs it."""
        async with self._resources.open_channel(self.address) as channel:
            stream = handoff_pb2_grpc.PrefillWorkerStub(channel).Handoff()  # type: ignore[call-arg]  # written to later
            hello, silent = self._resources.handshake.hello(self.worker_id), asyncio.Event()
            loop = asyncio.get_running_loop()
            try:
                # No `wait_for`: its task and what it raises hold each other, and with them the stream.
                async with asyncio.timeout(self._timing.handshake_timeout_s):
                    self.link = await self._shake_hands(stream, hello, silent)
                await self._enter(PeerState.READY, self.link.transport_reason)
                logger.info(
                    "prefill worker %s (%s) ready: transport %s, %.2f GB/s: %s",
                    self.worker_id,
                    self.link.incarnation,
                    self.link.transport,
                    self.link.measured_gb_per_s,
                    self.link.transport_reason,
                )
                incarnation = hello.identity.incarnation
                await first_of(
                    self._read(stream),
                    self._write(stream),
                    self._ping(incarnation, self.link.idle_ping_s),
                    self._wait_for_replacement(),
                )
            finally:
                stream.cancel()
                self._resources.handshake.goodbye(hello, lambda: _set_from_thread(loop, silent))

    async def _shake_hands(self, stream: HandoffCall, hello: handoff_pb2.Hello, silent: asyncio.Event) -> PeerLink:
        await stream.write(handoff_pb2.DecodeToPrefill(hello=hello))
        answer = await stream.read()
        if not isinstance(answer, handoff_pb2.PrefillToDecode) or answer.WhichOneof("message") != "hello":
            raise self._unavailable("the first answer was not HelloAck")
        mismatches = self._resources.handshake.mismatches(answer.hello)
        if mismatches:
            self.refused_incarnation = Incarnation(answer.hello.identity.incarnation)
            self.refused_field = mismatches[0].field
            raise _Refused("; ".join(f"{bad.field} is {bad.mine} there and {bad.yours} here" for bad in mismatches))
        return PeerLink(
            incarnation=Incarnation(answer.hello.identity.incarnation),
            transport=answer.hello.transport,
            transport_reason=answer.hello.transport_reason,
            measured_gb_per_s=answer.hello.measured_gb_per_s,
            silent=silent,
            idle_ping_s=answer.hello.idle_ping_ms / 1000,
        )

    async def _read(self, stream: HandoffCall) -> None:
        while True:
            message = await stream.read()
            if not isinstance(message, handoff_pb2.PrefillToDecode):
                return  # end of stream
            if message.WhichOneof("message") == "pong":
                self._on_pong(message.pong)
                continue
            self._dispatch(message)

    def _dispatch(self, message: handoff_pb2.PrefillToDecode) -> None:
        kind = message.WhichOneof("message")
        if kind is None or kind == "hello":
            return
        listening = self._listeners.get(TransferRef.of(getattr(message, kind).key))
        if listening is not None:  # else it speaks of an attempt that is over
            listening.listener.on_message(message)
        elif kind == "commit":
            self._answer_stale(message.commit.key)

    def _answer_stale(self, key: handoff_pb2.TransferKey) -> None:
        """Who commits an attempt that is over would hold its blocks until our lists of live ones lack it."""
        ack = handoff_pb2.CommitAck(key=key, outcome=handoff_pb2.COMMIT_OUTCOME_STALE)
        with suppress(WorkerUnavailable):  # then the lists say it
            self.send(handoff_pb2.DecodeToPrefill(commit_ack=ack))

    def _on_pong(self, pong: handoff_pb2.Pong) -> None:
        if self.link is not None and pong.incarnation != self.link.incarnation:
            raise self._unavailable(f"incarnation changed to {pong.incarnation}")
        self._unanswered_pings = 0
        self._use.pong_came(len(pong.live))
        listed = {TransferRef.of(key) for key in pong.live}
        for ref, listening in list(self._listeners.items()):
            if pong.number > listening.num_pings:
                listening.listener.listed(ref, ref in listed)

    async def _write(self, stream: HandoffCall) -> None:
        while True:
            message = await self._outgoing.get()
            try:
                await stream.write(message)
            except asyncio.InvalidStateError:  # it ended while the message waited; the reader may hear of it later
                raise self._unavailable("the stream has ended") from None

    async def _ping(self, incarnation: str, idle_ping_s: float) -> None:
        interval_s = self._timing.ping_interval_s
        self._unanswered_pings = 0
        while True:
            await self._use.until_ping_is_due(interval_s, idle_ping_s, lambda: self._unanswered_pings > 0)
            if self._unanswered_pings >= MAX_MISSED_PINGS:
                raise self._unavailable(f"{MAX_MISSED_PINGS} pings were not answered")
            if not self._listeners and self._may_rest():
                await self._enter(PeerState.IDLE, "")  # before the stream ends: who comes now waits for the next one
                raise _Unused
            self._num_pings += 1
            self._unanswered_pings += 1
            live = [ref.to_message() for ref in self._listeners]
            load = self._resources.load_report()
            ping = handoff_pb2.Ping(number=self._num_pings, incarnation=incarnation, live=live, load=load)
            self._use.ping_sent(len(live))
            self.send(handoff_pb2.DecodeToPrefill(ping=ping))

    async def _wait_for_replacement(self) -> None:
        await self._retry_now.wait()
        reason, self._hang_up_reason = self._hang_up_reason, ""
        if reason:
            raise KvLinkBroken(f"prefill worker {self.worker_id}: {reason}", stage="transfer")
        raise self._unavailable("another incarnation has its name now")

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._retry_now.wait()

    async def _enter(self, state: PeerState, reason: str) -> None:
        if state is not PeerState.READY:
            self.link = None
            self._outgoing = asyncio.Queue(MAX_QUEUED_MESSAGES)
        async with self._state_changed:
            self.state, self.reason = state, reason
            self._state_changed.notify_all()

    def _drop_listeners(self, error: TandemError) -> None:
        listening, self._listeners = list(self._listeners.values()), {}
        for one in listening:
            one.listener.peer_gone(error)

    def _unavailable(self, what: str) -> WorkerUnavailable:
        return WorkerUnavailable(f"prefill worker {self.worker_id}: {what}", stage="prefill")


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop has ended, and everybody who waited with it
        loop.call_soon_threadsafe(event.set)


def _without_traceback(error: Exception, reason: str) -> TandemError:
    """What is kept of it while the next connection lives: the error itself would hold the frames of the last one, and
    with them its socket."""
    return (KvLinkBroken if isinstance(error, KvLinkBroken) else WorkerUnavailable)(reason)


class _Unused(Exception):
    """No request has needed the link for a while, and there are many like it."""


class _Refused(Exception):
    """The two workers do not fit; the message names the field."""
