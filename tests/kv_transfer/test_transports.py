"""KV arrives whole and in its place over every transport, and nothing that is not KV does any harm."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tandem.v1 import handoff_pb2

from cluster.errors import KvTransferFailed
from cluster.identity import TransferId
from kv_transfer.endpoints import ReceivingEnds
from kv_transfer.frame import HEADER_BYTES, BadFrame, digest_of, pack_header, parse_header
from kv_transfer.landing_table import LandingTable
from kv_transfer.link_choice import LinkWishes, connect_best
from kv_transfer.link_probe import measure_link
from kv_transfer.transport import FrameHeader, Sender, SendTicket
from kv_transfer.transports.registry import SENDERS, connect
from tests.kv_transfer.all_transports import NETWORK_TRANSPORTS, TRANSPORTS, needs_library
from tests.kv_transfer.oracle import LAYOUT, Link, assert_holds, make_pools, refs, wait_until, write_layer


def is_complete(table: LandingTable, transfer_id: TransferId, epoch: int = 1) -> bool:
    arrived = table.arrived(transfer_id, epoch)
    return arrived is not None and arrived.is_complete


# Only the receiver writes into the pool.
COPYING_TRANSPORTS = ("shm", "tcp")


class Eager:
    """A sender that moves a frame on as soon as it is posted, as the pusher's thread does."""

    def __init__(self, sender: Sender) -> None:
        self.name, self.cancel_guarantee = sender.name, sender.cancel_guarantee
        self.poll, self.close, self.wrapped = sender.poll, sender.close, sender
        self.count_verified = sender.count_verified

    def push(self, header: FrameHeader, payload: Sequence[memoryview]) -> SendTicket:
        ticket = self.wrapped.push(header, payload)
        deadline = time.monotonic() + 60
        while not ticket.done and time.monotonic() < deadline:
            self.wrapped.poll()
        return ticket


class Rig:
    """A receiver of one transport in this process, and connections to it."""

    def __init__(self, transport: str, folder: Path) -> None:
        self.transport = transport
        self.source, self.target = make_pools()
        self.table = LandingTable(self.target)
        self.ends = ReceivingEnds([transport], folder, "d0", self.table, "127.0.0.1", self.target)
        self.nonce = self.ends.new_session("p0")
        self.links: list[Link] = []

    def sender(self, nonce: bytes | None = None) -> Sender:
        (offer,) = self.ends.offers()
        return Eager(SENDERS[self.transport](offer.address, nonce or self.nonce, 0))

    def link(self) -> Link:
        self.links.append(Link.over(self.sender(), self.source, self.target, self.table))
        return self.links[-1]

    def close(self) -> None:
        for link in self.links:
            link.pusher.close()
        self.ends.close()
        self.target.close()


@pytest.fixture(scope="module", autouse=True)
def quick_collection() -> Iterator[None]:
    """What was imported before is not looked through at each count of descriptors."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=TRANSPORTS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    needs_library(request.param)
    gc.collect()  # pools that earlier tests dropped hold descriptors
    threads = threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    made = Rig(request.param, tmp_path)
    yield made
    made.close()
    gc.collect()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 160, 1000])
@pytest.mark.parametrize("chunk", [16, 100, 4096])
def test_kv16_oracle_kv_arrives_in_its_place_whatever_the_chunks(rig: Rig, num_tokens: int, chunk: int) -> None:
    link, num_blocks = rig.link(), -(-num_tokens // 16)
    source, target = refs(*range(num_blocks)), refs(*reversed(range(num_blocks)))
    session, outcome = link.open(1, source, target, num_tokens)
    link.prefill(session, source, num_tokens, chunk, prompt=7)
    wait_until(lambda: bool(outcome.sealed), "sealed")
    (summary,) = outcome.sealed
    arrived_id = TransferId((1).to_bytes(16, "big"))
    wait_until(lambda: is_complete(rig.table, arrived_id), "all cells arrived")
    arrived = rig.table.arrived(arrived_id, 1)
    assert arrived is not None
    assert (arrived.num_frames, arrived.num_bytes, arrived.root_digest) == (
        summary.num_frames,
        summary.num_bytes,
        summary.root_digest,
    )
    assert_holds(rig.target, target, 7)


@pytest.mark.parametrize("have_blocks", [0, 1, 3, 6, 7])
@pytest.mark.parametrize("cached_blocks", [0, 2, 6])
def test_kv2_prefix_that_the_receiver_holds_is_not_sent_and_not_touched(
    rig: Rig, have_blocks: int, cached_blocks: int
) -> None:
    num_tokens = 7 * 16 + 5
    link, source = rig.link(), refs(*range(10, 18))
    target = refs(*range(20, 28 - have_blocks))
    before = rig.target.tensor[28 - have_blocks :].clone()
    session, outcome = link.open(2, source, target, num_tokens, have=16 * have_blocks)
    link.prefill(session, source, num_tokens, 48, prompt=3, cached=16 * cached_blocks)
    wait_until(lambda: bool(outcome.sealed), "sealed")
    arrived_id = TransferId((2).to_bytes(16, "big"))
    wait_until(lambda: is_complete(rig.table, arrived_id, 1), "arrived")
    assert_holds(rig.target, target, 3, first_block=have_blocks)
    np.testing.assert_array_equal(rig.target.tensor[28 - have_blocks :].numpy(), before.numpy())


def test_kv73_thousands_of_small_frames_pass_although_nobody_reads_the_answers(rig: Rig) -> None:
    sender, key = rig.sender(), TransferId((1).to_bytes(16, "big"))
    rig.table.open(key, 1, refs(5), 0, lambda *_: None)
    header, payload = frame(rig, 1, 7, 0, 0, prompt=9)
    for _ in range(3000):
        sender.push(header, payload)
    sender.push(*frame(rig, 1, 1, 0, 0, prompt=4))
    wait_until(lambda: is_complete(rig.table, key), "the last one arrived")
    assert rig.table.counts().stale_frames == 3000
    sender.close()


def test_many_transfers_share_a_connection(rig: Rig) -> None:
    link, chance = rig.link(), random.Random(5)
    free = list(range(64))
    chance.shuffle(free)
    plans = []
    for transfer in range(10, 26):
        blocks = refs(*[free.pop() for _ in range(4)])
        session, outcome = link.open(transfer, blocks, blocks, 60)
        plans.append((transfer, blocks, session, outcome))
    for transfer, blocks, session, _ in plans:
        link.prefill(session, blocks, 60, 16, prompt=transfer)
    wait_until(lambda: all(outcome.sealed for *_, outcome in plans), "all sealed")
    for transfer, blocks, _, _ in plans:
        arrived_id = TransferId(transfer.to_bytes(16, "big"))
        wait_until(partial(is_complete, rig.table, arrived_id), "arrived")
        assert_holds(rig.target, blocks, transfer)


def test_kv52_blocks_that_lie_together_on_one_side_only_arrive_in_their_place(rig: Rig) -> None:
    """Whole blocks in runs that the two sides cut differently, many at once and from all over a registered pool."""
    rig.source._array[:] = np.random.default_rng(3).integers(0, 256, rig.source.size_bytes, np.uint8)
    (offer,) = rig.ends.offers()
    sender = connect(rig.transport, offer.address, rig.nonce, 0, rig.source)
    frames = []
    for number in range(12):
        source = (5 * number, 5 * number + 1, (5 * number + 17) % 64)  # two together, then one
        target = (number, 16 + 2 * number, 17 + 2 * number)  # one, then two together
        key = TransferId((100 + number).to_bytes(16, "big"))
        rig.table.open(key, 1, refs(*target), 0, lambda *_: None)
        payload = rig.source.runs(source, 0, LAYOUT.num_layers)
        num_bytes, digest = 3 * LAYOUT.block_bytes, digest_of(payload)
        sender.push(FrameHeader(key, 1, 0, 0, 0, LAYOUT.num_layers, 0, 3, num_bytes, digest), payload)
        frames.append((key, source, target))

    def have_all_arrived() -> bool:
        sender.poll()
        return all(is_complete(rig.table, key) for key, *_ in frames)

    wait_until(have_all_arrived, "arrived")
    for _, source, target in frames:
        np.testing.assert_array_equal(rig.target.save_blocks(target), rig.source.save_blocks(source))
    sender.close()


def frame(
    rig: Rig, transfer: int, epoch: int, seq: int, block: int, prompt: int
) -> tuple[FrameHeader, list[memoryview]]:
    for layer in range(LAYOUT.num_layers):
        write_layer(rig.source, refs(*range(64)), prompt, layer, block, block + 1)
    payload = [rig.source.run(block, 0, LAYOUT.num_layers)]
    header = FrameHeader(
        TransferId(transfer.to_bytes(16, "big")), epoch, 0, seq, 0, LAYOUT.num_layers, block, 1, payload[0].nbytes,
        digest_of(payload),
    )  # fmt: skip
    return header, payload


def test_kv3_a_late_frame_never_touches_blocks_that_were_given_away(rig: Rig) -> None:
    sender, silent = rig.sender(), threading.Event()
    first_id = TransferId((1).to_bytes(16, "big"))
    rig.table.open(first_id, 1, refs(5), 0, lambda *_: None)
    rig.table.fence(first_id, 1, silent.set)
    assert silent.is_set()
    second_id = TransferId((2).to_bytes(16, "big"))
    rig.table.open(second_id, 1, refs(5), 0, lambda *_: None)
    sender.push(*frame(rig, 1, 1, 0, 0, prompt=99))
    sender.push(*frame(rig, 2, 1, 0, 0, prompt=4))
    wait_until(lambda: is_complete(rig.table, second_id, 1), "second arrived")
    assert_holds(rig.target, refs(5), 4)
    assert rig.table.counts().stale_frames == 1
    sender.close()


def test_kv49_a_frame_of_an_older_epoch_is_dropped(rig: Rig) -> None:
    sender, key = rig.sender(), TransferId((1).to_bytes(16, "big"))
    rig.table.open(key, 2, refs(5), 0, lambda *_: None)
    sender.push(*frame(rig, 1, 1, 0, 0, prompt=99))
    sender.push(*frame(rig, 1, 2, 0, 0, prompt=4))
    wait_until(lambda: is_complete(rig.table, key, 2), "arrived")
    assert_holds(rig.target, refs(5), 4)
    sender.close()


def test_a_duplicate_changes_nothing_once_its_cells_have_verified(rig: Rig) -> None:
    sender, key = rig.sender(), TransferId((1).to_bytes(16, "big"))
    rig.table.open(key, 1, refs(5), 0, lambda *_: None)
    sender.push(*frame(rig, 1, 1, 0, 0, prompt=4))
    wait_until(lambda: is_complete(rig.table, key, 1), "arrived")
    # The duplicate carries other bytes under a digest that fits them.
    sender.push(*frame(rig, 1, 1, 1, 0, prompt=5))
    wait_until(lambda: rig.table.counts().refused_frames == 1, "refused")
    assert_holds(rig.target, refs(5), 4)
    sender.close()


@pytest.mark.parametrize(
    "change",
    [
        {"first_block": 1},
        {"num_blocks": 2},
        {"first_layer": 1},
        {"num_layers": 5},
        {"num_bytes": LAYOUT.block_bytes // 2},
        {"first_block": 2**31},
        {"first_layer": 60_000},
    ],
    ids=str,
)
def test_f25_a_header_outside_the_reservation_writes_nothing(rig: Rig, change: dict[str, int]) -> None:
    sender, key = rig.sender(), TransferId((1).to_bytes(16, "big"))
    rig.table.open(key, 1, refs(5), 0, lambda *_: None)
    before = rig.target.tensor.clone()
    header, payload = frame(rig, 1, 1, 0, 0, prompt=9)
    fields = {name: getattr(header, name) for name in FrameHeader._fields} | change
    changed = FrameHeader(**fields)
    sender.push(changed, [payload[0][: changed.num_bytes]])
    wait_until(lambda: rig.table.counts().refused_frames == 1, "refused")
    np.testing.assert_array_equal(rig.target.tensor.numpy(), before.numpy())
    sender.close()


@pytest.mark.parametrize("position", range(0, HEADER_BYTES, 5))
def test_f25_a_bit_flipped_in_the_header_is_found(position: int) -> None:
    header = FrameHeader(TransferId(bytes(range(16))), 3, 0, 7, 1, 2, 4, 5, 600, bytes(16))
    data = bytearray(pack_header(header))
    assert parse_header(data) == header
    data[position] ^= 0x10
    with pytest.raises(BadFrame):
        parse_header(data)


def test_f25_a_bit_flipped_in_the_payload_is_found_and_can_be_sent_again(rig: Rig) -> None:
    sender, key = rig.sender(), TransferId((1).to_bytes(16, "big"))
    rig.table.open(key, 1, refs(5), 0, lambda *_: None)
    header, payload = frame(rig, 1, 1, 0, 0, prompt=4)
    torn = bytearray(payload[0])
    torn[1234] ^= 1
    sender.push(header, [memoryview(torn)])
    wait_until(lambda: rig.table.counts().bad_digests == 1, "found")
    arrived = rig.table.arrived(key, 1)
    assert arrived is not None
    assert not arrived.is_complete
    assert arrived.num_complete_blocks == 0
    sender.push(*frame(rig, 1, 1, 1, 0, prompt=4))
    wait_until(lambda: is_complete(rig.table, key, 1), "sent again")
    assert_holds(rig.target, refs(5), 4)
    sender.close()


def test_a_connection_that_breaks_in_a_frame_verifies_nothing_and_unpins(rig: Rig) -> None:
    sender, key, silent = rig.sender(), TransferId((1).to_bytes(16, "big")), threading.Event()
    rig.table.open(key, 1, refs(5), 0, lambda *_: None)
    header, payload = frame(rig, 1, 1, 0, 0, prompt=4)
    connection = sender.wrapped._connection  # type: ignore[attr-defined]  # half a message is what no sender would send
    begun = {
        "tcp": pack_header(header) + bytes(payload[0][:100]),
        "shm": pack_header(header) + b"\0\0\0",
        "shm-direct": b"A" + pack_header(header),  # granted, and never written
        "ucx": pack_header(header),
        "nixl": pack_header(header),
    }
    connection.sendall(begun[rig.transport])
    sender.close()
    rig.table.fence(key, 1, silent.set)
    wait_until(silent.is_set, "silent")
    assert rig.table.counts().live == 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04cposix\nsystem\n" + bytes(100),
        os.urandom(300),
        b"\x16\x03\x01" + bytes(60),
    ],
    ids=["nothing", "http", "pickle", "noise", "tls"],
)
def test_sb30_kv74_garbage_on_the_port_is_refused_and_the_next_peer_is_served(rig: Rig, garbage: bytes) -> None:
    (offer,) = rig.ends.offers()
    kind = socket.AF_INET if rig.transport in NETWORK_TRANSPORTS else socket.AF_UNIX
    host, _, port = offer.address.rpartition(":")
    with socket.socket(kind, socket.SOCK_STREAM) as connection:
        connection.connect(offer.address if kind is socket.AF_UNIX else (host, int(port)))
        connection.settimeout(10)
        # The other side may have closed before we have said everything.
        with contextlib.suppress(OSError):
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    test_a_duplicate_changes_nothing_once_its_cells_have_verified(rig)


def test_a_wrong_or_revoked_nonce_is_refused(rig: Rig) -> None:
    with pytest.raises(KvTransferFailed):
        rig.sender(bytes(32))
    rig.ends.gate.end_session(rig.nonce)
    with pytest.raises(KvTransferFailed):
        rig.sender()


def test_cancel_stops_posting_and_tells_when_nothing_is_sent_any_more(rig: Rig) -> None:
    link, source, drained = rig.link(), refs(*range(8)), threading.Event()
    session, outcome = link.open(1, source, refs(*range(8)), 128)
    session.blocks_allocated(source, 0)
    session.chunk_started(0, 64)
    session.layer_written(LAYOUT.num_layers - 1)
    session.cancel(lambda _: drained.set())
    wait_until(drained.is_set, "drained")
    frames = rig.table.counts().frames
    session.layer_written(LAYOUT.num_layers - 1)
    again = threading.Event()
    session.cancel(lambda _: again.set())
    wait_until(again.is_set, "drained again")
    assert rig.table.counts().frames in (frames, frames + 1)
    assert outcome.sealed == []


def test_credit_bounds_what_is_posted(rig: Rig) -> None:
    link, source = rig.link(), refs(*range(4))
    session, outcome = link.open(1, source, refs(*range(4)), 64)
    limited = link.pusher.open(
        type(session.request)(TransferId((1).to_bytes(16, "big")), 1, 64, 0, outcome.callbacks(), LAYOUT.block_bytes)
    )
    link.prefill(limited, source, 64, 16, prompt=2)
    wait_until(lambda: rig.table.counts().num_bytes == LAYOUT.block_bytes, "one block's worth")
    assert outcome.sealed == []
    limited.add_credit(10 * LAYOUT.block_bytes)
    wait_until(lambda: bool(outcome.sealed), "sealed")


def test_the_best_link_is_measured_and_says_why(rig: Rig) -> None:
    hello = handoff_pb2.Hello(transports=rig.ends.offers(), session_nonce=rig.nonce)
    chosen = connect_best(hello, LinkWishes(TRANSPORTS))
    assert chosen.sender.name == rig.transport
    assert chosen.costs.bytes_per_s > 1e7
    assert "receiver's choice" in chosen.reason
    chosen.sender.close()
    with pytest.raises(KvTransferFailed, match="min_bandwidth"):
        connect_best(hello, LinkWishes(TRANSPORTS, min_bytes_per_s=1e15))
    with pytest.raises(KvTransferFailed, match="none of the offers"):
        connect_best(hello, LinkWishes(("carrier-pigeon",)))
    assert rig.table.counts().stale_frames == 0


def test_kv40_a_link_that_spoils_what_it_moves_is_passed_over(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.link_probe.digest_of", lambda runs: bytes(byte ^ 1 for byte in digest_of(runs)))
    hello = handoff_pb2.Hello(transports=rig.ends.offers(), session_nonce=rig.nonce)
    with pytest.raises(KvTransferFailed, match="spoils what it moves: 0 of 1"):
        connect_best(hello, LinkWishes(TRANSPORTS))


def test_probe_frames_never_reach_the_landing_table(rig: Rig) -> None:
    sender = rig.sender()
    measure_link(sender)
    counts = rig.table.counts()
    assert (counts.frames, counts.stale_frames, counts.refused_frames) == (0, 0, 0)
    sender.close()


def test_kv38_a_session_that_ends_breaks_its_connections_and_says_when_nothing_can_land(rig: Rig) -> None:
    """A one-sided writer is asked to close; where the receiver copies, its silence needs nobody else."""
    silent = threading.Event()
    sender = rig.sender()
    rig.ends.gate.end_session(rig.nonce, silent.set)
    if rig.transport in COPYING_TRANSPORTS:
        assert silent.wait(60)
    else:
        assert not silent.wait(0.2)
    sender.close()
    assert silent.wait(60)
    with pytest.raises(KvTransferFailed):
        rig.sender()


def test_kv38_a_session_without_connections_is_silent_at_once(rig: Rig) -> None:
    silent = threading.Event()
    rig.ends.gate.end_session(rig.nonce, silent.set)
    assert silent.is_set()
