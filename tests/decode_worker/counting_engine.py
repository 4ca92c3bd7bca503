"""A deterministic engine with a real thread: the Protocol of `engine.request`, arithmetic instead of a model.

The token at position p of a prompt is `(sum(prompt) + p) % vocab_size`. Steps run as permits are given, so a test
decides how far the engine is without sleeping.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.errors import ServerOverloaded
from cluster.identity import RequestId
from engine.request import BlockCensus, EngineLoad, EngineRequest, FinishReason, OutputSink, SequenceOutput

VOCAB_SIZE = 1000
UNLIMITED_STEPS = 10**9


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    return [(sum(prompt) + len(prompt) + index) % VOCAB_SIZE for index in range(num_tokens)]


@dataclass
class _Sequence:
    request: EngineRequest
    tokens: list[int] = field(default_factory=list)
    is_cancelled: bool = False


class CountingEngine:
    """`permit(n)` lets n more steps run; every running sequence gets one token a step."""

    def __init__(self, *, steps: int = UNLIMITED_STEPS, max_waiting: int = 1000) -> None:
        self.submitted: list[EngineRequest] = []
        self.cancelled: list[RequestId] = []
        self.released: list[RequestId] = []
        self._max_waiting = max_waiting
        self._permits = steps
        self._running: dict[RequestId, _Sequence] = {}
        self._changed = threading.Condition()
        self._is_stopped = False
        self._sink: OutputSink | None = None
        self._thread = threading.Thread(target=self._run, name="counting-engine", daemon=True)

    def start(self, sink: OutputSink) -> None:
        self._sink = sink
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        with self._changed:
            if len(self._running) >= self._max_waiting:
                raise ServerOverloaded("the engine's queue is full")
            self.submitted.append(request)
            self._running[request.request_id] = _Sequence(request)
            self._changed.notify_all()

    def cancel(self, request_id: RequestId) -> None:
        with self._changed:
            self.cancelled.append(request_id)
            if request_id in self._running:
                self._running[request_id].is_cancelled = True
            self._changed.notify_all()

    def release(self, request_id: RequestId) -> None:
        with self._changed:
            self.released.append(request_id)

    def permit(self, steps: int) -> None:
        with self._changed:
            self._permits += steps
            self._changed.notify_all()

    def load(self) -> EngineLoad:
        census = BlockCensus(total=100, free=100, owned=0, cached=0, quarantined=0)
        with self._changed:
            running = len(self._running)
        return EngineLoad(
            running=running,
            waiting=0,
            waiting_tokens=0,
            context_tokens=0,
            step_ms=1.0,
            tokens_per_s=0.0,
            batch_size=running,
            census=census,
        )

    def stop(self, timeout_s: float) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._is_stopped:
                    return
                outputs = self._step()
            if self._sink is not None and outputs:
                self._sink(outputs)

    def _has_work(self) -> bool:
        is_any_cancelled = any(sequence.is_cancelled for sequence in self._running.values())
        return self._is_stopped or is_any_cancelled or (bool(self._running) and self._permits > 0)

    def _step(self) -> list[SequenceOutput]:
        outputs = [self._end_cancelled(sequence) for sequence in list(self._running.values()) if sequence.is_cancelled]
        if self._permits > 0 and self._running:
            self._permits -= 1
            outputs += [self._advance(sequence) for sequence in list(self._running.values())]
        return outputs

    def _end_cancelled(self, sequence: _Sequence) -> SequenceOutput:
        del self._running[sequence.request.request_id]
        return SequenceOutput(sequence.request.request_id, (), finish_reason=FinishReason.CANCELLED)

    def _advance(self, sequence: _Sequence) -> SequenceOutput:
        request = sequence.request
        prompt = [int(token_id) for token_id in request.token_ids]
        num_before = request.num_generated
        token_id = expected_tokens(prompt, len(sequence.tokens) + 1)[-1]
        sequence.tokens.append(token_id)
        finish_reason = None
        if num_before + len(sequence.tokens) >= request.sampling.max_tokens:
            finish_reason = FinishReason.LENGTH
            del self._running[request.request_id]
        return SequenceOutput(request.request_id, (token_id,), finish_reason=finish_reason)
