"""Which attempt of which transfer a message, a frame or a landing speaks of."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.v1 import handoff_pb2

from cluster.identity import TransferId


@dataclass(frozen=True, slots=True)
class TransferRef:
    """A transfer at one epoch. The decode worker makes both; the epoch counts its attempts from 1."""

    transfer_id: TransferId
    epoch: int

    def to_message(self) -> handoff_pb2.TransferKey:
        return handoff_pb2.TransferKey(transfer_id=self.transfer_id, epoch=self.epoch)

    @classmethod
    def of(cls, message: handoff_pb2.TransferKey) -> TransferRef:
        return cls(TransferId(message.transfer_id), message.epoch)

    def __str__(self) -> str:
        return f"{self.transfer_id.hex()[:8]}/{self.epoch}"
