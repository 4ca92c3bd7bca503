"""What a tier is, and what it tells about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import xxhash

from cluster.identity import BlockHash

DIGEST_BYTES = 16


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
    """A bounded store of equally large blocks, safe to call from any thread. A fault of its medium is never raised."""

    name: str

    def put(self, block_hash: BlockHash, payload: memoryview) -> bool:
        """Keeps a copy of the block's bytes. False: not kept."""
        ...

    def get(self, block_hash: BlockHash, into: memoryview) -> bool:
        """Copies the block into `into` and verifies it there. False: `into` holds nothing that may be used."""
        ...

    def contains(self, block_hash: BlockHash) -> bool:
        """Whether `get` is worth trying; by the time of the call it may be gone."""
        ...

    def clear(self) -> None: ...

    def status(self) -> TierStatus: ...


def digest_of(payload: memoryview | bytes) -> bytes:
    """xxh3-128: the bytes that come back are the bytes that were put."""
    return xxhash.xxh3_128_digest(payload)
