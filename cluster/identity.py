"""Ids as distinct types, and how the random ones are made.

A `WorkerId` is a stable name given by an operator or launcher. An `Incarnation` is random for each process start: a
restart on the same address is a different peer. A `TransferId` is made by the decode worker and never taken from a
client.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple, NewType

WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", str)
RequestId = NewType("RequestId", str)
TransferId = NewType("TransferId", bytes)
Tenant = NewType("Tenant", str)
BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)

TRANSFER_ID_BYTES = 16


class BlockRef(NamedTuple):
    """A KV block at one generation: once the block is freed the generation moves on and the reference is stale."""

    block: BlockId
    generation: int


def new_incarnation() -> Incarnation:
    """A random name of this process start, 16 hexadecimal digits."""
    return Incarnation(secrets.token_hex(8))


def new_transfer_id() -> TransferId:
    """128 random bits: no other party can guess a live transfer."""
    return TransferId(secrets.token_bytes(TRANSFER_ID_BYTES))


def new_request_id(prefix: str) -> RequestId:
    """A server-made request id such as `chatcmpl-3f0c...`."""
    return RequestId(f"{prefix}-{secrets.token_hex(12)}")
