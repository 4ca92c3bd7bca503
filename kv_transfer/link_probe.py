"""What a link costs, measured when two workers meet: a silent fallback that is hundreds of times slower must show.

Probe frames carry epoch 0, which no attempt has: the receiver drains them. Large frames give the bandwidth, small ones
the fixed cost of one push.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from cluster.errors import KvTransferFailed
from cluster.identity import TransferId
from kv_transfer.frame import digest_of
from kv_transfer.landing_table import PROBE_EPOCH
from kv_transfer.layer_groups import LinkCosts
from kv_transfer.transport import FrameHeader, Sender

LARGE_FRAME_BYTES = 1024 * 1024
NUM_LARGE_FRAMES = 32
SMALL_FRAME_BYTES = 4096
NUM_SMALL_FRAMES = 32
_PROBE_ID = TransferId(bytes(16))


def measure_link(sender: Sender, clock: Callable[[], float] = time.perf_counter) -> LinkCosts:
    """Bandwidth and cost of one push. Raises `KvTransferFailed` when the link breaks."""
    payload = memoryview(bytes(LARGE_FRAME_BYTES))
    _push(sender, payload, 1)  # opens windows and maps pages
    large_s = _time(lambda: _push(sender, payload, NUM_LARGE_FRAMES), clock)
    small_s = _time(lambda: _push(sender, payload[:SMALL_FRAME_BYTES], NUM_SMALL_FRAMES), clock)
    return LinkCosts(NUM_LARGE_FRAMES * LARGE_FRAME_BYTES / large_s, small_s / NUM_SMALL_FRAMES)


def time_copies(mapped: npt.NDArray[np.uint8], clock: Callable[[], float] = time.perf_counter) -> LinkCosts:
    """The same for memory of the receiver that is mapped here, by copying out of it."""
    large = mapped[:LARGE_FRAME_BYTES]
    scratch = np.empty(large.size, np.uint8)
    small = large[:SMALL_FRAME_BYTES]
    np.copyto(scratch, large)
    large_s = _time(lambda: _copy(large, scratch, NUM_LARGE_FRAMES), clock)
    small_s = _time(lambda: _copy(small, scratch, NUM_SMALL_FRAMES), clock)
    return LinkCosts(NUM_LARGE_FRAMES * large.size / large_s, small_s / NUM_SMALL_FRAMES)


def check_bandwidth(costs: LinkCosts, min_bytes_per_s: float, transport: str) -> None:
    """Raises `KvTransferFailed` when the link is slower than the operator allows."""
    if costs.bytes_per_s < min_bytes_per_s:
        raise KvTransferFailed(
            f"{transport} moves {costs.bytes_per_s / 1e9:.2f} GB/s here, min_bandwidth is {min_bytes_per_s / 1e9:.2f}",
            stage="transfer",
        )


def _push(sender: Sender, payload: memoryview, count: int) -> None:
    digest = digest_of([payload])
    for seq in range(count):
        sender.push(FrameHeader(_PROBE_ID, PROBE_EPOCH, 0, seq, 0, 1, 0, 1, payload.nbytes, digest), [payload])


def _copy(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], count: int) -> None:
    for _ in range(count):
        target[: source.size] = source


def _time(action: Callable[[], None], clock: Callable[[], float]) -> float:
    started = clock()
    action()
    return max(clock() - started, 1e-9)
