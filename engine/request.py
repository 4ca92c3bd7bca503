"""What a worker hands to its engine and gets back: plain values, no sockets, no protobuf.

A decode worker submits either a whole prompt (local prefill) or a prompt whose KV has landed; a prefill worker submits
a prompt with `hold_blocks`, listens to its KV being written, and releases the blocks after the transfer.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cluster.identity import BlockRef, RequestId
from cluster.sampling_params import SamplingParams


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    logprob: float
    rank: int  # 1 is the most likely


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    chosen: TopLogprob
    top: tuple[TopLogprob, ...] = ()


class KvListener(Protocol):
    """Hears of one request's KV being written. Called from the engine thread; must not block."""

    def blocks_allocated(self, blocks: Sequence[BlockRef], cached_tokens: int) -> None:
        """The request was scheduled: its block table for the whole prompt; the first `cached_tokens` are valid now."""
        ...

    def chunk_started(self, first_token: int, num_tokens: int) -> None: ...

    def layer_written(self, layer: int) -> None:
        """Layer `layer` of the current chunk is in the pool."""
        ...

    def chunk_finished(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LandedPrompt:
    """A prompt whose KV arrived and verified: `blocks` hold it (and the look-ahead); the first token is known."""

    blocks: tuple[BlockRef, ...]
    first_token_id: int
    first_logprobs: PositionLogprobs | None
    cached_tokens: int  # what usage reports


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence for the engine."""

    request_id: RequestId
    token_ids: npt.NDArray[np.int32]  # [n] prompt, with tokens generated elsewhere at its end
    sampling: SamplingParams
    scope_key: bytes  # seeds the block hashes: tenants cannot meet
    num_generated: int = 0  # this many of token_ids' tail were generated (migration)
    priority: int = 0  # lower runs first
    deadline_s: float = 0.0  # on the engine's clock; 0 is none
    landed: LandedPrompt | None = None
    # Prefill worker: end after the first token and keep the blocks until `Engine.release`.
    hold_blocks: bool = False
    kv_listener: KvListener | None = None


class SequenceOutput(NamedTuple):
    """What one step gave one sequence. Never empty: new tokens, an end, or both."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()  # one for each token, when asked for
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()  # with the first token, when asked for
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # it is also the last of `token_ids`, unless a landed first token ended it all
    error: str = ""  # with FinishReason.ERROR
    cached_tokens: int = 0  # with the first token
    queued_s: float = 0.0  # with the first token: submit to first scheduled
    compute_s: float = 0.0  # with the first token: first scheduled to sampled


@dataclass(frozen=True, slots=True)
class BlockCensus:
    """Where every block is. `total == free + owned + cached + quarantined`, always."""

    total: int
    free: int
    owned: int
    cached: int  # in the prefix cache and referenced by nobody: evictable
    quarantined: int

    @property
    def conservation_error(self) -> int:
        return self.total - self.free - self.owned - self.cached - self.quarantined


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot for heartbeats, metrics and routing."""

    running: int
    waiting: int
    waiting_tokens: int
    context_tokens: int
    step_ms: float  # moving average
    tokens_per_s: float  # moving average of generated tokens
    batch_size: int  # sequences in the last step
    census: BlockCensus
    prefill_share: float = 0.0  # of the time of steps with decodes, for prompts; 0: prompts take whole steps
    restore_ms_per_block: float = 0.0  # from a lower tier; 0: there is none


# Called from the engine thread once for each step that gave anything; must not block.
OutputSink = Callable[[Sequence[SequenceOutput]], None]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of one engine."""

    max_batch_tokens: int = 512  # token budget of a step
    max_sequences: int = 64  # sequences in a step
    max_waiting: int = 256  # bound of the waiting queue: beyond it `submit` raises ServerOverloaded
    max_model_len: int = 2048
    watermark_blocks: int = 0  # kept free at admission
    long_prefill_token_threshold: int = 0  # 0: no bound on one prompt's share of a step
    max_partial_prefills: int = 2


class ServingEngine(Protocol):
    """An engine on its own thread. All methods are safe to call from any thread and return at once.

    Implementations: `engine.engine.Engine` (a model) and `engine.mock_engine.MockEngine` (time from a timing model).
    """

    def start(self, sink: OutputSink) -> None: ...

    def submit(self, request: EngineRequest) -> None:
        """Queues a request. Raises `ServerOverloaded`, `RequestExceedsKvCapacity`, `ContextLengthExceeded`,
        `InvalidRequest`. Ownership of `landed.blocks` passes to the engine on success only."""
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Ends a request within one step with FinishReason.CANCELLED; unknown or finished ids change nothing."""
        ...

    def release(self, request_id: RequestId) -> None:
        """Gives back the blocks of a finished `hold_blocks` request (idempotent)."""
        ...

    def load(self) -> EngineLoad: ...

    def stop(self, timeout_s: float) -> None:
        """Ends the thread; running requests end with FinishReason.CANCELLED."""
        ...
