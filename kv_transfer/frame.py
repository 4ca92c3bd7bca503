"""The header in front of a frame's bytes: fixed size, checked before anything is believed.

0   magic "TKVF"      4    first_layer, num_layers   2 x u16
4   version           u16  first_block, num_blocks   2 x u32
6   src_rank          u16  num_bytes                 u64
8   transfer_id       16   digest of the payload     16
24  epoch, seq        2 x u32                        checksum of all before  8
"""

from __future__ import annotations

import struct

import xxhash

from cluster.identity import TransferId
from kv_transfer.transport import FrameHeader

MAGIC = b"TKVF"
VERSION = 1
_FIELDS = struct.Struct("<4sHH16sIIHHIIQ16s")
_CHECKSUM_BYTES = 8
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES
DIGEST_ALGORITHM = "xxh3-128"


class BadFrame(Exception):
    """The bytes are no frame header of ours: the connection cannot be trusted any more."""


def digest_of(runs: list[memoryview]) -> bytes:
    """xxh3-128 of the runs' bytes, one after the other, read where they lie."""
    state = xxhash.xxh3_128()
    for run in runs:
        state.update(run)
    return state.digest()


def root_digest(digests: list[bytes]) -> bytes:
    """xxh3-128 over the frames' digests in the order of their sequence numbers."""
    return xxhash.xxh3_128_digest(b"".join(digests))


def pack_header(header: FrameHeader) -> bytes:
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        header.src_rank,
        header.transfer_id,
        header.epoch,
        header.seq,
        header.first_layer,
        header.num_layers,
        header.first_block,
        header.num_blocks,
        header.num_bytes,
        header.digest,
    )
    return fields + xxhash.xxh3_64_digest(fields)


def parse_header(data: bytes | bytearray | memoryview) -> FrameHeader:
    """The header in exactly HEADER_BYTES bytes. Raises `BadFrame`."""
    if len(data) != HEADER_BYTES:
        raise BadFrame(f"a header has {HEADER_BYTES} bytes, not {len(data)}")
    fields = bytes(data[: _FIELDS.size])
    if xxhash.xxh3_64_digest(fields) != bytes(data[_FIELDS.size :]):
        raise BadFrame("the header's checksum is wrong")
    magic, version, rank, transfer_id, epoch, seq, *place, num_bytes, digest = _FIELDS.unpack(fields)
    layer, layers, block, blocks = place
    if magic != MAGIC or version != VERSION:
        raise BadFrame(f"magic {magic!r} version {version}, expected {MAGIC!r} version {VERSION}")
    if layers == 0 or blocks == 0:
        raise BadFrame("the frame is empty")
    return FrameHeader(TransferId(transfer_id), epoch, rank, seq, layer, layers, block, blocks, num_bytes, digest)
