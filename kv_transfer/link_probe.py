"""What a link costs, measured when two workers meet: a silent fallback that is hundreds of times slower must show.

Probe frames land beside the pool and are verified by the receiver like any other. Large frames give the bandwidth,
small ones the fixed cost of one push.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from cluster.errors import KvTransferFailed
from cluster.identity import TransferId
from kv_transfer.frame import digest_of
from kv_transfer.layer_groups import LinkCosts
from kv_transfer.transport import PROBE_EPOCH, FrameHeader, Sender

LARGE_FRAME_BYTES = 1024 * 1024
NUM_LARGE_FRAMES = 16
SMALL_FRAME_BYTES = 4096
NUM_SMALL_FRAMES = 32
_PROBE_ID = TransferId(bytes(16))


def measure_link(sender: Sender, clock: Callable[[], float] = time.perf_counter) -> LinkCosts:
    """Bandwidth and cost of one push. Raises `KvTransferFailed` when the link breaks, or what arrives is not what was
    sent."""
    payload = memoryview(secrets.token_bytes(LARGE_FRAME_BYTES))
    _push(sender, payload, 1)  # opens windows and maps pages
    large_s = _time(lambda: _push(sender, payload, NUM_LARGE_FRAMES), clock)
    small_s = _time(lambda: _push(sender, payload[:SMALL_FRAME_BYTES], NUM_SMALL_FRAMES), clock)
    return LinkCosts(NUM_LARGE_FRAMES * LARGE_FRAME_BYTES / large_s, small_s / NUM_SMALL_FRAMES)


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
    verified = sender.count_verified()
    if verified != count:
        raise KvTransferFailed(
            f"{sender.name} spoils what it moves: {verified} of {count} probe frames arrived as they were sent",
            stage="transfer",
        )


def _time(action: Callable[[], None], clock: Callable[[], float]) -> float:
    started = clock()
    action()
    return max(clock() - started, 1e-9)
