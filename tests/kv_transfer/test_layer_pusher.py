"""The sending thread outlives whatever a transport raises: who waits on it is told, and so is who comes later."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pytest

from cluster.errors import KvLinkBroken, KvTransferFailed
from cluster.identity import TransferId
from kv_transfer.landing_table import LandingTable
from kv_transfer.layer_pusher import LayerPusher, PushRequest
from kv_transfer.transport import FrameHeader, Posted
from tests.kv_transfer.direct_sender import DirectSender
from tests.kv_transfer.oracle import COSTS, LAYOUT, PushOutcome, make_pools, refs, wait_until


class RaisingSender(DirectSender):
    """A transport whose library fails in a way that its author did not foresee."""

    def push(self, header: FrameHeader, payload: Sequence[memoryview]) -> Posted:
        raise RuntimeError("a surprise")


def test_an_unforeseen_error_of_a_transport_breaks_its_link_and_leaves_nobody_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, target = make_pools()
    told: list[KvTransferFailed] = []
    with closing(LayerPusher(RaisingSender(LandingTable(target)), source, COSTS)) as pusher:
        pusher.tell_when_broken(told.append)
        for number in (1, 2):
            outcome = PushOutcome()
            request = PushRequest(TransferId(bytes([number] * 16)), 1, LAYOUT.block_tokens, 0, outcome.callbacks())
            session = pusher.open(request)
            session.blocks_allocated(refs(number), LAYOUT.block_tokens)
            wait_until(lambda outcome=outcome: bool(outcome.failed), "failed")  # type: ignore[misc]
            (error,) = outcome.failed
            assert isinstance(error, KvLinkBroken)
            assert "RuntimeError('a surprise')" in str(error)
            drained: list[int] = []
            session.cancel(drained.append)
            wait_until(lambda drained=drained: bool(drained), "drained")  # type: ignore[misc]
    assert len(told) == 1
    assert "the sending thread of direct failed" in caplog.text
