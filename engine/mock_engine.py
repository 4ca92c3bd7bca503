"""An engine without a model: the real scheduler, block pool, prefix cache and KV events; time from a timing model.

It hosts many workers on one laptop and gives the router, the autoscaler and the sweep something to measure. Tokens
are arithmetic on the sequence, so they repeat wherever the sequence is continued. It writes no KV.

    a prompt of u uncached tokens behind c cached ones   c0 + c1 u + c2 u (c + u/2), however it is cut into chunks
    the decodes of a step, B sequences with K tokens      alpha + beta B + gamma K
A step takes the sum of its chunks' shares and of its decodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Chunks
from dataclasses import dataclass

from cluster.errors import InvalidRequest
from cluster.sampling_params import NO_LOGPROBS
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.executor import StepResults
from engine.kv_tiering import KvTiering
from engine.request import EngineLimits, EngineRequest
from engine.sequence import Sequence
from engine.step import LayerCallback
from engine.step_plan import ScheduledChunk
from engine.waiting_queue import SchedulingPolicy

TOKEN_MULTIPLIER = 1103515245
POSITION_MULTIPLIER = 12345


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Coefficients in milliseconds, as a sweep fits them."""

    prefill: tuple[float, float, float]  # c0 ms, c1 ms/token, c2 ms/token^2
    decode: tuple[float, float, float]  # alpha ms, beta ms/sequence, gamma ms/token

    def step_s(self, chunks: Chunks[ScheduledChunk]) -> float:
        """How long a step with these chunks takes."""
        c0, c1, c2 = self.prefill
        alpha, beta, gamma = self.decode
        total_ms, num_decodes, context_tokens = 0.0, 0, 0
        for chunk in chunks:
            is_prompt_done = chunk.sequence.has_output or chunk.sequence.request.landed is not None
            if is_prompt_done and chunk.num_tokens == 1:  # a resumed sequence computes its tokens again
                num_decodes += 1
                context_tokens += chunk.first_token + chunk.num_tokens
                continue
            total_ms += c1 * chunk.num_tokens + c2 * chunk.num_tokens * (chunk.first_token + chunk.num_tokens / 2)
            total_ms += c0 * chunk.is_sampled  # once for each prompt
        if num_decodes:
            total_ms += alpha + beta * num_decodes + gamma * context_tokens
        return total_ms / 1000


def next_token(sequence: Sequence, vocab_size: int) -> int:
    """A function of the last token and its position; never a stop token, so a request runs to its length."""
    token_id = (sequence.last_token_id * TOKEN_MULTIPLIER + sequence.num_tokens * POSITION_MULTIPLIER) % vocab_size
    while token_id in sequence.request.sampling.stop_token_ids:
        token_id = (token_id + 1) % vocab_size
    return token_id


class MockExecutor:
    """Implements `StepExecutor`: sleeps instead of computing."""

    def __init__(self, timing: StepTiming, vocab_size: int, num_layers: int, sleep: Callable[[float], None]) -> None:
        self.vocab_size = vocab_size
        self.num_layers = num_layers
        self._timing = timing
        self._sleep = sleep

    def execute(self, chunks: Chunks[ScheduledChunk], layer_done: LayerCallback | None) -> StepResults:
        step_s = self._timing.step_s(chunks)
        if layer_done is None:
            self._sleep(step_s)
        else:
            for layer in range(self.num_layers):
                self._sleep(step_s / self.num_layers)
                layer_done(layer)
        return StepResults([next_token(chunk.sequence, self.vocab_size) for chunk in chunks if chunk.is_sampled])

    def copy_block(self, source: int, destination: int) -> None:
        """There is no KV."""

    def move_tokens(self, sources: Chunks[int], destinations: Chunks[int]) -> None:
        """There is no KV."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""


class MockEngine(Engine):
    """Implements `engine.request.ServingEngine`."""

    def __init__(
        self,
        timing: StepTiming,
        pool: BlockPool,
        limits: EngineLimits,
        *,
        vocab_size: int,
        num_layers: int,
        policy: SchedulingPolicy = SchedulingPolicy.PRIORITY,
        tiering: KvTiering | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        executor = MockExecutor(timing, vocab_size, num_layers, sleep)
        super().__init__(executor, pool, limits, policy=policy, tiering=tiering, clock=clock)

    def submit(self, request: EngineRequest) -> None:
        if request.sampling.logprobs != NO_LOGPROBS or request.sampling.prompt_logprobs != NO_LOGPROBS:
            raise InvalidRequest("the mock engine has no distribution to take logprobs from", param="logprobs")
        super().submit(request)
