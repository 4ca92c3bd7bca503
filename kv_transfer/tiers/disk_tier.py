"""The tier on a disk: a folder of block files that several workers, of several models even, may share.

    folder / layout / first byte of the hash / hash.kv

What another worker stored there, or an earlier process, is found and restored like one's own; whoever writes makes
room for all, oldest file first: a hit renews a file's time. Nobody locks the folder. A file may be gone, truncated or
foreign whenever it is opened: a miss. A full disk, a bad sector or a folder that others may write into disables the
tier, with its reason; requests go on without it.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cluster.identity import BlockHash
from kv_transfer.tiers.disk_file import LAYOUT_BYTES, ReadResult, file_bytes, read_block, write_block
from kv_transfer.tiers.disk_index import DiskIndex
from kv_transfer.tiers.host_tier import KeptBlock
from kv_transfer.tiers.tier import TierStatus

# Faults of the medium as a whole: trying again block after block would only cost time.
DISABLING_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENOTDIR}
)
FOLDER_MODE = 0o700
# How old this process's knowledge of the others' files may be when it writes: what bounds how far they exceed the
# capacity together.
REFRESH_BEFORE_WRITE_S = 0.25


class DiskTier:
    """One worker's view of the folder. `refresh` finds what others wrote; nothing here waits for anybody."""

    name = "disk"

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        block_bytes: int,
        layout_fingerprint: bytes,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`layout_fingerprint` `[16]`: model, dtype and shape; files of another one are never read."""
        if len(layout_fingerprint) != LAYOUT_BYTES:
            raise ValueError(f"a layout fingerprint has {LAYOUT_BYTES} bytes, not {len(layout_fingerprint)}")
        if capacity_bytes < block_bytes:
            raise ValueError(f"a disk tier of {capacity_bytes} bytes does not hold one block of {block_bytes}")
        self._folder = folder
        self._layout = layout_fingerprint
        self._block_bytes = block_bytes
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._index = DiskIndex(folder, layout_fingerprint.hex())
        self._refreshed_s = clock()
        self._lock = threading.Lock()  # of the counts alone
        self._hits = self._misses = self._evictions = self._corrupt = self._refused = 0
        self._disabled_reason = ""
        self._attempt(self._open)

    @property
    def is_disabled(self) -> bool:
        return bool(self._disabled_reason)

    def put(self, block_hash: BlockHash, block: KeptBlock) -> bool:
        """Writes the block into a file. False: not kept."""
        if block.payload.nbytes != self._block_bytes:
            raise ValueError(f"a block has {self._block_bytes} bytes, not {block.payload.nbytes}")
        if self._disabled_reason:
            self._count("_refused")
            return False
        if self._index.contains(block_hash):
            return True
        if not self._attempt(lambda: self._write(block_hash, block)):
            self._count("_refused")
            return False
        return True

    def get(self, block_hash: BlockHash, proof: bytes, into: memoryview) -> bool:
        if self._disabled_reason or not self._index.contains(block_hash):
            self._count("_misses")
            return False
        path = self._index.path_of(block_hash)
        try:
            result = read_block(path, self._layout, proof, into)
            if result is ReadResult.INTACT:
                os.utime(path)
        except FileNotFoundError:  # somebody removed the file behind us: no fault of the medium
            self._index.forget(path)
            self._count("_misses")
            return False
        except OSError as error:
            self._count("_misses")
            self._disable(error)
            return False
        if result is ReadResult.INTACT:
            self._index.touch(path)
            self._count("_hits")
            return True
        self._count("_misses")
        if result is ReadResult.CORRUPT:
            self._count("_corrupt")
            self._attempt(partial(self._index.remove, path))
        return False

    def contains(self, block_hash: BlockHash) -> bool:
        return not self._disabled_reason and self._index.contains(block_hash)

    def hashes(self) -> list[BlockHash]:
        """All blocks of this layout that are known to be there."""
        return [] if self._disabled_reason else self._index.hashes()

    def refresh(self) -> None:
        """Looks what others wrote and removed."""
        if not self._disabled_reason:
            self._refreshed_s = self._clock()
            self._attempt(self._index.refresh)

    def take_changes(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """The blocks of this layout that came and that went since the last call, as far as it was looked."""
        return self._index.take_changes()

    def clear(self) -> None:
        """Removes the files of this layout, whoever wrote them."""
        for block_hash in self._index.hashes():
            self._attempt(partial(self._index.remove, self._index.path_of(block_hash)))

    def status(self) -> TierStatus:
        with self._lock:
            return TierStatus(
                self.name,
                self._index.num_blocks,
                self._index.size_bytes,
                self._capacity_bytes,
                self._hits,
                self._misses,
                self._evictions,
                self._corrupt,
                self._refused,
                self._disabled_reason,
            )

    def _open(self) -> None:
        self._folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        state = self._folder.stat()
        if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            # Whoever can write a file here can give any prompt any KV.
            raise PermissionError(errno.EPERM, "others may write into it: it must be this user's alone")
        self._index.refresh()
        self._index.take_changes()

    def _write(self, block_hash: BlockHash, block: KeptBlock) -> None:
        if self._clock() - self._refreshed_s >= REFRESH_BEFORE_WRITE_S:
            self._refreshed_s = self._clock()
            self._index.refresh()
        num_bytes = file_bytes(self._block_bytes, len(block.proof))
        self._make_room(num_bytes)
        path = self._index.path_of(block_hash)
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        write_block(path, self._layout, block)
        self._index.add(path, num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        while self._index.size_bytes + num_bytes > self._capacity_bytes:
            if not self._index.remove_oldest():
                return
            self._count("_evictions")

    def _attempt(self, step: Callable[[], object]) -> bool:
        """Whether the medium did it. A fault of the medium as a whole disables the tier."""
        try:
            step()
        except OSError as error:
            if error.errno in DISABLING_ERRORS or isinstance(error, FileExistsError):
                self._disable(error)
            return False
        return True

    def _count(self, name: str) -> None:
        with self._lock:
            setattr(self, name, getattr(self, name) + 1)

    def _disable(self, error: OSError) -> None:
        self._disabled_reason = f"{self._folder}: {error.strerror or error}"
