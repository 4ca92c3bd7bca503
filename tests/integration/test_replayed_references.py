"""What names a transfer, a block or a request, said again, too late, or of nothing that ever was, to running workers.

Only two ends are allowed: what was meant, or an error by its name. Then whoever comes next is answered right, out of KV
that is compared before it is used, and every block is back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tandem.v1 import handoff_pb2

from cluster.identity import BlockId, BlockRef, new_transfer_id
from decode_worker.prefill_peer import PrefillPeer
from engine.block_states import BlockInvariantError, StaleBlock, UnknownBlock
from kv_transfer.transfer_ref import TransferRef
from kv_transfer.transport import FrameHeader
from tests.integration.in_process_pair import Pair, running_pair
from tests.integration.mock_tokens import expected_tokens

WAIT_S = 60.0
PROMPT = list(range(100, 140))
OUTSIDE = 2**31 - 1


@dataclass
class Recorded:
    """A pair of workers, and all that one finished request said between them."""

    pair: Pair
    peer: PrefillPeer
    asked: list[handoff_pb2.DecodeToPrefill] = field(default_factory=list)
    told: list[handoff_pb2.PrefillToDecode] = field(default_factory=list)
    frames: list[FrameHeader] = field(default_factory=list)

    @property
    def request(self) -> handoff_pb2.PrefillRequest:
        return next(message.prefill for message in self.asked if message.HasField("prefill"))

    def ask_again(self, **changes: Any) -> TransferRef:
        """The request once more with some fields changed; under which key."""
        request = handoff_pb2.PrefillRequest()
        request.CopyFrom(self.request)
        for name, value in changes.items():
            request.ClearField(name)  # type: ignore[arg-type]
            request.MergeFrom(handoff_pb2.PrefillRequest(**{name: value}))
        self.peer.send(handoff_pb2.DecodeToPrefill(prefill=request))
        return TransferRef.of(request.key)

    async def hear(self, kind: str, ref: TransferRef, seen: int) -> Any:
        """The message of this kind that speaks of this attempt, among those behind the first `seen`."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            for message in self.told[seen:]:
                if message.WhichOneof("message") == kind and TransferRef.of(getattr(message, kind).key) == ref:
                    return getattr(message, kind)
            assert time.monotonic() < deadline_s, f"no {kind} of {ref} in {self.told[seen:]}"
            await asyncio.sleep(0.002)


@pytest.fixture
async def recorded(tmp_path: Path) -> AsyncIterator[Recorded]:
    async with running_pair(tmp_path, "shm", num_blocks=16) as pair:
        await golden(pair, "warm")
        peer = next(iter(pair.decode._peers._peers.values()))
        recorded = Recorded(pair, peer)
        send, dispatch, open_frame = peer.send, peer._dispatch, pair.decode._table.open_frame

        def noted_send(message: handoff_pb2.DecodeToPrefill) -> None:
            recorded.asked.append(message)
            send(message)

        def noted_dispatch(message: handoff_pb2.PrefillToDecode) -> None:
            recorded.told.append(message)
            dispatch(message)

        def noted_frame(header: FrameHeader) -> Any:
            recorded.frames.append(header)
            return open_frame(header)

        peer.send, peer._dispatch = noted_send, noted_dispatch  # type: ignore[method-assign]
        pair.decode._table.open_frame = noted_frame  # type: ignore[method-assign]
        answer = await pair.ask("recorded", PROMPT, 3)
        assert answer.token_ids == expected_tokens(PROMPT, 3)
        await pair.all_is_back()
        assert recorded.frames
        pair.decode._table.open_frame = open_frame  # type: ignore[method-assign]
        yield recorded


async def golden(pair: Pair, name: str) -> None:
    prompts = [[(31 * index + 7 * token + len(name)) % 49_000 for token in range(20 + index)] for index in range(4)]
    answers = await asyncio.gather(*(pair.ask(f"{name}-{index}", each, 4) for index, each in enumerate(prompts)))
    assert [answer.token_ids for answer in answers] == [expected_tokens(each, 4) for each in prompts], answers
    await pair.all_is_back()


async def unknown_transfer(recorded: Recorded) -> None:
    """Neither side has ever heard of it."""
    nobodys = TransferRef(new_transfer_id(), 1)
    for header in recorded.frames:
        frame = header._replace(transfer_id=nobodys.transfer_id)
        assert recorded.pair.decode._table.open_frame(frame) is None
    for message in list(recorded.asked):
        if not message.HasField("prefill"):
            recorded.peer.send(_under(nobodys, message))
    seen = len(recorded.asked)
    for told in recorded.told.copy():
        recorded.peer._dispatch(_under(nobodys, told))
    assert [m.commit_ack.outcome for m in recorded.asked[seen:]] == [handoff_pb2.COMMIT_OUTCOME_STALE]


async def block_out_of_range(recorded: Recorded) -> None:
    """A block behind either pool, or behind the prompt."""
    for pool in (recorded.pair.prefill_parts.pool, recorded.pair.decode_parts.pool):
        for block in (-1, pool.num_blocks, OUTSIDE):
            with pytest.raises(UnknownBlock):
                pool.release([BlockRef(BlockId(block), 0)])
    request, seen = recorded.request, len(recorded.told)
    block_tokens = recorded.pair.decode_parts.pool.block_tokens
    destination = list(request.destination)
    for changes in (
        {"destination": [*destination, destination[0]]},
        {"destination": destination[:-1]},
        {"destination": [destination[0]] * len(destination)},
        {"have_tokens": block_tokens * 1000},
        {"have_tokens": 1},
    ):
        ref = TransferRef(new_transfer_id(), 1)
        recorded.ask_again(key=ref.to_message(), **changes)
        rejected = await recorded.hear("reject", ref, seen)
        assert (rejected.reason, rejected.failure.code) == (handoff_pb2.REJECT_REASON_INVALID, "invalid_request")
    # Of a transfer that is under way: frames for blocks, layers and heads that it has not.
    refused = recorded.pair.decode._table.counts().refused_frames
    wrong: tuple[Any, ...] = (
        {"first_block": OUTSIDE},
        {"num_blocks": 1000},
        {"first_layer": 60_000},
        {"num_heads": 9},
        {"num_bytes": 1},
    )

    let_in: list[bool] = []

    def spoil() -> None:
        (transfer_id, epoch), *_ = recorded.pair.decode._table._landings
        for fields in wrong:
            header = recorded.frames[0]._replace(transfer_id=transfer_id, epoch=epoch, seq=900, **fields)
            let_in.append(recorded.pair.decode._table.open_frame(header) is not None)

    recorded.pair.at = {"computed": spoil}
    await golden(recorded.pair, "under way")
    recorded.pair.at = {}
    assert let_in
    assert not any(let_in)
    assert recorded.pair.decode._table.counts().refused_frames >= refused + len(wrong)


async def consumed_reference(recorded: Recorded) -> None:
    """All of a request that has ended, said once more: to the prefill worker, to the decode worker, on the link."""
    seen = len(recorded.told)
    ref = recorded.ask_again()
    rejected = await recorded.hear("reject", ref, seen)
    assert (rejected.reason, rejected.failure.code) == (handoff_pb2.REJECT_REASON_DUPLICATE, "worker_unavailable")
    for message in list(recorded.asked):
        if not message.HasField("prefill"):
            recorded.peer.send(message)
    for told in recorded.told[:seen]:
        recorded.peer._dispatch(told)
    for header in recorded.frames:
        assert recorded.pair.decode._table.open_frame(header) is None
    again = await recorded.pair.ask("recorded", PROMPT, 3)  # the same placement
    assert again.failure is not None
    assert again.failure.code == "stale_fence"
    assert not again.token_ids


async def stale_reference(recorded: Recorded) -> None:
    """Another epoch of a transfer whose blocks are somebody else's by now; a reference of an older generation."""
    table, seen, stale = recorded.pair.decode._table, len(recorded.told), recorded.pair.decode._table.counts()
    for header in recorded.frames:
        for epoch in (0, 2, 2**32 - 1):
            assert table.open_frame(header._replace(epoch=epoch)) is None
    key = handoff_pb2.TransferKey(transfer_id=recorded.request.key.transfer_id, epoch=2)
    ref = recorded.ask_again(key=key)
    commit = await recorded.hear("commit", ref, seen)
    assert commit.has_first_token
    assert table.counts().stale_frames > stale.stale_frames + 3 * len(recorded.frames), "its frames were let in"
    pool = recorded.pair.decode_parts.pool
    destination = [BlockRef(BlockId(block.block), block.generation) for block in recorded.request.destination]
    assert not pool.holds(destination)
    with pytest.raises(BlockInvariantError):
        pool.release(destination)
    fresh = pool.allocate(pool.num_available)
    assert fresh is not None
    for each in fresh:
        with pytest.raises(StaleBlock):
            pool.share([BlockRef(each.block, each.generation - 1)])
    pool.release(fresh)


async def expired_lease(recorded: Recorded) -> None:
    """The time of an attempt, or of a request, is over before its KV is there."""
    seen, ref = len(recorded.told), TransferRef(new_transfer_id(), 1)
    engine: Any = recorded.pair.prefill_parts.engine
    submit = engine.submit
    waiting: list[Any] = []
    engine.submit = waiting.append
    recorded.ask_again(key=ref.to_message(), deadline_ms=20)
    commit = await recorded.hear("commit", ref, seen)
    assert (commit.failure.code, commit.has_first_token) == ("deadline_exceeded", False)
    late = await recorded.pair.ask("late", list(range(50)), 3, deadline_ms=50)
    assert late.failure is not None
    assert (late.failure.code, late.token_ids) == ("deadline_exceeded", [])
    engine.submit = submit
    for request in waiting:  # what the engine does now is nobody's any more
        submit(request)
        engine.cancel(request.request_id)


@pytest.mark.parametrize(
    "replay", [unknown_transfer, block_out_of_range, consumed_reference, stale_reference, expired_lease]
)
async def test_s_b46_a_reference_that_is_not_good_is_an_error_and_never_an_answer(
    replay: Callable[[Recorded], Any], recorded: Recorded
) -> None:
    await replay(recorded)
    await golden(recorded.pair, "after")


def _under(ref: TransferRef, message: Any) -> Any:
    """The message under another key."""
    copy = type(message)()
    copy.CopyFrom(message)
    getattr(copy, copy.WhichOneof("message")).key.CopyFrom(ref.to_message())
    return copy
