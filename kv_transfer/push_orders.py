"""What the engine's thread and the control's tell the sending thread of a `LayerPusher`: one value for each order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from cluster.identity import BlockRef
from kv_transfer.coverage import CellRange

if TYPE_CHECKING:
    from kv_transfer.layer_pusher import PushSession


@dataclass(frozen=True, slots=True)
class Begin:
    session: PushSession
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Post:
    session: PushSession
    cells: CellRange
    blocks: tuple[BlockRef, ...]  # where they are


@dataclass(frozen=True, slots=True)
class AddCredit:
    session: PushSession
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Resend:
    session: PushSession
    ranges: tuple[CellRange, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    session: PushSession
    on_drained: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Poll:
    """Nothing was ordered, but operations are outstanding."""


@dataclass(frozen=True, slots=True)
class Destroy:
    """Break the connection off."""


POLL, DESTROY = Poll(), Destroy()
Order: TypeAlias = "Begin | Post | AddCredit | Resend | Cancel | Poll | Destroy"
