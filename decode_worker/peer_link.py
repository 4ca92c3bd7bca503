"""What a link to a prefill worker is made of: its timing, states and ears, and what a handshake agrees on."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc.aio
from tandem.v1 import handoff_pb2, worker_pb2

from cluster.errors import TandemError
from cluster.identity import Incarnation
from kv_transfer.transfer_ref import TransferRef


@dataclass(frozen=True, slots=True)
class PeerTiming:
    """When a peer is dead, and how soon it is tried again."""

    handshake_timeout_s: float = 5.0
    # Dead after MAX_MISSED_PINGS of them, at once on a broken stream. While nothing of ours is live there, as seldom as
    # the peer itself allows (`HelloAck.idle_ping_ms`).
    ping_interval_s: float = 1.0
    # A link among many that no request has needed for so long is closed: its ring, threads and pings are for nothing.
    unused_after_s: float = 60.0
    min_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    # A refusal is a difference of settings: it lasts until somebody restarts one side, and a restart shows as a new
    # incarnation; asking again this often only covers a membership that says nothing.
    refused_retry_s: float = 30.0


class PeerState(enum.Enum):
    IDLE = "idle"
    CONNECTING = "connecting"
    READY = "ready"
    REFUSED = "refused"
    BROKEN = "broken"
    CLOSED = "closed"


class TransferListener(Protocol):
    """One attempt's ear on a peer. Called on the event loop."""

    def on_message(self, message: handoff_pb2.PrefillToDecode) -> None: ...

    def listed(self, ref: TransferRef, is_listed: bool) -> None:
        """Whether P's own list of live attempts has this one."""
        ...

    def peer_gone(self, error: TandemError) -> None:
        """`KvLinkBroken` where the peer itself is there."""
        ...


@dataclass(frozen=True, slots=True)
class PeerLink:
    """What one handshake agreed on, until its stream ends. `silent` is set after that, once nothing of the link can
    land any more."""

    incarnation: Incarnation
    transport: str
    transport_reason: str
    measured_gb_per_s: float
    silent: asyncio.Event
    idle_ping_s: float = 0.0  # while nothing of ours is live there; 0: as often as otherwise


class Handshake(Protocol):
    """Makes this worker's Hello for one connection and judges the answer."""

    def hello(self, peer: str) -> handoff_pb2.Hello: ...

    def goodbye(self, hello: handoff_pb2.Hello, on_silent: Callable[[], None]) -> None:
        """That connection is over: what its Hello allowed is void, and its KV connections are broken. `on_silent` is
        called, from any thread, when nothing of them can land any more."""
        ...

    def mismatches(self, answer: handoff_pb2.HelloAck) -> list[handoff_pb2.Mismatch]:
        """What forbids this pair; empty when they fit."""
        ...


@dataclass(frozen=True, slots=True)
class PeerResources:
    """What all peers of a decode worker share."""

    open_channel: Callable[[str], grpc.aio.Channel]
    handshake: Handshake
    load_report: Callable[[], worker_pb2.LoadReport]
    timing: PeerTiming
    connects_ahead: Callable[[], bool]  # there are few enough of them to be connected to all
