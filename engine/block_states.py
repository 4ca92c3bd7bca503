"""What the block pool says of its blocks: states, broken contracts, evictions, and who hears of the prefix cache."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.errors import EngineFailure
from cluster.identity import BlockHash


class BlockInvariantError(EngineFailure):
    """A caller broke the pool's contract: a bug on our side, never a client's fault."""

    code = "block_invariant"


class UnknownBlock(BlockInvariantError):
    """No such block."""


class StaleBlock(BlockInvariantError):
    """The reference was dropped before: a double release or a late use."""


class BlockBusy(BlockInvariantError):
    """The block is in a state that does not allow this."""


class BlockState(enum.Enum):
    FREE = "free"
    OWNED = "owned"
    CACHED = "cached"  # published and referenced by nobody
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class EvictionCounts:
    """Cached blocks that made room, since lower tiers keep copies (`BlockPool.save_below`)."""

    saved: int = 0  # a lower tier has a copy
    lost: int = 0  # none has: they came back faster than they could be copied


class KvEvents(Protocol):
    """Hears of the prefix cache's changes, in order. Called under the pool's lock: must only take a note."""

    def stored(self, parent: BlockHash | None, hashes: Sequence[BlockHash]) -> None:
        """`hashes` follow each other; `parent` is the hash before the first one, None at the start of a chain."""
        ...

    def demoted(self, hashes: Sequence[BlockHash]) -> None:
        """They left the pool, and a lower tier has them."""
        ...

    def removed(self, hashes: Sequence[BlockHash]) -> None:
        """They left the pool, and are nowhere."""
        ...

    def cleared(self) -> None: ...
