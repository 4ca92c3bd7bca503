"""One block in one file: readable only whole and verified, written under another name and renamed.

    header   magic, payload bytes, layout, digest of the payload, proof bytes
    proof    the hash before the block and its token ids
    payload  the block as it lies in a pool

A writer holds a lock on its unfinished file, so that whoever tidies up can tell a live writer's from a dead one's.
"""

from __future__ import annotations

import enum
import fcntl
import os
import secrets
import struct
from pathlib import Path

from kv_transfer.frame import DIGEST_BYTES, digest_of
from kv_transfer.tiers.host_tier import KeptBlock

MAGIC = b"TKV2"
LAYOUT_BYTES = 16
HEADER = struct.Struct(f"<4sQ{LAYOUT_BYTES}s{DIGEST_BYTES}sI")
TEMPORARY_SUFFIX = ".tmp"
FILE_MODE = 0o600


class ReadResult(enum.Enum):
    INTACT = "intact"
    OTHER = "other"  # a block of the same hash that is not this one
    CORRUPT = "corrupt"


def file_bytes(block_bytes: int, proof_bytes: int) -> int:
    return HEADER.size + proof_bytes + block_bytes


def write_block(path: Path, layout: bytes, block: KeptBlock) -> None:
    """Raises `OSError`; then no part of the block is under `path`, nor beside it."""
    header = HEADER.pack(MAGIC, block.payload.nbytes, layout, block.digest, len(block.proof))
    temporary = path.with_name(f"{path.stem}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write_all(descriptor, header + block.proof)
        _write_all(descriptor, block.payload)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def read_block(path: Path, layout: bytes, proof: bytes, into: memoryview) -> ReadResult:
    """The payload in `into`, which holds nothing of use unless it is INTACT. Raises `OSError`."""
    with path.open("rb", buffering=0) as file:
        head = file.read(HEADER.size + len(proof))
        if len(head) != HEADER.size + len(proof):
            return ReadResult.CORRUPT
        magic, num_bytes, file_layout, digest, proof_bytes = HEADER.unpack_from(head)
        if magic != MAGIC or num_bytes != into.nbytes or file_layout != layout or proof_bytes != len(proof):
            return ReadResult.CORRUPT
        if head[HEADER.size :] != proof:
            return ReadResult.OTHER
        num_read = 0
        while num_read < into.nbytes and (count := file.readinto(into[num_read:])):
            num_read += count
    is_intact = num_read == into.nbytes and digest_of([into]) == digest
    return ReadResult.INTACT if is_intact else ReadResult.CORRUPT


def remove_abandoned(path: Path) -> bool:
    """Removes an unfinished file unless its writer lives."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]
