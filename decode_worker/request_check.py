"""A router's SubmitRequest as a request this worker is willing to run: every limit of the front is checked again here.

So no path into an engine skips the limits, whoever speaks gRPC to this worker. It knows the model's sizes and the
pool's size, not what is running.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NewType

import numpy as np
import numpy.typing as npt
from tandem.v1 import worker_pb2

from cluster.errors import ContextLengthExceeded, InvalidRequest, RequestExceedsKvCapacity, shown
from cluster.identity import RequestId
from cluster.sampling_params import SamplingParams

MAX_REQUEST_ID_CHARS = 128
MAX_PLACEMENTS = 16
SCOPE_KEY_BYTES = 16
MAX_DEADLINE_S = 600.0

# The name of one placement of a request inside this worker: a later placement of it is another request for the engine.
EngineId = NewType("EngineId", RequestId)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What the model and the pool can hold."""

    vocab_size: int
    max_model_len: int
    block_tokens: int
    total_blocks: int


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A request within all limits."""

    request_id: RequestId
    fence: int
    token_ids: npt.NDArray[np.int32]  # [n] prompt, then tokens that another worker generated
    num_generated: int
    sampling: SamplingParams
    placements: tuple[worker_pb2.PrefillPlacement, ...]
    allow_local_prefill: bool
    priority: int
    deadline_s: float  # remaining at arrival; 0 is none
    scope_key: bytes
    lora_name: str
    traceparent: str

    @property
    def engine_id(self) -> EngineId:
        return EngineId(RequestId(f"{self.request_id}/{self.fence}"))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def check_request(submit: worker_pb2.SubmitRequest, limits: WorkerLimits) -> AcceptedRequest:
    """Raises `InvalidRequest`, `ContextLengthExceeded` or `RequestExceedsKvCapacity`, naming the parameter."""
    _check_names(submit)
    token_ids = _checked_token_ids(submit, limits.vocab_size)
    sampling = SamplingParams.from_proto(submit.sampling).checked(limits.vocab_size)
    _check_lengths(len(submit.token_ids), len(submit.generated_token_ids), sampling.max_tokens, limits)
    return AcceptedRequest(
        request_id=RequestId(submit.request_id),
        fence=submit.fence,
        token_ids=token_ids,
        num_generated=len(submit.generated_token_ids),
        sampling=sampling,
        placements=tuple(submit.prefill),
        allow_local_prefill=submit.allow_local_prefill,
        priority=submit.priority,
        deadline_s=min(submit.deadline_ms / 1000, MAX_DEADLINE_S),
        scope_key=submit.scope.scope_key,
        lora_name=submit.scope.lora_name,
        traceparent=submit.traceparent,
    )


def _check_names(submit: worker_pb2.SubmitRequest) -> None:
    if not 1 <= len(submit.request_id) <= MAX_REQUEST_ID_CHARS or not submit.request_id.isprintable():
        raise InvalidRequest(f"request_id is {shown(submit.request_id)}", param="request_id")
    if len(submit.prefill) > MAX_PLACEMENTS:
        raise InvalidRequest(f"{len(submit.prefill)} placements, at most {MAX_PLACEMENTS}", param="prefill")
    if len(submit.scope.scope_key) not in (0, SCOPE_KEY_BYTES):
        raise InvalidRequest(f"scope_key has {len(submit.scope.scope_key)} bytes, must be 16", param="scope")
    if submit.scope.lora_name:
        raise InvalidRequest(f"no adapter {shown(submit.scope.lora_name)} is loaded", param="scope.lora_name")


def _checked_token_ids(submit: worker_pb2.SubmitRequest, vocab_size: int) -> npt.NDArray[np.int32]:
    token_ids = np.fromiter(submit.token_ids, np.int32, len(submit.token_ids))
    generated = np.fromiter(submit.generated_token_ids, np.int32, len(submit.generated_token_ids))
    if len(token_ids) == 0:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    both = np.concatenate((token_ids, generated))
    outside = (both < 0) | (both >= vocab_size)
    if outside.any():
        wrong = int(both[int(outside.argmax())])
        raise InvalidRequest(f"token id {wrong} is not in [0, {vocab_size})", param="prompt", code="invalid_token_id")
    return both


def _check_lengths(num_prompt: int, num_generated: int, max_tokens: int, limits: WorkerLimits) -> None:
    if num_prompt + max_tokens > limits.max_model_len:
        raise ContextLengthExceeded(
            f"prompt has {num_prompt} tokens and max_tokens is {max_tokens}; "
            f"together they must be at most {limits.max_model_len}",
            param="max_tokens",
        )
    if num_generated >= max_tokens:
        raise InvalidRequest(
            f"{num_generated} tokens are generated already and max_tokens is {max_tokens}", param="generated_token_ids"
        )
    needed = math.ceil((num_prompt + max_tokens) / limits.block_tokens)
    if needed > limits.total_blocks:
        raise RequestExceedsKvCapacity(
            f"the request needs {needed} KV blocks of {limits.block_tokens} tokens, this worker has "
            f"{limits.total_blocks}",
            param="max_tokens",
        )
