"""A tier gives back what was put or nothing; whatever happens to its medium is a miss."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.identity import BlockHash
from kv_transfer.tiers.disk_tier import HEADER, DiskTier
from kv_transfer.tiers.host_tier import HostTier
from kv_transfer.tiers.tier_stack import TierStack

BLOCK_BYTES = 4096
LAYOUT = b"layout-of-a-test"
REPOSITORY = Path(__file__).parents[3]


def content(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


def block(number: int) -> memoryview:
    return memoryview(content(number))


def key(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def disk(folder: Path, num_blocks: int = 100) -> DiskTier:
    return DiskTier(folder, num_blocks * (BLOCK_BYTES + HEADER.size), BLOCK_BYTES, LAYOUT)


def read(tier: HostTier | DiskTier | TierStack, number: int) -> bytes | None:
    into = memoryview(bytearray(BLOCK_BYTES))
    return bytes(into) if tier.get(key(number), into) else None


@pytest.fixture(params=["host", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostTier | DiskTier]:
    if request.param == "disk":
        yield disk(tmp_path, 4)
    else:
        host = HostTier(4 * BLOCK_BYTES, BLOCK_BYTES)
        yield host
        host.close()


def test_a_block_comes_back_as_it_was_put(tier: HostTier | DiskTier) -> None:
    assert tier.put(key(1), block(1))
    assert read(tier, 1) == content(1)
    assert read(tier, 2) is None
    assert (tier.status().hits, tier.status().misses) == (1, 1)


def test_the_least_recently_used_block_goes_first(tier: HostTier | DiskTier) -> None:
    for number in range(4):
        tier.put(key(number), block(number))
    read(tier, 0)
    tier.put(key(9), block(9))
    assert [tier.contains(key(number)) for number in (0, 1, 2, 3, 9)] == [True, False, True, True, True]


def test_kv65_ten_times_the_capacity_leaves_a_full_tier_that_still_hits(tier: HostTier | DiskTier) -> None:
    for number in range(40):
        tier.put(key(number), block(number))
    assert tier.status().entries == 4
    assert read(tier, 39) == content(39)
    tier.clear()
    assert (tier.status().entries, tier.status().size_bytes) == (0, 0)


def test_a_block_of_another_size_is_a_bug_of_ours(tier: HostTier | DiskTier) -> None:
    with pytest.raises(ValueError, match="4096 bytes, not 3"):
        tier.put(key(1), memoryview(b"abc"))


class TestDisk:
    def test_blocks_survive_a_restart(self, tmp_path: Path) -> None:
        disk(tmp_path).put(key(1), block(1))
        assert read(disk(tmp_path), 1) == content(1)

    def test_another_layout_is_a_miss(self, tmp_path: Path) -> None:
        disk(tmp_path).put(key(1), block(1))
        other = DiskTier(tmp_path, 10 * BLOCK_BYTES, BLOCK_BYTES, b"another layout!!")
        assert read(other, 1) is None
        assert other.status().corrupt == 1

    @pytest.mark.parametrize("position", [0, 5, 15, 30, HEADER.size, HEADER.size + BLOCK_BYTES - 1])
    def test_f29_a_flipped_bit_anywhere_is_a_miss_and_the_file_is_removed(self, tmp_path: Path, position: int) -> None:
        tier = disk(tmp_path)
        tier.put(key(1), block(1))
        (path,) = tmp_path.rglob("*.kv")
        flipped = bytearray(path.read_bytes())
        flipped[position] ^= 1
        path.write_bytes(flipped)
        assert read(tier, 1) is None
        assert tier.status().corrupt == 1
        assert not path.exists()
        assert tier.put(key(1), block(1))
        assert read(tier, 1) == content(1)

    @pytest.mark.parametrize("length", [0, 3, HEADER.size, HEADER.size + 100])
    def test_f29_a_truncated_file_is_a_miss(self, tmp_path: Path, length: int) -> None:
        tier = disk(tmp_path)
        tier.put(key(1), block(1))
        (path,) = tmp_path.rglob("*.kv")
        os.truncate(path, length)
        assert read(tier, 1) is None
        assert read(disk(tmp_path), 1) is None

    def test_kv69_s_b60_a_file_removed_behind_the_index_is_a_miss(self, tmp_path: Path) -> None:
        tier = disk(tmp_path)
        tier.put(key(1), block(1))
        (path,) = tmp_path.rglob("*.kv")
        path.unlink()
        assert read(tier, 1) is None
        assert tier.status().disabled_reason == ""

    def test_f29_a_folder_removed_while_in_use_is_a_miss_and_is_made_again(self, tmp_path: Path) -> None:
        tier = disk(tmp_path / "kv")
        tier.put(key(1), block(1))
        shutil.rmtree(tmp_path / "kv")
        assert read(tier, 1) is None
        assert tier.put(key(2), block(2))
        assert read(tier, 2) == content(2)

    def test_f29_a_folder_that_cannot_be_made_disables_the_tier_with_its_reason(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        tier = disk(tmp_path / "file")
        assert not tier.put(key(1), block(1))
        assert read(tier, 1) is None
        assert "file" in tier.status().disabled_reason

    def test_f29_a_full_disk_disables_the_tier_and_leaves_no_part_of_a_file(self, tmp_path: Path) -> None:
        # A limit on file size in a child process stands for a full disk: the write stops in the middle of the block.
        script = f"""
import resource
from pathlib import Path
from tests.kv_transfer.tiers.test_tiers import block, disk, key, read
tier = disk(Path({str(tmp_path)!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
assert not tier.put(key(1), block(1))
assert "large" in tier.status().disabled_reason, tier.status()
assert read(tier, 1) is None
"""
        path = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "proto")))
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env={**os.environ, "PYTHONPATH": path})
        assert [entry for entry in tmp_path.rglob("*") if entry.is_file()] == []

    def test_kv67_what_a_killed_writer_left_is_removed_and_the_key_is_writable(self, tmp_path: Path) -> None:
        tier = disk(tmp_path)
        tier.put(key(1), block(1))
        (path,) = tmp_path.rglob("*.kv")
        path.rename(path.with_suffix(".tmp"))
        again = disk(tmp_path)
        assert list(tmp_path.rglob("*.tmp")) == []
        assert again.put(key(1), block(1))
        assert read(again, 1) == content(1)


class TestStack:
    def test_what_the_host_drops_the_disk_keeps(self, tmp_path: Path) -> None:
        stack = TierStack(2 * BLOCK_BYTES, BLOCK_BYTES, disk(tmp_path))
        for number in range(6):
            stack.put(key(number), block(number))
        stack.flush()
        assert [read(stack, number) == content(number) for number in range(6)] == [True] * 6
        stack.close()

    def test_kv34_s_b60_a_block_that_goes_between_lookup_and_load_is_a_shorter_hit(self, tmp_path: Path) -> None:
        stack = TierStack(2 * BLOCK_BYTES, BLOCK_BYTES, disk(tmp_path))
        hashes = [key(number) for number in range(4)]
        for number in range(4):
            stack.put(key(number), block(number))
        stack.flush()
        assert stack.count_prefix(hashes) == 4
        for path in tmp_path.rglob("*.kv"):
            path.unlink()
        assert [read(stack, number) is not None for number in range(4)] == [False, False, True, True]
        stack.close()

    def test_without_a_disk_the_host_stands_alone(self) -> None:
        stack = TierStack(2 * BLOCK_BYTES, BLOCK_BYTES)
        for number in range(3):
            stack.put(key(number), block(number))
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
        assert self.tier.put(key(number), block(number))
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
