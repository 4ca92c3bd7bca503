"""One decode worker as this prefill worker sees it: its stream's outgoing messages, its link, its transfers.

It knows which attempts are live and whom a message is for; what an attempt does is `prefill_flow`'s business.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from tandem.v1 import handoff_pb2, worker_pb2

from cluster.errors import KvLinkBroken, TandemError, WorkerUnavailable, shown, to_failure
from cluster.identity import Incarnation, WorkerId
from kv_transfer.layer_pusher import LayerPusher
from kv_transfer.transfer_ref import TransferRef
from prefill_worker.prefill_flow import PrefillFlow

# Control messages that may wait for one peer's socket: more means that it does not read.
MAX_QUEUED_MESSAGES = 4096
# Attempts that ended are remembered this long, so that a repeated request for one is a duplicate and not a new one.
MAX_REMEMBERED_ATTEMPTS = 4096

logger = logging.getLogger(__name__)


class PrefillNode(Protocol):
    """What a peer needs of its worker."""

    incarnation: Incarnation

    def load_report(self) -> worker_pb2.LoadReport: ...

    def start_flow(
        self, request: handoff_pb2.PrefillRequest, peer: DecodePeer, on_ended: Callable[[], None]
    ) -> PrefillFlow:
        """A flow that has begun. Raises `PrefillRejected` for what this worker does not take on."""
        ...


@dataclass(frozen=True, slots=True)
class PeerLink:
    """What the handshake agreed on."""

    pusher: LayerPusher
    transport: str
    reason: str
    measured_gb_per_s: float
    max_credit_bytes: int  # of one transfer


class PrefillRejected(Exception):
    """This worker does not take the attempt on: nothing was computed and nothing will be written."""

    def __init__(self, reason: handoff_pb2.RejectReason.ValueType, error: TandemError) -> None:
        super().__init__(error.message)
        self.reason = reason
        self.error = error


class DecodePeer:
    """Owned by the handler of its stream. Used on the event loop only."""

    def __init__(
        self,
        worker_id: WorkerId,
        incarnation: Incarnation,
        link: PeerLink,
        node: PrefillNode,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.pusher = link.pusher
        self.max_credit_bytes = link.max_credit_bytes
        self._link = link
        self.flows: dict[TransferRef, PrefillFlow] = {}
        self._node = node
        self._clock = clock
        self._ended: OrderedDict[TransferRef, None] = OrderedDict()
        self._outgoing: asyncio.Queue[handoff_pb2.PrefillToDecode] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self._last_heard = clock()
        self._loop = asyncio.get_running_loop()
        self._hung_up: TandemError | None = None
        self._is_to_be_judged_anew = asyncio.Event()  # somebody hung up, or it has something here now
        self.pusher.tell_when_broken(self._link_broke)

    # --- its stream ---------------------------------------------------------------------------------------------------

    def on_message(self, message: handoff_pb2.DecodeToPrefill) -> None:
        self._last_heard = self._clock()
        match message.WhichOneof("message"):
            case "ping":
                self._answer_ping(message.ping)
            case "prefill":
                self._start(message.prefill)
            case None | "hello":
                logger.warning("decode worker %s sent an unexpected message", self.worker_id)
            case kind:
                flow = self.flows.get(TransferRef.of(getattr(message, kind).key))
                if flow is not None:  # else it speaks of an attempt that is over
                    flow.on_message(message)

    def send(self, message: handoff_pb2.PrefillToDecode) -> None:
        """Queues a message. A peer that does not read is hung up on."""
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self.hang_up(f"{MAX_QUEUED_MESSAGES} control messages wait for its socket")

    async def next_message(self) -> handoff_pb2.PrefillToDecode:
        return await self._outgoing.get()

    async def watch_silence(self, max_silence_s: float, max_idle_silence_s: float) -> None:
        """Raises `WorkerUnavailable` once nothing was heard for so long, or when somebody hung up. `max_idle_silence_s`
        is for a peer that has nothing here."""
        while self._hung_up is None:
            allowed_s = max_silence_s if self.flows else max_idle_silence_s
            silent_s = self._clock() - self._last_heard
            if silent_s >= allowed_s:
                raise WorkerUnavailable(f"decode worker {self.worker_id} was silent for {silent_s:.1f} s")
            self._is_to_be_judged_anew.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(allowed_s - silent_s):
                    await self._is_to_be_judged_anew.wait()
        raise self._hung_up

    def status(self) -> worker_pb2.PeerStatus:
        return worker_pb2.PeerStatus(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            transport=self._link.transport,
            measured_gb_per_s=self._link.measured_gb_per_s,
            state="ready",
            reason=self._link.reason,
        )

    def hang_up(self, reason: str) -> None:
        self._hang_up(WorkerUnavailable(reason))

    def _hang_up(self, error: TandemError) -> None:
        self._hung_up = self._hung_up or error
        self._is_to_be_judged_anew.set()

    def _link_broke(self, error: TandemError) -> None:
        """On the sending thread. A peer without its link serves nobody: a new stream brings a new link."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._hang_up, KvLinkBroken(f"its link broke: {error.message}"))

    async def close(self) -> None:
        """The peer is gone: every attempt of it ends now and gives its blocks back. A posted operation that would not
        end by itself ends with the connection."""
        flows = list(self.flows.values())
        for flow in flows:
            flow.peer_gone()
        self.pusher.destroy()
        await asyncio.gather(*(flow.wait_until_ended() for flow in flows))
        await asyncio.to_thread(self.pusher.close)

    # --- its transfers ------------------------------------------------------------------------------------------------

    def _start(self, request: handoff_pb2.PrefillRequest) -> None:
        ref = TransferRef.of(request.key)
        try:
            if ref in self.flows or ref in self._ended:
                duplicate = WorkerUnavailable(f"epoch {ref.epoch} of this transfer was asked for before")
                raise PrefillRejected(handoff_pb2.REJECT_REASON_DUPLICATE, duplicate)
            self.flows[ref] = self._node.start_flow(request, self, lambda: self._flow_ended(ref))
            self._is_to_be_judged_anew.set()
        except PrefillRejected as rejected:
            reject = handoff_pb2.Reject(
                key=request.key,
                reason=rejected.reason,
                retry_after_ms=int(rejected.error.retry_after_s * 1000),
                detail=rejected.error.message,
                failure=to_failure(rejected.error),
            )
            self.send(handoff_pb2.PrefillToDecode(reject=reject))

    def _flow_ended(self, ref: TransferRef) -> None:
        self.flows.pop(ref, None)
        self._ended[ref] = None
        while len(self._ended) > MAX_REMEMBERED_ATTEMPTS:
            self._ended.popitem(last=False)

    def _answer_ping(self, ping: handoff_pb2.Ping) -> None:
        if ping.incarnation != self.incarnation:
            self.hang_up(f"{self.worker_id} pings as incarnation {shown(ping.incarnation)}")
            return
        listed = {TransferRef.of(key) for key in ping.live}
        for ref, flow in list(self.flows.items()):
            flow.listed(ref in listed)
        pong = handoff_pb2.Pong(
            number=ping.number,
            incarnation=self._node.incarnation,
            live=[ref.to_message() for ref in self.flows],
            load=self._node.load_report(),
        )
        self.send(handoff_pb2.PrefillToDecode(pong=pong))
