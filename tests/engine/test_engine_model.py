"""The engine on the default model in float32: greedy tokens equal those of transformers, however they are scheduled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.sampling_params import SamplingParams
from cluster.worker_settings import WorkerSettings
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.model_executor import ModelExecutor
from engine.request import EngineLimits
from engine.runner_factory import build_runner
from tests.engine.engine_bench import DEADLINE_S, Collector, make_request

REFERENCE = Path(__file__).parents[1] / "exactness" / "greedy_reference.json"
NUM_TOKENS = 16
PROMPT_LENGTHS = (1, 7, 15, 16, 17, 33, 65, 129)
# A tie in the reference's own logits may fall either way.
NEAR_TIE = 1e-3

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

ROWS: list[dict[str, Any]] = [row for row in json.loads(REFERENCE.read_text()) if len(row["prompt"]) in PROMPT_LENGTHS]


@pytest.mark.parametrize(
    ("num_blocks", "limits"),
    [
        pytest.param(400, {"max_sequences": 1, "max_batch_tokens": 512}, id="alone"),
        pytest.param(400, {"max_sequences": 16, "max_batch_tokens": 512}, id="batched"),
        pytest.param(400, {"max_sequences": 8, "long_prefill_token_threshold": 17}, id="chunks-of-17"),
        pytest.param(16, {"max_sequences": 8, "max_batch_tokens": 64}, id="preempted"),
    ],
)
def test_greedy_tokens_equal_transformers(
    num_blocks: int, limits: dict[str, int], default_model_path: Path, tmp_path: Path
) -> None:
    settings = WorkerSettings(
        worker_id="engine-test", model=str(default_model_path), listen="unix:unused", runtime_dir=tmp_path,
        dtype="float32", num_kv_blocks=num_blocks, max_model_len=256,
    )  # fmt: skip
    built = build_runner(settings)
    pool = BlockPool(built.memory.num_blocks, settings.block_tokens, built.config.fingerprint)
    engine_limits = EngineLimits(**{"max_model_len": built.max_model_len, **limits})
    executor = ModelExecutor(built.runner, engine_limits, settings.block_tokens, built.memory)
    engine = Engine(executor, pool, engine_limits)
    sink = Collector(deadline_s=10 * DEADLINE_S)
    engine.start(sink)
    try:
        for turn in ("cold", "warm"):
            for index, row in enumerate(ROWS):
                sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
                engine.submit(make_request(f"{turn}{index}", row["prompt"], sampling=sampling))
            for index, row in enumerate(ROWS):
                sink.end(f"{turn}{index}")
                assert_equal(sink.tokens(f"{turn}{index}"), row)
        assert pool.census().owned == 0
    finally:
        engine.stop(DEADLINE_S)
        built.memory.close()


def assert_equal(tokens: list[int], row: dict[str, Any]) -> None:
    for got, want, gap in zip(tokens, row["tokens"], row["gaps"], strict=False):
        if got != want:
            assert gap < NEAR_TIE, f"prompt of {len(row['prompt'])} tokens differs at a gap of {gap}"
            return
    assert len(tokens) == NUM_TOKENS
