"""The handshake: who I am, what my KV looks like, how I can be reached; and every field in which two workers differ.

A fatal difference refuses the pair at once, by the field's name, instead of failing the first request under load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tandem.v1 import common_pb2, handoff_pb2

from cluster.block_hash import HASH_ALGORITHM
from cluster.identity import Incarnation, WorkerId
from cluster.kv_layout import KvLayout
from kv_transfer.frame import DIGEST_ALGORITHM
from kv_transfer.protocol_limits import IDLE_PING_S

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class HandoffIdentity:
    """One worker's side of a Hello."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: common_pb2.WorkerRole.ValueType
    model_fingerprint: str
    layout: KvLayout
    hash_test_vector: bytes
    host_id: str
    tp_rank: int = 0  # of one whose pool has a part of the heads; ranks of one worker share a pool of all heads
    tp_size: int = 1

    def identity_message(self) -> common_pb2.WorkerIdentity:
        return common_pb2.WorkerIdentity(worker_id=self.worker_id, incarnation=self.incarnation, role=self.role)

    def heads(self) -> handoff_pb2.HeadRange:
        """The KV heads that this worker's pool holds: all of the model's, or those of its rank."""
        return handoff_pb2.HeadRange(first=self.tp_rank * self.layout.num_kv_heads, count=self.layout.num_kv_heads)


def make_hello(
    mine: HandoffIdentity, transports: Sequence[handoff_pb2.TransportOffer], nonce: bytes, max_credit_bytes: int
) -> handoff_pb2.Hello:
    """What a decode worker says first. `nonce` lets connections of this session in at its receiving ends."""
    return handoff_pb2.Hello(
        min_protocol=PROTOCOL_VERSION,
        max_protocol=PROTOCOL_VERSION,
        identity=mine.identity_message(),
        model_fingerprint=mine.model_fingerprint,
        layout=layout_message(mine.layout),
        tp_rank=mine.tp_rank,
        tp_size=mine.tp_size,
        heads=mine.heads(),
        hash_algorithm=HASH_ALGORITHM,
        hash_test_vector=mine.hash_test_vector,
        transports=transports,
        max_credit_bytes=max_credit_bytes,
        session_nonce=nonce,
        digest_algorithm=DIGEST_ALGORITHM,
    )


def compare(mine: HandoffIdentity, hello: handoff_pb2.Hello) -> list[handoff_pb2.Mismatch]:
    """Every field in which the two differ, the fatal ones first."""
    layout, theirs = mine.layout, hello.layout
    has_same_blocks = layout.block_tokens == theirs.block_tokens
    # Blocks of two sizes are gathered on the way (`kv_transfer.shapes`); the vector is a hash over one block of each.
    their_vector = hello.hash_test_vector if has_same_blocks else mine.hash_test_vector
    fields: list[tuple[str, object, object, bool]] = [
        ("model_fingerprint", mine.model_fingerprint, hello.model_fingerprint, True),
        ("layout.num_layers", layout.num_layers, theirs.num_layers, True),
        ("layout.num_kv_heads", layout.num_kv_heads, theirs.num_kv_heads, True),
        ("layout.head_dim", layout.head_dim, theirs.head_dim, True),
        ("layout.dtype", layout.dtype, theirs.dtype, True),
        ("layout.block_tokens", layout.block_tokens, theirs.block_tokens, not _divides(layout, theirs)),
        ("layout.order", layout.order, theirs.order, True),
        # With the number of heads in the layout: the same heads of the same model, however many ranks compute them.
        ("heads.first", mine.heads().first, hello.heads.first, True),
        ("tp_size", mine.tp_size, hello.tp_size, False),
        ("hash_algorithm", HASH_ALGORITHM, hello.hash_algorithm, True),
        ("hash_test_vector", mine.hash_test_vector.hex(), their_vector.hex(), True),
        ("digest_algorithm", DIGEST_ALGORITHM, hello.digest_algorithm, True),
    ]
    mismatches = [
        handoff_pb2.Mismatch(field=field, mine=str(ours), yours=str(yours), fatal=fatal)
        for field, ours, yours, fatal in fields
        if ours != yours
    ]
    cell_bytes = receiver_layout(layout, hello).cell_bytes
    if hello.max_credit_bytes < cell_bytes:  # not even one frame could ever be sent
        needed, said = f"at least {cell_bytes}", str(hello.max_credit_bytes)
        mismatches.append(handoff_pb2.Mismatch(field="max_credit_bytes", mine=needed, yours=said, fatal=True))
    if not hello.min_protocol <= PROTOCOL_VERSION <= hello.max_protocol:
        theirs_range = f"{hello.min_protocol} to {hello.max_protocol}"
        mismatches.insert(
            0,
            handoff_pb2.Mismatch(field="protocol", mine=str(PROTOCOL_VERSION), yours=theirs_range, fatal=True),
        )
    return sorted(mismatches, key=lambda mismatch: not mismatch.fatal)


def _divides(mine: KvLayout, theirs: handoff_pb2.KvLayout) -> bool:
    if mine.has_scales:  # they lie behind each block's values: nothing regroups them on the way
        return False
    smaller, larger = sorted((mine.block_tokens, theirs.block_tokens))
    return smaller > 0 and larger % smaller == 0


def receiver_layout(mine: KvLayout, hello: handoff_pb2.Hello) -> KvLayout:
    """The pool of a decode worker whose Hello was not refused: it may differ from mine in the size of its blocks."""
    return replace(mine, block_tokens=hello.layout.block_tokens)


def is_refused(mismatches: Sequence[handoff_pb2.Mismatch]) -> bool:
    return any(mismatch.fatal for mismatch in mismatches)


def make_ack(
    mine: HandoffIdentity,
    mismatches: Sequence[handoff_pb2.Mismatch],
    transport: str = "",
    transport_reason: str = "",
    measured_gb_per_s: float = 0.0,
) -> handoff_pb2.HelloAck:
    """A prefill worker's answer."""
    return handoff_pb2.HelloAck(
        protocol=PROTOCOL_VERSION,
        identity=mine.identity_message(),
        mismatches=mismatches,
        layout=layout_message(mine.layout),
        transport=transport,
        transport_reason=transport_reason,
        measured_gb_per_s=measured_gb_per_s,
        tp_rank=mine.tp_rank,
        tp_size=mine.tp_size,
        heads=mine.heads(),
        accepted=bool(transport) and not is_refused(mismatches),
        idle_ping_ms=int(IDLE_PING_S * 1000),
    )


def usable_offers(
    offers: Sequence[handoff_pb2.TransportOffer],
    supported: Sequence[str],
    host_id: str,
    needs_host: Callable[[str], bool],
) -> list[handoff_pb2.TransportOffer]:
    """The offers that can be tried, in the receiver's order: known here, and on one host where they share memory."""
    return [
        offer
        for offer in offers
        if offer.name in supported and (not needs_host(offer.name) or offer.host_id == host_id)
    ]


def layout_message(layout: KvLayout) -> handoff_pb2.KvLayout:
    return handoff_pb2.KvLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        block_tokens=layout.block_tokens,
        order=layout.order,
    )
