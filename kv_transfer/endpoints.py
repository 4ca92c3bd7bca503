"""A decode worker's end of its links: one receiver for each transport, behind one gate.

`kv_transfer.link_choice` has the other end: the prefill worker's choice among what is offered here.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from tandem.v1 import handoff_pb2

from cluster.errors import StartupError
from kv_transfer.host import read_host_id
from kv_transfer.transport import FrameSink, Receiver
from kv_transfer.transports import nixl, ucx
from kv_transfer.transports.connection_gate import NONCE_BYTES, ConnectionGate
from kv_transfer.transports.registry import load_transports, resolve
from kv_transfer.transports.shm import ShmReceiver
from kv_transfer.transports.shm_direct import SharedKvMemory, ShmDirectReceiver
from kv_transfer.transports.tcp import TcpReceiver


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
        """`transports` may be `auto`. `memory`: the pool behind `sink`, for transports that write into it; None where
        it has no address in this process.

        Raises `StartupError` for a transport that is unknown or not installed, or an address that is not ours.
        """
        names = resolve(transports, can_write_into_pool=memory is not None)
        load_transports(names)
        self.gate = ConnectionGate()
        self._host_id = read_host_id()
        self._receivers: list[Receiver] = []
        try:
            for name in names:
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
        """A nonce that lets this peer's connections in until its session is ended at the gate."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.gate.admit(peer, nonce)
        return nonce

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()
