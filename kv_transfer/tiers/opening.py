"""A worker's tiers as its settings name them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cluster.block_hash import HASH_ALGORITHM
from cluster.errors import StartupError
from cluster.kv_layout import KvLayout
from cluster.worker_settings import WorkerSettings
from kv_transfer.tiers.disk_file import LAYOUT_BYTES, MAGIC
from kv_transfer.tiers.disk_tier import DiskTier
from kv_transfer.tiers.tier_stack import TierStack

# Host memory of a disk tier that has no host tier above it: what waits to be written, and what was just read.
BUFFER_BYTES, MIN_BUFFER_BLOCKS = 64 * 2**20, 64


def open_tiers(settings: WorkerSettings, layout: KvLayout, model_fingerprint: str) -> TierStack | None:
    """None where the settings name none. Implements `engine.block_store.OpenStore`. Raises `StartupError` for a tier
    that does not hold one block."""
    host_bytes, block_bytes = settings.kv_host_tier_bytes, layout.block_bytes
    if not host_bytes and not settings.kv_disk_tier:
        return None
    if settings.kv_disk_tier and not host_bytes:
        host_bytes = max(BUFFER_BYTES, MIN_BUFFER_BLOCKS * block_bytes)
    if host_bytes < block_bytes:
        raise StartupError(
            f"a block of KV has {block_bytes} bytes, the host tier {host_bytes}", param="kv_host_tier_bytes"
        )
    if not settings.kv_disk_tier:
        return TierStack(host_bytes, block_bytes)
    if settings.kv_disk_tier_bytes < 2 * block_bytes:
        raise StartupError(
            f"a block of KV has {block_bytes} bytes, the disk tier {settings.kv_disk_tier_bytes}",
            param="kv_disk_tier_bytes",
        )
    fingerprint = layout_fingerprint(layout, model_fingerprint, settings.quantization)
    folder = Path(settings.kv_disk_tier).expanduser()
    return TierStack(host_bytes, block_bytes, DiskTier(folder, settings.kv_disk_tier_bytes, block_bytes, fingerprint))


def layout_fingerprint(layout: KvLayout, model_fingerprint: str, quantization: str) -> bytes:
    """`[16]`: what must be equal for one worker to use the blocks that another one stored. Weights that are quantised
    at start give other KV than the ones they were made from."""
    described = f"{MAGIC!r} {HASH_ALGORITHM} {model_fingerprint} {quantization} {layout!r}"
    return hashlib.blake2b(described.encode(), digest_size=LAYOUT_BYTES).digest()
