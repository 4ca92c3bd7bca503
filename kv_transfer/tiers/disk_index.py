"""Which block files a shared folder has, as one process last saw it: asked without touching the disk.

A folder of files changes its own time when an entry comes or goes, so a look costs one `stat` for each folder and lists
only those that changed. A file's time says when a block was last used, by anybody: it is read when a file is found and
again before it is removed.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from cluster.block_hash import HASH_BYTES
from cluster.identity import BlockHash
from kv_transfer.tiers.disk_file import TEMPORARY_SUFFIX, remove_abandoned

SUFFIX = ".kv"
# A folder's time is as coarse as its file system's clock: one that changed this recently may have changed again.
RACY_NS = 2_000_000_000


@dataclass(slots=True)
class _Shard:
    """One folder of block files."""

    listed_ns: int = -1  # its time when it was last listed; -1: must be listed again
    paths: set[Path] = field(default_factory=set)


@dataclass(slots=True)
class _File:
    size: int
    used_ns: int  # as this process last saw it


class DiskIndex:
    """Safe from any thread. `refresh`, `remove` and `remove_oldest` do I/O, nothing else does."""

    def __init__(self, folder: Path, layout: str) -> None:
        self._folder = folder
        self._own = folder / layout
        self._shards: dict[Path, _Shard] = {}
        self._files: OrderedDict[Path, _File] = OrderedDict()  # all layouts', least recently used first
        self._blocks: dict[BlockHash, None] = {}  # this layout's
        self._came: dict[BlockHash, None] = {}
        self._went: dict[BlockHash, None] = {}
        self._size_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def size_bytes(self) -> int:
        """Of all block files in the folder, other layouts' too."""
        return self._size_bytes

    def contains(self, block_hash: BlockHash) -> bool:
        return block_hash in self._blocks

    def hashes(self) -> list[BlockHash]:
        with self._lock:
            return list(self._blocks)

    def path_of(self, block_hash: BlockHash) -> Path:
        name = block_hash.hex()
        return self._own / name[:2] / f"{name}{SUFFIX}"

    def take_changes(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """The blocks of this layout that came and that went since the last call."""
        with self._lock:
            came, went = list(self._came), list(self._went)
            self._came.clear()
            self._went.clear()
        return came, went

    def add(self, path: Path, size: int) -> None:
        """A file that this process wrote."""
        with self._lock:
            self._shards.setdefault(path.parent, _Shard()).paths.add(path)
            self._enter(path, _File(size, time.time_ns()))

    def touch(self, path: Path) -> None:
        """A block was used, and its file's time says so."""
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                file.used_ns = time.time_ns()
                self._files.move_to_end(path)

    def forget(self, path: Path) -> None:
        """The file is not there any more."""
        with self._lock:
            self._leave(path)

    def remove(self, path: Path) -> None:
        """Raises `OSError`."""
        path.unlink(missing_ok=True)
        self.forget(path)

    def remove_oldest(self) -> bool:
        """Removes the file that nobody has used for longest. False: there is none. Raises `OSError`."""
        for _ in range(len(self._files) + 1):
            with self._lock:
                path, file = next(iter(self._files.items()), (None, None))
            if path is None or file is None:
                return False
            try:
                used_ns = path.stat().st_mtime_ns
            except FileNotFoundError:
                self.forget(path)
                return True
            if used_ns <= file.used_ns:
                self.remove(path)
                return True
            with self._lock:  # somebody else used it meanwhile
                if path in self._files:
                    file.used_ns = used_ns
                    self._files.move_to_end(path)
        return False

    def refresh(self) -> None:
        """Finds what came and went in the folder. Raises `OSError`."""
        found: list[tuple[Path, _File]] = []
        seen: set[Path] = set()
        for folder in self._shard_folders():
            seen.add(folder)
            self._look_into(folder, found)
        for folder in set(self._shards) - seen:
            self._list(folder, self._shards.pop(folder), [], set())
        with self._lock:
            for path, file in sorted(found, key=lambda entry: entry[1].used_ns):
                self._enter(path, file)

    def _shard_folders(self) -> list[Path]:
        layouts = [entry.path for entry in os.scandir(self._folder) if entry.is_dir(follow_symlinks=False)]
        return [
            Path(entry.path)
            for layout in layouts
            for entry in _entries(Path(layout))
            if entry.is_dir(follow_symlinks=False)
        ]

    def _look_into(self, folder: Path, found: list[tuple[Path, _File]]) -> None:
        shard = self._shards.setdefault(folder, _Shard())
        try:
            changed_ns = folder.stat().st_mtime_ns
        except FileNotFoundError:
            changed_ns = -1
        if changed_ns == shard.listed_ns != -1:
            return
        is_racy = time.time_ns() - changed_ns < RACY_NS
        paths: set[Path] = set()
        for entry in _entries(folder):
            path = folder / entry.name
            if entry.name.endswith(TEMPORARY_SUFFIX):
                remove_abandoned(path)
            elif _hash_in_name(path) is not None:
                paths.add(path)
        self._list(folder, shard, found, paths)
        shard.listed_ns = -1 if is_racy else changed_ns

    def _list(self, folder: Path, shard: _Shard, found: list[tuple[Path, _File]], paths: set[Path]) -> None:
        """The shard has these files now."""
        for path in paths:
            if path in self._files:
                continue
            try:
                state = path.stat()
            except FileNotFoundError:
                continue
            found.append((path, _File(state.st_size, state.st_mtime_ns)))
        with self._lock:
            for path in shard.paths - paths:
                self._leave(path)
        shard.paths = paths

    # --- under the lock -----------------------------------------------------------------------------------------------

    def _enter(self, path: Path, file: _File) -> None:
        self._leave(path)
        self._files[path] = file
        self._size_bytes += file.size
        block_hash = _hash_in_name(path)
        if block_hash is not None and path.parent.parent == self._own:
            self._blocks[block_hash] = None
            if self._went.pop(block_hash, 0) == 0:
                self._came[block_hash] = None

    def _leave(self, path: Path) -> None:
        file = self._files.pop(path, None)
        if file is None:
            return
        self._size_bytes -= file.size
        block_hash = _hash_in_name(path)
        if block_hash is not None and path.parent.parent == self._own:
            self._blocks.pop(block_hash, None)
            if self._came.pop(block_hash, 0) == 0:
                self._went[block_hash] = None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except FileNotFoundError:  # removed while we look
        return []


def _hash_in_name(path: Path) -> BlockHash | None:
    name = path.name
    if not name.endswith(SUFFIX) or len(name) != 2 * HASH_BYTES + len(SUFFIX):
        return None
    try:
        return BlockHash(bytes.fromhex(name.removesuffix(SUFFIX)))
    except ValueError:
        return None
