"""The two ends of a pair's link: a decode worker's receivers, and the prefill worker's choice among what they offer.

The choice is by the receiver's order of preference and by locality, and it is measured before it is used: what is
slower than `min_bandwidth` is passed over, and the reason stands in the answer.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.v1 import handoff_pb2

from cluster.errors import KvTransferFailed, StartupError
from kv_transfer.hello import usable_offers
from kv_transfer.host import read_host_id
from kv_transfer.layer_groups import LinkCosts
from kv_transfer.link_probe import check_bandwidth, measure_link
from kv_transfer.transport import FrameSink, Receiver, Sender
from kv_transfer.transports import nixl, ucx
from kv_transfer.transports.connection_gate import NONCE_BYTES, ConnectionGate
from kv_transfer.transports.nixl import PoolMemory
from kv_transfer.transports.shm import ShmReceiver, ShmSender
from kv_transfer.transports.shm_direct import SharedKvMemory, ShmDirectReceiver, ShmDirectSender
from kv_transfer.transports.tcp import TcpReceiver, TcpSender

MakeSender = Callable[[str, bytes, int], Sender]

SENDERS: dict[str, MakeSender] = {
    "shm": ShmSender,
    "shm-direct": ShmDirectSender,
    "tcp": TcpSender,
    "ucx": ucx.ucx_sender,
    "nixl": nixl.nixl_sender,
}
# Libraries of their own.
OPTIONAL_TRANSPORTS = {"ucx": ucx, "nixl": nixl}
# These need both workers on one host.
LOCAL_TRANSPORTS = frozenset({"shm", "shm-direct"})

_log = logging.getLogger(__name__)


class ReceivingEnds:
    """A decode worker's receivers, one for each transport, behind one gate. Owned by the worker process."""

    def __init__(
        self,
        transports: Sequence[str],
        runtime_dir: Path,
        worker_id: str,
        sink: FrameSink,
        host: str,
        memory: SharedKvMemory | None = None,
    ) -> None:
        """`memory`: the pool behind `sink`, for transports that hand it out.

        Raises `StartupError` for a transport that is unknown or not installed, or an address that is not ours.
        """
        load_transports(transports)
        self.gate = ConnectionGate()
        self._host_id = read_host_id()
        self._receivers: list[Receiver] = []
        try:
            for name in transports:
                self._receivers.append(self._open(name, runtime_dir, worker_id, sink, host, memory))
        except StartupError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise StartupError(f"cannot listen for KV over {name}: {error}", param="transports") from error

    def _open(
        self,
        name: str,
        runtime_dir: Path,
        worker_id: str,
        sink: FrameSink,
        host: str,
        memory: SharedKvMemory | None,
    ) -> Receiver:
        if name == "shm":
            return ShmReceiver(runtime_dir / f"kv-{worker_id}.sock", self.gate, sink)
        if name == "tcp":
            return TcpReceiver(host, self.gate, sink)
        if name == "ucx":
            return ucx.ucx_receiver(host, self.gate, sink)
        if memory is None:
            raise StartupError(f"{name} needs the KV pool that it writes into", param="transports")
        if name == "nixl":
            return nixl.nixl_receiver(host, self.gate, sink, memory)
        return ShmDirectReceiver(runtime_dir / f"kv-direct-{worker_id}.sock", self.gate, sink, memory)

    def offers(self) -> list[handoff_pb2.TransportOffer]:
        """What goes into Hello, in order of preference."""
        return [
            handoff_pb2.TransportOffer(name=receiver.name, address=receiver.address, host_id=self._host_id)
            for receiver in self._receivers
        ]

    def new_session(self, peer: str) -> bytes:
        """A nonce that lets this peer's connections in until it is revoked at the gate."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.gate.admit(peer, nonce)
        return nonce

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()


def load_transports(transports: Sequence[str]) -> None:
    """Loads the libraries that these need: it takes half a second, which no handshake shall wait for.

    Raises `StartupError` for a transport that is unknown, or whose library is not here.
    """
    for name in transports:
        if name not in SENDERS:
            known = ", ".join(SENDERS)
            raise StartupError(f"transport {name!r} is not known: choose among {known}", param="transports")
        if name not in OPTIONAL_TRANSPORTS:
            continue
        library = OPTIONAL_TRANSPORTS[name]
        if not library.is_installed():
            raise StartupError(f"transport {name} is not installed: {library.INSTALL}", param="transports")
        library.load()


@dataclass(frozen=True, slots=True)
class ChosenLink:
    """A connected sender, what it costs, and why it was chosen."""

    sender: Sender
    costs: LinkCosts
    reason: str


def connect_best(
    hello: handoff_pb2.Hello,
    supported: Sequence[str],
    min_bytes_per_s: float = 0.0,
    throttle_bytes_per_s: int = 0,
    memory: PoolMemory | None = None,
) -> ChosenLink:
    """Connects over the first offer that works and is fast enough. Blocks for as long as the probe takes.

    `memory`: the pool that frames will come from, for transports that register it.
    Raises `KvTransferFailed` with what was wrong with each offer.
    """
    offers = usable_offers(hello.transports, supported, read_host_id(), lambda name: name in LOCAL_TRANSPORTS)
    passed_over = []
    for offer in offers:
        sender = None
        try:
            sender = _connect(offer, hello.session_nonce, 0, memory)
            costs = measure_link(sender)
            check_bandwidth(costs, min_bytes_per_s, offer.name)
            if throttle_bytes_per_s:
                sender.close()
                sender = _connect(offer, hello.session_nonce, throttle_bytes_per_s, memory)
                costs = LinkCosts(throttle_bytes_per_s, costs.operation_s)
        except KvTransferFailed as error:
            if sender is not None:
                sender.close()
            passed_over.append(f"{offer.name}: {error.message}")
            _log.warning("transport %s to %s passed over: %s", offer.name, hello.identity.worker_id, error.message)
            continue
        place = "same host" if offer.name in LOCAL_TRANSPORTS else "any host"
        reason = f"first of the receiver's choice that works ({place})"
        return ChosenLink(sender, costs, "; ".join([reason, *passed_over]))
    tried = "; ".join(passed_over) or "none of the offers is usable here"
    raise KvTransferFailed(f"no transport to {hello.identity.worker_id}: {tried}", stage="transfer")


def _connect(
    offer: handoff_pb2.TransportOffer, nonce: bytes, throttle_bytes_per_s: int, memory: PoolMemory | None
) -> Sender:
    if offer.name == nixl.NAME:
        return nixl.nixl_sender(offer.address, nonce, throttle_bytes_per_s, memory)
    return SENDERS[offer.name](offer.address, nonce, throttle_bytes_per_s)
