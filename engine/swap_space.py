"""KV of preempted sequences in host memory: saved where computing it again would take longer than copying it twice.

    preempt ─ pays? ─┬─ save    blocks ──copy──> here ──copy──> other blocks, later; no token is computed again
                     └─ restart

What a step costs for each token is learnt from the steps themselves, what copying costs from the copies. It knows no
queue and no pool: who is preempted, and which blocks a sequence gets when it comes back, is the scheduler's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Chunks
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.sequence import Sequence

SavedBytes = npt.NDArray[np.uint8]
# A copy's cost before the first one: memory of a slow laptop, and its page faults.
FIRST_COPY_BYTES_PER_S = 1e9
# Of one save or restore, whatever its size: calls, allocation, the block table built anew.
FIXED_COPY_S = 2e-4
AVERAGE_WEIGHT = 0.2  # of the newest copy in the moving average


class BlockMemory(Protocol):
    """What of a KV pool's memory is needed (`engine.kv_memory.KvMemory`)."""

    def save_blocks(self, blocks: Chunks[int]) -> SavedBytes:
        """A copy of the blocks' bytes in host memory, `[blocks, block bytes]`."""
        ...

    def restore_blocks(self, blocks: Chunks[int], saved: SavedBytes) -> None: ...


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """What decides between the two ways, in seconds."""

    token_s: float  # of computing one token again, at best
    block_copy_s: float  # of copying one block, one way

    def swap_s(self, num_blocks: int) -> float:
        return 2 * (FIXED_COPY_S + num_blocks * self.block_copy_s)

    def restart_s(self, num_tokens: int) -> float:
        return num_tokens * self.token_s


def swap_pays(num_tokens: int, num_blocks: int, costs: SwapCosts) -> bool:
    """Whether to copy the blocks out and back is faster than to compute the tokens again."""
    return costs.swap_s(num_blocks) < costs.restart_s(num_tokens)


@dataclass(frozen=True, slots=True)
class _Saved:
    content: SavedBytes
    num_tokens: int


class SwapSpace:
    """Owned by the engine thread. Never holds more than `max_bytes`: who finds no room starts over."""

    def __init__(
        self, memory: BlockMemory, block_bytes: int, max_bytes: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._memory = memory
        self._block_bytes = block_bytes
        self._max_bytes = max_bytes
        self._clock = clock
        self._saved: dict[Sequence, _Saved] = {}
        self._costs = SwapCosts(token_s=0.0, block_copy_s=block_bytes / FIRST_COPY_BYTES_PER_S)
        self.used_bytes = 0
        self.num_saved = 0
        self.num_restored = 0

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._saved

    def counters(self) -> dict[str, float]:
        """Saves and restores since the start, and what is held now."""
        return {
            "preemptions_swapped": self.num_saved,
            "swapped_in": self.num_restored,
            "swapped_bytes": self.used_bytes,
        }

    def saw_step(self, num_tokens: int, step_s: float) -> None:
        """A step took so long. The best rate is what counts: a restart computes many tokens at once."""
        token_s = step_s / max(1, num_tokens)
        if self._costs.token_s == 0.0 or token_s < self._costs.token_s:
            self._costs = SwapCosts(token_s, self._costs.block_copy_s)

    def save(self, sequence: Sequence, block_tokens: int) -> bool:
        """Copies the sequence's KV where that pays and there is room. Its blocks must still be its own."""
        num_blocks = -(-sequence.num_computed // block_tokens)
        num_bytes = num_blocks * self._block_bytes
        if (
            not swap_pays(sequence.num_computed, num_blocks, self._costs)
            or self.used_bytes + num_bytes > self._max_bytes
        ):
            return False
        started_s = self._clock()
        content = self._memory.save_blocks([ref.block for ref in sequence.blocks[:num_blocks]])
        self._learn(num_blocks, self._clock() - started_s)
        self._saved[sequence] = _Saved(content, sequence.num_computed)
        self.used_bytes += num_bytes
        self.num_saved += 1
        return True

    def restore(self, sequence: Sequence, num_cached_blocks: int) -> int:
        """Writes what was saved into the sequence's blocks behind the first `num_cached_blocks`, which hold it already.

        Gives how many tokens of KV the sequence has now.
        """
        saved = self._saved[sequence]
        blocks = [ref.block for ref in sequence.blocks[num_cached_blocks : len(saved.content)]]
        if blocks:
            self._memory.restore_blocks(blocks, saved.content[num_cached_blocks:])
        self.drop(sequence)
        self.num_restored += 1
        return saved.num_tokens

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence (one that was not saved changes nothing)."""
        saved = self._saved.pop(sequence, None)
        if saved is not None:
            self.used_bytes -= len(saved.content) * self._block_bytes

    def _learn(self, num_blocks: int, copy_s: float) -> None:
        block_copy_s = max(0.0, copy_s - FIXED_COPY_S) / max(1, num_blocks)
        average = self._costs.block_copy_s + AVERAGE_WEIGHT * (block_copy_s - self._costs.block_copy_s)
        self._costs = SwapCosts(self._costs.token_s, average)
