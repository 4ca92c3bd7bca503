"""The tier on a disk: one file a block, readable only whole and verified, gone when anything is wrong with it.

A file is written under another name, then renamed, so that no reader ever meets a part of one. The header names the
layout and the digest. A full disk, a bad sector or a removed folder disables the tier (with its reason) or is a miss;
requests go on without it.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections import OrderedDict
from pathlib import Path

from cluster.identity import BlockHash
from kv_transfer.tiers.tier import DIGEST_BYTES, TierStatus, digest_of

MAGIC = b"TKV1"
LAYOUT_BYTES = 16
HEADER = struct.Struct(f"<4sQ{LAYOUT_BYTES}s{DIGEST_BYTES}s")
SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"
# Faults of the medium as a whole: trying again block after block would only cost time.
DISABLING_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
)


class DiskTier:
    """A folder of block files. What an earlier process left there is used again if its layout is the same."""

    name = "disk"

    def __init__(self, folder: Path, capacity_bytes: int, block_bytes: int, layout_fingerprint: bytes) -> None:
        """`layout_fingerprint` `[16]`: model, dtype and shape; a file of another one is a miss and is removed."""
        if len(layout_fingerprint) != LAYOUT_BYTES:
            raise ValueError(f"a layout fingerprint has {LAYOUT_BYTES} bytes, not {len(layout_fingerprint)}")
        if capacity_bytes < block_bytes:
            raise ValueError(f"a disk tier of {capacity_bytes} bytes does not hold one block of {block_bytes}")
        self._folder = folder
        self._layout = layout_fingerprint
        self._block_bytes = block_bytes
        self._capacity_bytes = capacity_bytes
        self._known: OrderedDict[BlockHash, None] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self._hits = self._misses = self._evictions = self._corrupt = self._refused = 0
        self._disabled_reason = ""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._adopt_files()
        except OSError as error:
            self._disable(error)

    def put(self, block_hash: BlockHash, payload: memoryview) -> bool:
        if payload.nbytes != self._block_bytes:
            raise ValueError(f"a block has {self._block_bytes} bytes, not {payload.nbytes}")
        with self._lock:
            if self._disabled_reason:
                self._refused += 1
                return False
            if block_hash in self._known:
                self._known.move_to_end(block_hash)
                return True
            try:
                self._make_room()
                self._write(block_hash, payload)
            except OSError as error:
                self._refused += 1
                if error.errno in DISABLING_ERRORS:
                    self._disable(error)
                return False
            self._known[block_hash] = None
            return True

    def get(self, block_hash: BlockHash, into: memoryview) -> bool:
        with self._lock:
            if block_hash not in self._known or self._disabled_reason:
                self._misses += 1
                return False
            try:
                is_intact = self._read(block_hash, into)
            except FileNotFoundError:
                # Somebody removed the file behind us: no fault of the medium.
                self._known.pop(block_hash)
                self._misses += 1
                return False
            except OSError as error:
                self._misses += 1
                self._disable(error)
                return False
            if not is_intact:
                self._corrupt += 1
                self._misses += 1
                self._remove(block_hash)
                return False
            self._known.move_to_end(block_hash)
            self._hits += 1
            return True

    def contains(self, block_hash: BlockHash) -> bool:
        with self._lock:
            return not self._disabled_reason and block_hash in self._known

    def clear(self) -> None:
        with self._lock:
            for block_hash in list(self._known):
                self._remove(block_hash)

    def status(self) -> TierStatus:
        with self._lock:
            return TierStatus(
                self.name,
                len(self._known),
                len(self._known) * self._file_bytes,
                self._capacity_bytes,
                self._hits,
                self._misses,
                self._evictions,
                self._corrupt,
                self._refused,
                self._disabled_reason,
            )

    @property
    def _file_bytes(self) -> int:
        return HEADER.size + self._block_bytes

    def _adopt_files(self) -> None:
        """Takes over whole files, the oldest first, and removes what a killed writer left half done."""
        found = []
        for path in self._folder.glob(f"*/*{TEMPORARY_SUFFIX}"):
            path.unlink(missing_ok=True)
        for path in self._folder.glob(f"*/*{SUFFIX}"):
            state = path.stat()
            if state.st_size == self._file_bytes and _hash_in_name(path) is not None:
                found.append((state.st_mtime_ns, path))
            else:
                path.unlink(missing_ok=True)
        for _, path in sorted(found):
            block_hash = _hash_in_name(path)
            if block_hash is not None:
                self._known[block_hash] = None

    def _make_room(self) -> None:
        while self._known and (len(self._known) + 1) * self._file_bytes > self._capacity_bytes:
            self._remove(next(iter(self._known)))
            self._evictions += 1

    def _write(self, block_hash: BlockHash, payload: memoryview) -> None:
        path = self._path(block_hash)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_suffix(TEMPORARY_SUFFIX)
        header = HEADER.pack(MAGIC, self._block_bytes, self._layout, digest_of(payload))
        try:
            with temporary.open("wb", buffering=0) as file:
                _write_all(file.fileno(), header)
                _write_all(file.fileno(), payload)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _read(self, block_hash: BlockHash, into: memoryview) -> bool:
        with self._path(block_hash).open("rb", buffering=0) as file:
            header = file.read(HEADER.size)
            num_read = 0
            while num_read < into.nbytes and (count := file.readinto(into[num_read:])):
                num_read += count
        if len(header) != HEADER.size or num_read != self._block_bytes:
            return False
        magic, num_bytes, layout, digest = HEADER.unpack(header)
        is_ours: bool = magic == MAGIC and num_bytes == self._block_bytes and layout == self._layout
        return is_ours and digest_of(into) == digest

    def _remove(self, block_hash: BlockHash) -> None:
        self._known.pop(block_hash, None)
        try:
            self._path(block_hash).unlink(missing_ok=True)
        except OSError as error:
            self._disable(error)

    def _path(self, block_hash: BlockHash) -> Path:
        name = block_hash.hex()
        return self._folder / name[:2] / f"{name}{SUFFIX}"

    def _disable(self, error: OSError) -> None:
        self._disabled_reason = f"{self._folder}: {error.strerror or error}"


def _hash_in_name(path: Path) -> BlockHash | None:
    try:
        return BlockHash(bytes.fromhex(path.stem))
    except ValueError:
        return None


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]
