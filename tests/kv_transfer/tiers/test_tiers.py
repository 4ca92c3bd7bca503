"""A tier gives back what was put or nothing; whatever happens to its medium is a miss."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.identity import BlockHash
from kv_transfer.frame import digest_of
from kv_transfer.tiers.disk_file import HEADER, file_bytes
from kv_transfer.tiers.disk_tier import DiskTier
from kv_transfer.tiers.host_tier import HostTier, KeptBlock
from kv_transfer.tiers.tier_stack import TierStack

BLOCK_BYTES = 4096
LAYOUT = b"layout-of-a-test"
PROOF_BYTES = 80
FILE_BYTES = file_bytes(BLOCK_BYTES, PROOF_BYTES)
PAYLOAD_START = HEADER.size + PROOF_BYTES
REPOSITORY = Path(__file__).parents[3]


def content(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


def block(number: int) -> memoryview:
    return memoryview(content(number))


def key(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def proof(number: int) -> bytes:
    return random.Random(-number - 1).randbytes(PROOF_BYTES)


def disk(folder: Path, num_blocks: int = 100, layout: bytes = LAYOUT) -> DiskTier:
    return DiskTier(folder, num_blocks * FILE_BYTES, BLOCK_BYTES, layout)


def put(tier: HostTier | DiskTier | TierStack, number: int, payload: memoryview | None = None) -> bool:
    payload = block(number) if payload is None else payload
    if isinstance(tier, DiskTier):
        return tier.put(key(number), KeptBlock(proof(number), digest_of([payload]), payload))
    return tier.put(key(number), proof(number), payload)


def read(tier: HostTier | DiskTier | TierStack, number: int) -> bytes | None:
    into = memoryview(bytearray(BLOCK_BYTES))
    return bytes(into) if tier.get(key(number), proof(number), into) else None


@pytest.fixture(params=["host", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostTier | DiskTier]:
    if request.param == "disk":
        yield disk(tmp_path, 4)
    else:
        host = HostTier(4 * BLOCK_BYTES, BLOCK_BYTES)
        yield host
        host.close()


def test_a_block_comes_back_as_it_was_put(tier: HostTier | DiskTier) -> None:
    assert put(tier, 1)
    assert read(tier, 1) == content(1)
    assert read(tier, 2) is None
    assert (tier.status().hits, tier.status().misses) == (1, 1)


def test_the_least_recently_used_block_goes_first(tier: HostTier | DiskTier) -> None:
    for number in range(4):
        put(tier, number)
    read(tier, 0)
    put(tier, 9)
    assert [tier.contains(key(number)) for number in (0, 1, 2, 3, 9)] == [True, False, True, True, True]


def test_a_block_of_the_same_hash_and_other_tokens_is_a_miss(tier: HostTier | DiskTier) -> None:
    put(tier, 1)
    into = memoryview(bytearray(BLOCK_BYTES))
    assert not tier.get(key(1), proof(2), into)
    assert read(tier, 1) == content(1), "the other one's entry is as good as before"


def test_kv65_ten_times_the_capacity_leaves_a_full_tier_that_still_hits(tier: HostTier | DiskTier) -> None:
    for number in range(40):
        put(tier, number)
    assert tier.status().entries == 4
    assert read(tier, 39) == content(39)
    tier.clear()
    assert (tier.status().entries, tier.status().size_bytes) == (0, 0)


def test_a_block_of_another_size_is_a_bug_of_ours(tier: HostTier | DiskTier) -> None:
    with pytest.raises(ValueError, match="4096 bytes, not 3"):
        put(tier, 1, memoryview(b"abc"))


class TestHost:
    @pytest.fixture
    def host(self) -> Iterator[HostTier]:
        host = HostTier(2 * BLOCK_BYTES, BLOCK_BYTES)
        yield host
        host.close()

    def test_kv30_kv32_bytes_that_were_not_current_any_more_are_not_kept(self, host: HostTier) -> None:
        assert not host.put(key(1), proof(1), block(1), lambda: False)
        assert read(host, 1) is None
        assert put(host, 1)
        assert put(host, 2), "the slot of the refused one is free again"
        assert [read(host, number) for number in (1, 2)] == [content(1), content(2)]

    def test_kv63_kv64_a_block_that_is_read_is_not_evicted_and_a_put_never_waits_for_it(self, host: HostTier) -> None:
        put(host, 1)
        put(host, 2)
        with host.peek(key(1)) as first, host.peek(key(2)) as second:
            assert first is not None
            assert second is not None
            assert not put(host, 3), "every slot is being read"
            assert bytes(first.payload) == content(1)
            host.clear()
            assert not put(host, 3)
            assert bytes(second.payload) == content(2)
        assert put(host, 3)
        assert put(host, 4)
        assert [read(host, number) is not None for number in (1, 2, 3, 4)] == [False, False, True, True]

    def test_bytes_that_changed_in_memory_are_a_miss_and_their_slot_is_used_again(self, host: HostTier) -> None:
        put(host, 1)
        with host.peek(key(1)) as kept:
            assert kept is not None
            kept.payload[7] ^= 1
        assert read(host, 1) is None
        assert host.status().corrupt == 1
        assert put(host, 1)
        assert put(host, 2)
        assert read(host, 1) == content(1)

    def test_four_threads_read_only_whole_blocks(self, host: HostTier) -> None:
        wrong: list[int] = []
        num_read = [0]

        def work(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(300):
                number = chance.randrange(5)
                put(host, number)
                found = read(host, number)
                num_read[0] += found is not None
                if found not in (None, content(number)):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
        assert num_read[0] > 0
        assert put(host, 7)
        assert put(host, 8)
        assert host.status().entries == 2


class TestDisk:
    def test_blocks_survive_a_restart(self, tmp_path: Path) -> None:
        put(disk(tmp_path), 1)
        assert read(disk(tmp_path), 1) == content(1)

    def test_another_layout_is_a_miss_and_left_alone(self, tmp_path: Path) -> None:
        put(disk(tmp_path), 1)
        other = disk(tmp_path, layout=b"another layout!!")
        assert read(other, 1) is None
        put(other, 1)
        other.clear()
        assert read(disk(tmp_path), 1) == content(1)

    def test_a_file_that_was_moved_to_another_layouts_place_is_a_miss(self, tmp_path: Path) -> None:
        put(disk(tmp_path), 1)
        other = b"another layout!!"
        (tmp_path / LAYOUT.hex()).rename(tmp_path / other.hex())
        tier = disk(tmp_path, layout=other)
        assert read(tier, 1) is None
        assert tier.status().corrupt == 1

    @pytest.mark.parametrize(
        "position", [0, 5, 15, 30, HEADER.size - 1, PAYLOAD_START, PAYLOAD_START + BLOCK_BYTES - 1]
    )
    def test_f29_a_flipped_bit_anywhere_is_a_miss_and_the_file_is_removed(self, tmp_path: Path, position: int) -> None:
        tier = disk(tmp_path)
        put(tier, 1)
        (path,) = tmp_path.rglob("*.kv")
        flipped = bytearray(path.read_bytes())
        flipped[position] ^= 1
        path.write_bytes(flipped)
        assert read(tier, 1) is None
        assert tier.status().corrupt == 1
        assert not path.exists()
        assert put(tier, 1)
        assert read(tier, 1) == content(1)

    def test_a_flipped_bit_in_the_tokens_makes_it_another_block(self, tmp_path: Path) -> None:
        tier = disk(tmp_path)
        put(tier, 1)
        (path,) = tmp_path.rglob("*.kv")
        flipped = bytearray(path.read_bytes())
        flipped[HEADER.size + 3] ^= 1
        path.write_bytes(flipped)
        assert read(tier, 1) is None

    @pytest.mark.parametrize("length", [0, 3, HEADER.size, PAYLOAD_START, PAYLOAD_START + 100])
    def test_f29_a_truncated_file_is_a_miss(self, tmp_path: Path, length: int) -> None:
        tier = disk(tmp_path)
        put(tier, 1)
        (path,) = tmp_path.rglob("*.kv")
        os.truncate(path, length)
        assert read(disk(tmp_path), 1) is None
        assert not path.exists()
        assert read(tier, 1) is None

    def test_kv69_s_b60_a_file_removed_behind_the_index_is_a_miss(self, tmp_path: Path) -> None:
        tier = disk(tmp_path)
        put(tier, 1)
        (path,) = tmp_path.rglob("*.kv")
        path.unlink()
        assert read(tier, 1) is None
        assert tier.status().disabled_reason == ""

    def test_f29_a_folder_removed_while_in_use_is_a_miss_and_is_made_again(self, tmp_path: Path) -> None:
        tier = disk(tmp_path / "kv")
        put(tier, 1)
        shutil.rmtree(tmp_path / "kv")
        assert read(tier, 1) is None
        assert put(tier, 2)
        assert read(tier, 2) == content(2)

    def test_f29_a_folder_that_cannot_be_made_disables_the_tier_with_its_reason(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        tier = disk(tmp_path / "file")
        assert not put(tier, 1)
        assert read(tier, 1) is None
        assert "file" in tier.status().disabled_reason

    def test_a_folder_that_others_may_write_into_is_not_trusted(self, tmp_path: Path) -> None:
        put(disk(tmp_path / "kv"), 1)
        (tmp_path / "kv").chmod(0o777)
        tier = disk(tmp_path / "kv")
        assert read(tier, 1) is None
        assert "others may write" in tier.status().disabled_reason

    def test_f29_a_full_disk_disables_the_tier_and_leaves_no_part_of_a_file(self, tmp_path: Path) -> None:
        # A limit on file size in a child process stands for a full disk: the write stops in the middle of the block.
        script = f"""
import resource
from pathlib import Path
from tests.kv_transfer.tiers.test_tiers import disk, put, read
tier = disk(Path({str(tmp_path)!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
assert not put(tier, 1)
assert "large" in tier.status().disabled_reason, tier.status()
assert read(tier, 1) is None
"""
        path = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "proto")))
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env={**os.environ, "PYTHONPATH": path})
        assert [entry for entry in tmp_path.rglob("*") if entry.is_file()] == []

    def test_kv67_what_a_killed_writer_left_is_removed_and_the_key_is_writable(self, tmp_path: Path) -> None:
        tier = disk(tmp_path)
        put(tier, 1)
        (path,) = tmp_path.rglob("*.kv")
        path.rename(path.with_suffix(".tmp"))
        again = disk(tmp_path)
        assert list(tmp_path.rglob("*.tmp")) == []
        assert put(again, 1)
        assert read(again, 1) == content(1)


class TestSharedFolder:
    def test_what_one_worker_stored_another_one_finds(self, tmp_path: Path) -> None:
        first, second = disk(tmp_path), disk(tmp_path)
        put(first, 1)
        assert read(second, 1) is None, "it has not looked yet"
        second.refresh()
        assert second.take_changes() == ([key(1)], [])
        assert read(second, 1) == content(1)
        first.clear()
        second.refresh()
        assert second.take_changes() == ([], [key(1)])
        assert not second.contains(key(1))

    def test_two_writers_keep_the_capacity_together(self, tmp_path: Path) -> None:
        ticks = iter(range(10_000))
        tiers = [DiskTier(tmp_path, 10 * FILE_BYTES, BLOCK_BYTES, LAYOUT, clock=lambda: next(ticks)) for _ in range(2)]
        for number in range(40):
            put(tiers[number % 2], number)
            assert len(list(tmp_path.rglob("*.kv"))) <= 10
        for tier in tiers:
            tier.refresh()
            assert [number for number in range(40) if tier.contains(key(number))] == list(range(30, 40))

    def test_another_models_blocks_count_and_make_room(self, tmp_path: Path) -> None:
        ticks = iter(range(10_000))
        other = disk(tmp_path, 4, layout=b"another layout!!")
        for number in range(4):
            put(other, number)
        tier = DiskTier(tmp_path, 4 * FILE_BYTES, BLOCK_BYTES, LAYOUT, clock=lambda: next(ticks))
        put(tier, 9)
        assert len(list(tmp_path.rglob("*.kv"))) == 4
        assert read(other, 0) is None
        assert read(tier, 9) == content(9)

    def test_what_another_worker_used_lately_is_not_the_first_to_go(self, tmp_path: Path) -> None:
        first = disk(tmp_path, 3)
        for number in range(3):
            put(first, number)
        reader = disk(tmp_path, 3)
        assert read(reader, 0) == content(0)
        put(first, 9)
        assert [(first.contains(key(number))) for number in (0, 1, 2, 9)] == [True, False, True, True]

    def test_another_processs_unfinished_file_is_left_to_it(self, tmp_path: Path) -> None:
        script = f"""
import os, sys
from pathlib import Path
from kv_transfer.tiers import disk_file
from tests.kv_transfer.tiers.test_tiers import disk, put
write_all = disk_file._write_all
def slow(descriptor, data):
    write_all(descriptor, data)
    print("begun", flush=True)
    sys.stdin.readline()
disk_file._write_all = slow
assert put(disk(Path({str(tmp_path)!r})), 1)
"""
        path = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "proto")))
        with subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "begun\n"
            tier = disk(tmp_path)
            assert len(list(tmp_path.rglob("*.tmp"))) == 1
            assert read(tier, 1) is None, "no reader meets a part of a file"
            writer.communicate("\n\n\n", timeout=60)
            assert writer.returncode == 0
        tier.refresh()
        assert read(tier, 1) == content(1)


class TestStack:
    def test_what_the_host_drops_the_disk_keeps(self, tmp_path: Path) -> None:
        stack = TierStack(2 * BLOCK_BYTES, BLOCK_BYTES, disk(tmp_path))
        for number in range(6):
            put(stack, number)
            assert stack.flush()
        assert [read(stack, number) == content(number) for number in range(6)] == [True] * 6
        assert stack.find([key(number) for number in range(5, -1, -1)])[:2] == ["host", "host"]
        stack.close()

    def test_kv34_s_b60_a_block_that_goes_between_lookup_and_load_is_a_shorter_hit(self, tmp_path: Path) -> None:
        stack = TierStack(2 * BLOCK_BYTES, BLOCK_BYTES, disk(tmp_path))
        hashes = [key(number) for number in range(4)]
        for number in range(4):
            put(stack, number)
            stack.flush()
        assert stack.find(hashes) == ["disk", "disk", "host", "host"]
        for path in tmp_path.rglob("*.kv"):
            path.unlink()
        assert [read(stack, number) is not None for number in range(4)] == [False, False, True, True]
        stack.close()

    def test_blocks_that_wait_for_the_disk_are_written_before_the_end(self, tmp_path: Path) -> None:
        stack = TierStack(8 * BLOCK_BYTES, BLOCK_BYTES, disk(tmp_path))
        for number in range(8):
            put(stack, number)
        stack.close()
        again = disk(tmp_path)
        assert [read(again, number) == content(number) for number in range(8)] == [True] * 8

    def test_clear_removes_the_files_and_nothing_is_found_meanwhile(self, tmp_path: Path) -> None:
        stack = TierStack(2 * BLOCK_BYTES, BLOCK_BYTES, disk(tmp_path))
        for number in range(4):
            put(stack, number)
            stack.flush()
        stack.clear()
        assert stack.find([key(number) for number in range(4)]) == []
        assert stack.flush()
        assert list(tmp_path.rglob("*.kv")) == []
        assert put(stack, 1)
        assert stack.find([key(1)]) == ["host"]
        stack.close()

    def test_a_disabled_disk_leaves_the_host_at_work_and_says_why(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        stack = TierStack(2 * BLOCK_BYTES, BLOCK_BYTES, disk(tmp_path / "file"))
        for number in range(3):
            put(stack, number)
        assert [read(stack, number) is not None for number in range(3)] == [False, True, True]
        assert "file" in stack.details()["kv_tier_disk_disabled"]
        stack.close()

    def test_without_a_disk_the_host_stands_alone(self) -> None:
        stack = TierStack(2 * BLOCK_BYTES, BLOCK_BYTES)
        for number in range(3):
            put(stack, number)
        assert [read(stack, number) is not None for number in range(3)] == [False, True, True]
        assert len(stack.status()) == 1
        stack.close()


class TierAgainstModel(RuleBasedStateMachine):
    """Any order of calls: a hit is what was last put under that key, and the tier is never larger than it may be."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(3 * BLOCK_BYTES, BLOCK_BYTES)
        self.was_put: set[int] = set()

    @rule(number=st.integers(0, 7))
    def put(self, number: int) -> None:
        assert put(self.tier, number)
        self.was_put.add(number)
        assert read(self.tier, number) == content(number)

    @rule(number=st.integers(0, 7))
    def get(self, number: int) -> None:
        found = read(self.tier, number)
        assert found is None or (number in self.was_put and found == content(number))

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.was_put.clear()

    @invariant()
    def is_bounded(self) -> None:
        assert self.tier.status().entries <= 3

    def teardown(self) -> None:
        self.tier.close()


TestTierAgainstModel = TierAgainstModel.TestCase
TestTierAgainstModel.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
