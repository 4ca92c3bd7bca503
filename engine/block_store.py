"""What lies below the KV pool, as the engine needs it: a store of full, verified blocks, by hash and proof.

`kv_transfer.tiers.tier_stack.TierStack` is one; a worker hands it in, for the engine knows no disks. A store is a
cache: whatever goes wrong with it is a miss, never a wrong block and never a failed request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.identity import BlockHash
from cluster.kv_layout import KvLayout
from cluster.worker_settings import WorkerSettings

# Of blocks that others stored or that an earlier process left, and of those that no tier has any more.
ChangeListener = Callable[[Sequence[BlockHash], Sequence[BlockHash]], None]


class BlockStore(Protocol):
    """Safe to call from any thread."""

    def put(self, block_hash: BlockHash, proof: bytes, payload: memoryview, is_current: Callable[[], bool]) -> bool:
        """Keeps a copy of the block's bytes, unless `is_current`, asked once they are copied, says no."""
        ...

    def get(self, block_hash: BlockHash, proof: bytes, into: memoryview) -> str | None:
        """Copies the block of this hash and proof into `into`, verified, and names the tier that had it.

        None is a miss: `into` must not be used. May wait for a disk.
        """
        ...

    def find(self, block_hashes: Sequence[BlockHash]) -> list[str]:
        """In which tier each block is, from the first one on as far as all are there. Never waits for a disk."""
        ...

    def keeps(self, block_hash: BlockHash) -> bool:
        """Whether the block is there, and is to stay."""
        ...

    def watch(self, on_change: ChangeListener) -> None:
        """`on_change` is called, from any thread, with what came by itself and what went for good. At once with what is
        there already."""
        ...

    def clear(self) -> None: ...

    def counters(self) -> dict[str, float]: ...

    def details(self) -> dict[str, str]: ...

    def close(self) -> None: ...


# From a worker's settings, its pool's layout and its model's fingerprint; None: the settings name no tier.
OpenStore = Callable[[WorkerSettings, KvLayout, str], BlockStore | None]


def no_store(settings: WorkerSettings, layout: KvLayout, model_fingerprint: str) -> None:
    """Of a worker without lower tiers. Implements `OpenStore`."""
