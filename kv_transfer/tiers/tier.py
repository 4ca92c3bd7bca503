"""What a tier is, and what it tells about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.identity import BlockHash

# Whether the bytes that were just copied are still what the block's name says.
IsCurrent = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Counts since the start. `disabled_reason` is empty while the tier works."""

    name: str
    entries: int
    size_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int
    corrupt: int  # entries whose bytes were not what was put: dropped, counted as a miss too
    refused: int  # puts that were not kept
    disabled_reason: str = ""


class Tier(Protocol):
    """A bounded store of equally large blocks, safe to call from any thread. A fault of its medium is never raised.

    `proof` is what tells two blocks of one hash apart: the hash before it and the block's own token ids. An entry with
    another proof is a miss.
    """

    name: str

    def get(self, block_hash: BlockHash, proof: bytes, into: memoryview) -> bool:
        """Copies the block into `into` and verifies it there. False: `into` holds nothing that may be used."""
        ...

    def contains(self, block_hash: BlockHash) -> bool:
        """Whether `get` is worth trying; by the time of the call it may be gone. Never waits for a medium."""
        ...

    def clear(self) -> None: ...

    def status(self) -> TierStatus: ...


def always_current() -> bool:
    """Of bytes that nobody else can change."""
    return True
