"""The mock engine keeps the engine's promises and the timing model's times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cluster.errors import InvalidRequest
from cluster.identity import BlockHash, BlockRef
from engine.block_pool import BlockPool
from engine.mock_engine import MockEngine, StepTiming
from engine.request import EngineLimits, FinishReason, LandedPrompt
from tests.engine.engine_bench import DEADLINE_S, Collector, make_request

TIMING = StepTiming(prefill=(5.0, 0.1, 0.0001), decode=(10.0, 0.5, 0.001))
VOCAB = 1000


class VirtualTime:
    """Sleeping moves the clock; nothing waits."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Events:
    def __init__(self) -> None:
        self.num_stored = 0

    def stored(self, parent: BlockHash | None, hashes: Sequence[BlockHash]) -> None:
        self.num_stored += len(hashes)

    def demoted(self, hashes: Sequence[BlockHash]) -> None:
        raise AssertionError("no lower tier")

    def removed(self, hashes: Sequence[BlockHash]) -> None:
        self.num_stored -= len(hashes)

    def cleared(self) -> None:
        self.num_stored = 0


class Mock:
    def __init__(self, **limits: Any) -> None:
        self.time = VirtualTime()
        self.events = Events()
        self.pool = BlockPool(200, 16, "mock", events=self.events)
        self.limits = EngineLimits(**{"max_batch_tokens": 256, "max_model_len": 2048, **limits})
        self.engine = MockEngine(
            TIMING, self.pool, self.limits, vocab_size=VOCAB, num_layers=4, clock=self.time.clock, sleep=self.time.sleep
        )
        self.sink = Collector()

    def __enter__(self) -> Mock:
        self.engine.start(self.sink)
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.stop(DEADLINE_S)
        assert self.pool.census().conservation_error == 0

    def elapsed_ms(self, request_id: str, prompt: Sequence[int], **fields: Any) -> float:
        started_s = self.time.now_s
        self.engine.submit(make_request(request_id, prompt, **fields))
        self.sink.end(request_id)
        return (self.time.now_s - started_s) * 1000


@pytest.mark.parametrize("max_batch_tokens", [64, 256, 1024])
def test_a_prompt_takes_the_models_time_however_it_is_cut(max_batch_tokens: int) -> None:
    with Mock(max_batch_tokens=max_batch_tokens) as mock:
        elapsed_ms = mock.elapsed_ms("r", range(600), max_tokens=1)
        assert elapsed_ms == pytest.approx(5.0 + 0.1 * 600 + 0.0001 * 600 * 300)


def test_a_cached_prefix_saves_its_time() -> None:
    with Mock() as mock:
        mock.elapsed_ms("cold", range(600), max_tokens=1)
        warm_ms = mock.elapsed_ms("warm", range(600), max_tokens=1)
        cached = mock.sink.of("warm")[0].cached_tokens
        assert cached == 592
        assert warm_ms == pytest.approx(5.0 + 0.1 * 8 + 0.0001 * 8 * (592 + 4))
        assert mock.events.num_stored == 37


def test_decodes_take_the_models_time() -> None:
    with Mock() as mock:
        whole_ms = mock.elapsed_ms("r", range(100), max_tokens=11)
        first_ms = 5.0 + 0.1 * 100 + 0.0001 * 100 * 50
        contexts = sum(100 + step for step in range(1, 11))
        assert whole_ms - first_ms == pytest.approx(10 * (10.0 + 0.5) + 0.001 * contexts)


def test_a_landed_prompt_goes_on_with_the_tokens_of_one_process() -> None:
    with Mock() as mock:
        mock.elapsed_ms("whole", range(40), max_tokens=6)
        whole = mock.sink.tokens("whole")
        refs = mock.pool.allocate(3)
        assert refs is not None
        mock.engine.submit(
            make_request("d", range(40), max_tokens=6, landed=LandedPrompt(tuple(refs), whole[0], None, 0))
        )
        mock.sink.end("d")
        assert mock.sink.tokens("d") == whole[1:]


def test_layers_are_told_one_by_one_in_the_steps_time() -> None:
    times: list[float] = []

    class Listener:
        def blocks_allocated(self, blocks: Sequence[BlockRef], cached_tokens: int) -> None: ...

        def chunk_started(self, first_token: int, num_tokens: int) -> None: ...

        def layer_written(self, layer: int) -> None:
            times.append(mock.time.now_s * 1000)

        def chunk_finished(self) -> None: ...

    with Mock() as mock:
        mock.elapsed_ms("r", range(100), hold_blocks=True, kv_listener=Listener())
        assert np.allclose(times, np.array([1, 2, 3, 4]) * (5.0 + 10.0 + 0.5) / 4)


def test_a_stop_token_never_ends_a_mock_request() -> None:
    with Mock() as mock:
        mock.elapsed_ms("free", range(10), max_tokens=4)
        mock.elapsed_ms("r", range(10), max_tokens=4, stop_token_ids=tuple(mock.sink.tokens("free")))
        assert mock.sink.end("r").finish_reason is FinishReason.LENGTH


def test_logprobs_are_refused() -> None:
    with Mock() as mock, pytest.raises(InvalidRequest, match="logprobs"):
        mock.engine.submit(make_request("r", range(10), logprobs=1))
