"""Whether this worker takes a PrefillRequest on: every field checked again, then load. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tandem.v1 import handoff_pb2

from cluster.errors import ContextLengthExceeded, InvalidRequest, ServerOverloaded, shown
from cluster.identity import TRANSFER_ID_BYTES, BlockId, BlockRef
from cluster.sampling_params import SamplingParams

SCOPE_KEY_BYTES = 16
# Blocks that finished prompts hold until their decode worker has acknowledged. Above this share of the pool the link or
# a peer is the bottleneck: taking more on would only make everybody wait inside, where no router sees it.
MAX_PINNED_SHARE = 0.5
OVERLOAD_RETRY_AFTER_S = 0.25


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """What the model and the pool can hold, and what the decode worker lets be on its way to it."""

    vocab_size: int
    max_model_len: int
    block_tokens: int
    total_blocks: int
    max_credit_bytes: int


@dataclass(frozen=True, slots=True)
class CheckedPrefill:
    """A request within all limits."""

    token_ids: npt.NDArray[np.int32]
    sampling: SamplingParams
    have_tokens: int
    destination: tuple[BlockRef, ...]  # for tokens from have_tokens on
    num_generated: int
    priority: int
    deadline_s: float
    idle_s: float
    credit_bytes: int
    max_credit_bytes: int  # that the decode worker's credit may come to while nothing has landed
    scope_key: bytes
    traceparent: str = ""  # empty: no trace


def check_prefill(request: handoff_pb2.PrefillRequest, limits: PrefillLimits) -> CheckedPrefill:
    """Raises `InvalidRequest` or `ContextLengthExceeded`, naming the field."""
    if len(request.key.transfer_id) != TRANSFER_ID_BYTES or request.key.epoch < 1:
        raise InvalidRequest("the transfer's key is malformed", param="key")
    if len(request.scope.scope_key) not in (0, SCOPE_KEY_BYTES):
        raise InvalidRequest(f"scope_key has {len(request.scope.scope_key)} bytes, must be 16", param="scope")
    if request.scope.lora_name:
        raise InvalidRequest(f"no adapter {shown(request.scope.lora_name)} is loaded", param="scope.lora_name")
    if request.num_generated_tokens >= len(request.token_ids) > 0:
        raise InvalidRequest("more tokens are said to be generated than there are", param="num_generated_tokens")
    if not request.deadline_ms or not request.credit_bytes:
        raise InvalidRequest("deadline_ms and credit_bytes must be above 0", param="deadline_ms")
    if request.credit_bytes > limits.max_credit_bytes:
        raise InvalidRequest(
            f"credit_bytes is {request.credit_bytes}, the decode worker's own limit is {limits.max_credit_bytes}",
            param="credit_bytes",
        )
    token_ids = _checked_token_ids(request, limits)
    _check_destination(request, limits)
    return CheckedPrefill(
        token_ids=token_ids,
        sampling=SamplingParams.from_proto(request.sampling).checked(limits.vocab_size),
        have_tokens=request.have_tokens,
        destination=tuple(BlockRef(BlockId(ref.block), ref.generation) for ref in request.destination),
        num_generated=request.num_generated_tokens,
        priority=request.priority,
        deadline_s=request.deadline_ms / 1000,
        idle_s=request.idle_ms / 1000,
        credit_bytes=request.credit_bytes,
        max_credit_bytes=limits.max_credit_bytes,
        scope_key=request.scope.scope_key,
        traceparent=request.traceparent,
    )


def check_load(waiting: int, max_waiting: int, pinned_blocks: int, limits: PrefillLimits) -> None:
    """Raises `ServerOverloaded` when the queue is full or too much of the pool waits for acknowledgements."""
    if waiting >= max_waiting:
        raise ServerOverloaded(
            f"{waiting} prompts wait here already", retry_after_s=OVERLOAD_RETRY_AFTER_S, stage="prefill"
        )
    if pinned_blocks > MAX_PINNED_SHARE * limits.total_blocks:
        raise ServerOverloaded(
            f"{pinned_blocks} of {limits.total_blocks} KV blocks wait to be sent or acknowledged",
            retry_after_s=OVERLOAD_RETRY_AFTER_S,
            stage="prefill",
        )


def _checked_token_ids(request: handoff_pb2.PrefillRequest, limits: PrefillLimits) -> npt.NDArray[np.int32]:
    token_ids = np.fromiter(request.token_ids, np.int32, len(request.token_ids))
    if len(token_ids) == 0:
        raise InvalidRequest("the prompt has no tokens", param="token_ids")
    if len(token_ids) >= limits.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {len(token_ids)} tokens, this worker's model takes {limits.max_model_len}",
            param="token_ids",
        )
    outside = (token_ids < 0) | (token_ids >= limits.vocab_size)
    if outside.any():
        wrong = int(token_ids[int(outside.argmax())])
        raise InvalidRequest(
            f"token id {wrong} is not in [0, {limits.vocab_size})", param="token_ids", code="invalid_token_id"
        )
    return token_ids


def _check_destination(request: handoff_pb2.PrefillRequest, limits: PrefillLimits) -> None:
    num_tokens = len(request.token_ids)
    if request.have_tokens % limits.block_tokens or request.have_tokens >= num_tokens:
        raise InvalidRequest(
            f"have_tokens is {request.have_tokens}: must be a multiple of {limits.block_tokens} below {num_tokens}",
            param="have_tokens",
        )
    wanted = math.ceil((num_tokens - request.have_tokens) / limits.block_tokens)
    if len(request.destination) != wanted:
        raise InvalidRequest(
            f"{len(request.destination)} destination blocks for {wanted} blocks of tokens", param="destination"
        )
    if len({ref.block for ref in request.destination}) != wanted:
        raise InvalidRequest("a destination block is named twice", param="destination")
