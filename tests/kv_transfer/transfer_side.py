"""A decode worker's side of one transfer, driven by hand: what its machine's tests share."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.errors import WorkerUnavailable
from cluster.identity import BlockId, BlockRef, Incarnation, TransferId, WorkerId
from kv_transfer import decode_events as on
from kv_transfer.coverage import CellRange
from kv_transfer.decode_state import DecodeTransfer, TransferRequest
from kv_transfer.decode_transfer import apply
from kv_transfer.transfer_ref import TransferRef
from kv_transfer.transport import CancelGuarantee

FENCED, MUST_DRAIN = CancelGuarantee.FENCED, CancelGuarantee.MUST_DRAIN
TRANSFER = TransferId(bytes(range(16)))
PEERS = tuple(on.PeerRef(WorkerId(f"p{index}"), Incarnation("1")) for index in range(2))
GONE = WorkerUnavailable("connection reset")
MISSING = (CellRange(0, 1, 2, 1),)


def blocks(first: int, end: int, generation: int = 1) -> tuple[BlockRef, ...]:
    return tuple(BlockRef(BlockId(block), generation) for block in range(first, end))


@dataclass
class Side:
    """One transfer on a manual clock, with everything that it asked for."""

    guarantee: CancelGuarantee = FENCED
    allow_local_prefill: bool = False
    num_ranks: int = 1
    deadline_s: float = 100.0
    candidates: tuple[on.PeerRef, ...] = PEERS
    now: float = 0.0
    log: list[on.DecodeAction] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = TransferRequest(TRANSFER, self.candidates, self.allow_local_prefill, self.deadline_s, 100)
        self.machine = DecodeTransfer(request)

    def tell(self, *events: on.DecodeEvent) -> list[on.DecodeAction]:
        actions: list[on.DecodeAction] = []
        for event in events:
            self.machine, more = apply(self.machine, event, self.now)
            actions += more
        self.log += actions
        return actions

    def tick(self, now: float) -> list[on.DecodeAction]:
        self.now = now
        return self.tell(on.Tick())

    @property
    def ref(self) -> TransferRef:
        return TransferRef(TRANSFER, self.machine.epoch)

    def reserve(self, generation: int = 1) -> None:
        self.tell(on.BlocksReserved(blocks(0, 2), blocks(2, 5, generation), blocks(5, 6)))

    def request(self) -> Side:
        self.tell(on.TransferWanted())
        self.reserve()
        self.tell(on.PeerReady(PEERS[0], self.guarantee, self.num_ranks))
        return self

    def receive(self) -> Side:
        self.request().tell(on.Accepted(self.ref))
        return self

    def seal(self) -> Side:
        self.receive().tell(on.FramesLanded(self.ref, 3, 0, 30), on.RankCommitted(self.ref, 0, 3))
        return self

    def verify(self) -> Side:
        self.seal().tell(on.ArrivalChecked(self.ref, (), 0, True, True))
        return self


def kinds(actions: list[on.DecodeAction]) -> list[str]:
    return [type(action).__name__ for action in actions]
