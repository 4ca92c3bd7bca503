"""Granted frames: what a library writes from lives until it is written, and lies in memory that it can look up."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from cluster.byte_runs import address_of
from cluster.errors import KvTransferFailed
from cluster.identity import TransferId
from engine.kv_memory import KvMemory
from kv_transfer.frame import digest_of
from kv_transfer.landing_table import LandingTable
from kv_transfer.transport import FrameHeader
from kv_transfer.transports import granted
from kv_transfer.transports.connection_gate import ConnectionGate
from kv_transfer.transports.granted import GrantedReceiver, GrantedSender, GrantedTicket, Place
from kv_transfer.transports.nixl import NixlLanding, NixlWriting
from tests.kv_transfer.all_transports import needs_library
from tests.kv_transfer.oracle import LAYOUT, make_pools, refs, wait_until

NONCE = bytes(range(32))
KEY = TransferId(bytes(range(16)))


@dataclass
class SlowLibrary:
    """Both halves of a library within one process, which copies long after it was asked to."""

    is_fence: bool = True
    pool: KvMemory = field(default_factory=lambda: make_pools()[1])
    asked: dict[int, tuple[list[weakref.ref[memoryview]], Sequence[Place]]] = field(default_factory=dict)
    may_copy: bool = False
    arrived: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    is_taken: bool = False  # the receiver's side has been told of what arrived
    looks_owed: int = 0  # so often it must be polled after that, until the sender's side knows

    def introduction(self) -> bytes:
        return b"here"

    def expect(self, number: int, runs: Sequence[memoryview]) -> None:
        """Whoever writes knows the places."""

    def landed(self) -> list[int]:
        arrived, self.arrived = self.arrived, []
        if arrived:
            self.is_taken = True
        elif self.is_taken:
            self.looks_owed -= 1
        return arrived

    def write(self, number: int, sources: Sequence[memoryview], places: Sequence[Place]) -> None:
        self.asked[number] = [weakref.ref(run) for run in sources], places

    def written(self) -> list[int]:
        if not self.may_copy:
            return []
        asked, self.asked = self.asked, {}
        for runs, places in asked.values():
            for reference, place in zip(runs, places, strict=True):
                run = reference()
                assert run is not None, "what is being written was given back"
                start = place.address - self.pool.address
                self.pool._bytes[start : start + place.num_bytes] = run
        self.copied += asked
        self.arrived += asked
        if self.looks_owed > 0:
            return []
        done, self.copied = self.copied, []
        return done

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class OneFrame:
    """A frame of three blocks on its way over a slow library."""

    library: SlowLibrary
    source: KvMemory
    sender: GrantedSender
    ticket: GrantedTicket

    def wait_until_asked(self) -> None:
        def is_asked() -> bool:
            self.sender.poll()
            return bool(self.library.asked)

        wait_until(is_asked, "granted")

    def wait_until_done(self) -> None:
        def is_done() -> bool:
            self.sender.poll()
            return self.ticket.done

        wait_until(is_done, "written and landed")

    def assert_landed(self) -> None:
        np.testing.assert_array_equal(self.library.pool.save_blocks([9, 20, 21]), self.source.save_blocks([3, 4, 40]))


@contextmanager
def one_frame(library: SlowLibrary) -> Iterator[OneFrame]:
    source, _ = make_pools()
    source._array[:] = np.arange(source.size_bytes, dtype=np.uint64).astype(np.uint8)
    gate = ConnectionGate()
    gate.admit("p0", NONCE)
    table = LandingTable(library.pool)
    table.open(KEY, 1, refs(9, 20, 21), 0, lambda *_: None)
    payload = list(source.runs([3, 4, 40], 0, LAYOUT.num_layers))
    header = FrameHeader(KEY, 1, 0, 0, 0, LAYOUT.num_layers, 0, 3, 3 * LAYOUT.block_bytes, digest_of(payload))
    with (
        closing(GrantedReceiver("slow", "127.0.0.1", gate, table, lambda _: library)) as receiver,
        closing(GrantedSender("slow", receiver.address, NONCE, 0, lambda _: library)) as sender,
    ):
        yield OneFrame(library, source, sender, sender.push(header, payload))


def test_a_piece_across_two_runs_lives_until_it_is_written() -> None:
    library = SlowLibrary()
    with one_frame(library) as frame:
        frame.wait_until_asked()
        gc.collect()
        library.may_copy = True
        frame.wait_until_done()
        frame.assert_landed()


def test_f25_the_receiver_looks_after_a_library_that_owes_the_sender_an_end_of_what_has_landed() -> None:
    with one_frame(SlowLibrary(may_copy=True, looks_owed=3)) as frame:
        frame.wait_until_done()
        frame.assert_landed()


@pytest.mark.parametrize("library", [SlowLibrary(may_copy=False), SlowLibrary(may_copy=True, looks_owed=2**30)])
def test_f25_a_frame_that_never_ends_breaks_the_connection_instead_of_being_waited_for(
    library: SlowLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(granted, "STALL_TIMEOUT_S", 0.2)
    with (
        one_frame(library) as frame,
        pytest.raises(KvTransferFailed, match=r"no frame moved on for 0\.2 s: 0 not gr"),
    ):
        frame.wait_until_done()


@pytest.fixture
def nixl_ends() -> Iterator[tuple[KvMemory, KvMemory, NixlLanding, NixlWriting]]:
    needs_library("nixl")
    source, target = make_pools()
    source._array[:] = np.random.default_rng(5).integers(0, 256, source.size_bytes, np.uint8)
    landing = NixlLanding("127.0.0.1", target, memoryview(bytearray(4096)))
    writing = NixlWriting(landing.introduction(), "127.0.0.1", source)
    yield source, target, landing, writing
    writing.close()
    landing.close()


def test_kv52_copies_on_their_way_do_not_hide_the_pool_from_nixl(
    nixl_ends: tuple[KvMemory, KvMemory, NixlLanding, NixlWriting],
) -> None:
    """A frame with a piece of the pool and a copy is not written yet when others leave from behind and before it."""
    source, target, landing, writing = nixl_ends
    copy = memoryview(source.save_blocks([30]).tobytes())
    size = LAYOUT.block_bytes

    def place(block: int) -> Place:
        return Place(target.address + block * size, size)

    writing.write(1, [source.run(10, 0, LAYOUT.num_layers), copy], [place(0), place(1)])
    for number, block in ((2, 9), (3, 10), (4, 11), (5, 63)):
        writing.write(number, [source.run(block, 0, LAYOUT.num_layers)], [place(number)])
    outside = memoryview(bytes(range(256)) * (size // 256 + 1))[:size]
    writing.write(6, [outside], [place(6)])
    written: list[int] = []
    landed: list[int] = []

    def is_over() -> bool:
        written.extend(writing.written())
        landed.extend(landing.landed())
        return len(written) == 6 == len(landed)

    wait_until(is_over, "all written and landed")
    np.testing.assert_array_equal(target.save_blocks(range(6)), source.save_blocks([10, 30, 9, 10, 11, 63]))
    assert target.run(6, 0, LAYOUT.num_layers) == outside


def test_what_nixl_staged_is_used_again(nixl_ends: tuple[KvMemory, KvMemory, NixlLanding, NixlWriting]) -> None:
    _, target, landing, writing = nixl_ends
    for number in range(1, 9):
        outside = memoryview(bytes([number]) * LAYOUT.block_bytes)
        writing.write(number, [outside], [Place(target.address, LAYOUT.block_bytes)])

        def is_written(number: int = number) -> bool:
            landing.landed()
            return number in writing.written()

        wait_until(is_written, "written")
        assert target.run(0, 0, LAYOUT.num_layers) == outside
    (buffer,) = writing._staging._free
    assert not target.address <= address_of(buffer) < target.address + target.size_bytes
