"""The messages of one prompt's landing: what it says to a prefill worker, and what an answer means. Pure.

The machine speaks of blocks and layers, messages of tokens: a block that the prompt's end cuts has fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.v1 import handoff_pb2

from cluster.errors import RetryElsewhere, TandemError
from cluster.identity import BlockRef
from decode_worker.request_check import AcceptedRequest
from engine import logprob_messages
from engine.request import LandedPrompt, PositionLogprobs
from kv_transfer import decode_events as on
from kv_transfer.coverage import CellRange


@dataclass(frozen=True, slots=True)
class Landed:
    """What a verified transfer gives. The blocks are the landing's until it hears `admitted`."""

    prompt: LandedPrompt
    prompt_logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class LandingMessages:
    """Those of one request."""

    request: AcceptedRequest
    block_tokens: int
    idle_s: float

    def to_send(
        self, action: on.SendPrefill | on.SendCredit | on.SendResend | on.SendCommitAck | on.SendCancel
    ) -> handoff_pb2.DecodeToPrefill:
        key = action.ref.to_message()
        match action:
            case on.SendPrefill():
                return handoff_pb2.DecodeToPrefill(prefill=self._prefill(action))
            case on.SendCredit(_, num_bytes):
                return handoff_pb2.DecodeToPrefill(credit=handoff_pb2.Credit(key=key, bytes=num_bytes))
            case on.SendResend(_, ranges, tries_left):
                resend = handoff_pb2.Resend(key=key, ranges=map(self._range, ranges), tries_left=tries_left)
                return handoff_pb2.DecodeToPrefill(resend=resend)
            case on.SendCommitAck(_, is_ok, ranges):
                outcome = handoff_pb2.COMMIT_OUTCOME_OK if is_ok else handoff_pb2.COMMIT_OUTCOME_BAD
                ack = handoff_pb2.CommitAck(key=key, outcome=outcome, ranges=map(self._range, ranges))
                return handoff_pb2.DecodeToPrefill(commit_ack=ack)
            case on.SendCancel(_, reason):
                return handoff_pb2.DecodeToPrefill(cancel=handoff_pb2.CancelTransfer(key=key, reason=reason))

    def landed(self, commit: handoff_pb2.Commit, blocks: tuple[BlockRef, ...], num_have_blocks: int) -> Landed:
        """What a verified commit gives. `num_have_blocks`: the prompt's first ones, that were here before."""
        has_logprobs = commit.HasField("first_logprobs")
        cached_tokens = max(commit.cached_tokens, num_have_blocks * self.block_tokens)
        prompt = LandedPrompt(
            blocks=blocks,
            first_token_id=commit.first_token_id,
            first_logprobs=logprob_messages.from_message(commit.first_logprobs) if has_logprobs else None,
            cached_tokens=min(cached_tokens, self.request.num_tokens),
        )
        return Landed(prompt, tuple(logprob_messages.from_message(logprobs) for logprobs in commit.prompt_logprobs))

    def _prefill(self, action: on.SendPrefill) -> handoff_pb2.PrefillRequest:
        request = self.request
        message = handoff_pb2.PrefillRequest(
            key=action.ref.to_message(),
            token_ids=request.token_ids.tolist(),
            sampling=request.sampling.to_proto(),
            have_tokens=action.num_have_blocks * self.block_tokens,
            destination=[
                handoff_pb2.BlockRef(block=ref.block, generation=ref.generation) for ref in action.destination
            ],
            deadline_ms=max(1, int(action.deadline_s * 1000)),
            idle_ms=int(self.idle_s * 1000),
            credit_bytes=action.credit_bytes,
            priority=request.priority,
            traceparent=request.traceparent,
            request_id=request.request_id,
            num_generated_tokens=request.num_generated,
        )
        message.scope.scope_key = request.scope_key
        return message

    def _range(self, cells: CellRange) -> handoff_pb2.Range:
        first_token = cells.first_block * self.block_tokens
        end_token = min((cells.first_block + cells.num_blocks) * self.block_tokens, self.request.num_tokens)
        return handoff_pb2.Range(
            first_layer=cells.first_layer,
            num_layers=cells.num_layers,
            first_token=first_token,
            num_tokens=end_token - first_token,
        )


def rejection(reject: handoff_pb2.Reject) -> TandemError:
    """What another prefill worker, or this one, may still do for the request."""
    reason = handoff_pb2.RejectReason.Name(reject.reason).removeprefix("REJECT_REASON_").lower()
    return RetryElsewhere(
        f"the prefill worker rejected ({reason}): {reject.detail}",
        code=reject.failure.code,
        retry_after_s=reject.retry_after_ms / 1000,
        stage="prefill",
    )
