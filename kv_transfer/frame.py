"""The header in front of a frame's bytes: fixed size, checked before anything is believed.

0   magic "TKVF"   4         32  first_layer, num_layers   2 x u16    56  digest of the payload   16
4   version        u16       36  first_head, num_heads     2 x u16    72  checksum of all before  8
6   src_rank       u16       40  first_block, num_blocks   2 x u32
8   transfer_id    16        48  num_bytes                 u64
24  epoch, seq     2 x u32
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import xxhash

from cluster.identity import TransferId
from kv_transfer.transport import FrameHeader

MAGIC = b"TKVF"
VERSION = 2
_FIELDS = struct.Struct("<4sHH16sIIHHHHIIQ16s")
_CHECKSUM_BYTES = 8
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES
DIGEST_ALGORITHM = "xxh3-128"
DIGEST_BYTES = 16
# No transport of ours sends a larger frame: a peer that announces one is not believed, nor read.
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024


class BadFrame(Exception):
    """The bytes are no frame header of ours: the connection cannot be trusted any more."""


# Takes runs of bytes one after the other by `update`; what `digest` gives then is what `digest_of` gives for all.
RunningDigest = xxhash.xxh3_128


def digest_of(runs: Iterable[memoryview]) -> bytes:
    """xxh3-128 of the runs' bytes, one after the other, read where they lie."""
    state = RunningDigest()
    for run in runs:
        state.update(run)
    return state.digest()


def with_digest(header: FrameHeader, payload: Sequence[memoryview]) -> FrameHeader:
    """The header with the payload's digest, which is read for it unless the header has one."""
    return header if header.digest else header._replace(digest=digest_of(payload))


def root_digest(digests: list[bytes]) -> bytes:
    """xxh3-128 over the frames' digests in the order of their sequence numbers."""
    return xxhash.xxh3_128_digest(b"".join(digests))


def pack_header(header: FrameHeader, digest: bytes | None = None) -> bytes:
    """`digest`: what goes into it in place of the header's own."""
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        header.src_rank,
        header.transfer_id,
        header.epoch,
        header.seq,
        header.first_layer,
        header.num_layers,
        header.first_head,
        header.num_heads,
        header.first_block,
        header.num_blocks,
        header.num_bytes,
        header.digest if digest is None else digest,
    )
    return fields + xxhash.xxh3_64_digest(fields)


def parse_header(data: bytes | bytearray | memoryview) -> FrameHeader:
    """The header in exactly HEADER_BYTES bytes. Raises `BadFrame`."""
    if len(data) != HEADER_BYTES:
        raise BadFrame(f"a header has {HEADER_BYTES} bytes, not {len(data)}")
    fields = bytes(data[: _FIELDS.size])
    if xxhash.xxh3_64_digest(fields) != bytes(data[_FIELDS.size :]):
        raise BadFrame("the header's checksum is wrong")
    magic, version, rank, transfer_id, epoch, seq, layer, layers, head, heads, block, blocks, num_bytes, digest = (
        _FIELDS.unpack(fields)
    )
    if magic != MAGIC or version != VERSION:
        raise BadFrame(f"magic {magic!r} version {version}, expected {MAGIC!r} version {VERSION}")
    if layers == 0 or blocks == 0 or num_bytes == 0:
        raise BadFrame("the frame is empty")
    if num_bytes > MAX_PAYLOAD_BYTES:
        raise BadFrame(f"a payload of {num_bytes} bytes is larger than {MAX_PAYLOAD_BYTES}")
    return FrameHeader(
        transfer_id=TransferId(transfer_id),
        epoch=epoch,
        src_rank=rank,
        seq=seq,
        first_layer=layer,
        num_layers=layers,
        first_block=block,
        num_blocks=blocks,
        num_bytes=num_bytes,
        digest=digest,
        first_head=head,
        num_heads=heads,
    )
