"""What a landing says in messages, and what it makes of the answers."""

from __future__ import annotations

import pytest
from tandem.v1 import common_pb2, handoff_pb2, worker_pb2

from cluster.identity import BlockId, BlockRef, Incarnation, TransferId, WorkerId
from cluster.sampling_params import SamplingParams
from decode_worker.landing_messages import LandingMessages, rejection
from decode_worker.request_check import WorkerLimits, check_request
from kv_transfer import decode_events as on
from kv_transfer.coverage import CellRange
from kv_transfer.transfer_ref import TransferRef

REF = TransferRef(TransferId(bytes(16)), 3)
BLOCKS = (BlockRef(BlockId(4), 1), BlockRef(BlockId(9), 2))


def messages(num_tokens: int = 70) -> LandingMessages:
    submit = worker_pb2.SubmitRequest(
        request_id="r",
        token_ids=range(1, num_tokens + 1),
        sampling=SamplingParams(max_tokens=4, temperature=0.0).to_proto(),
    )
    return LandingMessages(check_request(submit, WorkerLimits(1000, 512, 16, 32)), block_tokens=16, idle_s=5.0)


def test_the_range_of_a_last_block_ends_with_the_prompt() -> None:
    cells = (CellRange(2, 3, 1, 2), CellRange(0, 4, 4, 1))
    resend = messages().to_send(on.SendResend(REF, cells, tries_left=1)).resend
    ranges = [(one.first_layer, one.num_layers, one.first_token, one.num_tokens) for one in resend.ranges]
    assert ranges == [(2, 3, 16, 32), (0, 4, 64, 6)]
    assert (resend.key.epoch, resend.tries_left) == (3, 1)


def test_the_request_speaks_of_tokens_and_of_time_that_is_left() -> None:
    peer = on.PeerRef(WorkerId("p0"), Incarnation("1"))
    asked = messages().to_send(on.SendPrefill(REF, peer, BLOCKS, 3, 4096, deadline_s=0.0001)).prefill
    assert (asked.have_tokens, [block.block for block in asked.destination]) == (48, [4, 9])
    assert (asked.deadline_ms, asked.idle_ms, asked.credit_bytes) == (1, 5000, 4096)


@pytest.mark.parametrize(
    ("is_ok", "outcome"), [(True, handoff_pb2.COMMIT_OUTCOME_OK), (False, handoff_pb2.COMMIT_OUTCOME_BAD)]
)
def test_an_acknowledgement_says_whether_the_commit_held(is_ok: bool, outcome: int) -> None:
    assert messages().to_send(on.SendCommitAck(REF, is_ok)).commit_ack.outcome == outcome


@pytest.mark.parametrize(("said", "num_have_blocks", "expected"), [(0, 2, 32), (64, 2, 64), (700, 0, 70)])
def test_cached_tokens_are_the_longer_prefix_of_the_two_workers_and_no_more_than_the_prompt(
    said: int, num_have_blocks: int, expected: int
) -> None:
    commit = handoff_pb2.Commit(first_token_id=7, has_first_token=True, cached_tokens=said)
    landed = messages().landed(commit, BLOCKS, num_have_blocks)
    assert (landed.prompt.cached_tokens, landed.prompt.first_token_id, landed.prompt.first_logprobs) == (
        expected,
        7,
        None,
    )


def test_a_rejection_names_its_reason_and_when_to_come_back() -> None:
    reject = handoff_pb2.Reject(
        reason=handoff_pb2.REJECT_REASON_OVERLOADED,
        detail="9 prompts wait",
        retry_after_ms=250,
        failure=common_pb2.Failure(code="server_is_overloaded"),
    )
    error = rejection(reject)
    assert error.message == "the prefill worker rejected (overloaded): 9 prompts wait"
    assert (error.error_code, error.retry_after_s) == ("server_is_overloaded", 0.25)
