"""The trained heads that are shipped, on the default model in float32: they guess well, and change no token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.errors import StartupError
from cluster.sampling_params import SamplingParams
from cluster.worker_settings import WorkerSettings
from decode_worker.speculation.drafter_file import SHIPPED_DIR, read_drafter
from decode_worker.speculation.speculator import DraftingSpeculator
from decode_worker.speculation.trained import open_trained
from engine.block_pool import BlockPool
from engine.drafting import Speculator
from engine.engine import Engine
from engine.model_executor import ModelExecutor
from engine.request import EngineLimits
from engine.runner_factory import BuiltRunner, build_runner
from tests.engine.engine_bench import DEADLINE_S, Collector, make_request

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

REFERENCE = json.loads((Path(__file__).parents[1] / "exactness" / "greedy_reference.json").read_text())
CHATS: list[list[int]] = [row["prompt"] for row in REFERENCE if 20 < len(row["prompt"]) < 200][-3:]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def settings(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> WorkerSettings:
    return WorkerSettings(
        worker_id="shipped", model=str(default_model_path), listen="unix:unused", num_kv_blocks=64, max_model_len=256,
        runtime_dir=tmp_path_factory.mktemp("runtime"), dtype="float32", max_sequences=8,
    )  # fmt: skip


@pytest.fixture(scope="module")
def built(settings: WorkerSettings) -> BuiltRunner:
    return build_runner(settings)


def tokens_with(built: BuiltRunner, settings: WorkerSettings, speculator: Speculator | None) -> list[list[int]]:
    limits = EngineLimits(max_model_len=built.max_model_len, max_sequences=8, max_batch_tokens=64)
    pool = BlockPool(built.memory.num_blocks, settings.block_tokens, built.config.fingerprint)
    taps = () if speculator is None else speculator.tap_layers
    executor = ModelExecutor(built.runner, limits, settings.block_tokens, built.memory, tap_layers=taps)
    engine = Engine(executor, pool, limits, speculator=speculator)
    sink = Collector(deadline_s=10 * DEADLINE_S)
    engine.start(sink)
    kinds = [{"temperature": 0.0}, {"temperature": 0.7, "seed": 5}]
    requests = [(prompt, kind) for prompt in CHATS for kind in kinds]
    try:
        for index, (prompt, kind) in enumerate(requests):
            sampling = SamplingParams(max_tokens=NUM_TOKENS, **kind)  # type: ignore[arg-type]
            engine.submit(make_request(f"r{index}", prompt, sampling=sampling))
        for index in range(len(requests)):
            sink.end(f"r{index}")
    finally:
        engine.stop(DEADLINE_S)
    return [sink.tokens(f"r{index}") for index in range(len(requests))]


@pytest.fixture(scope="module")
def plain(built: BuiltRunner, settings: WorkerSettings) -> list[list[int]]:
    return tokens_with(built, settings, None)


@pytest.mark.parametrize(("kind", "least_acceptance"), [("eagle", 0.3), ("medusa", 0.15)])
def test_tokens_are_those_without_drafts_and_many_guesses_hold(
    kind: str, least_acceptance: float, built: BuiltRunner, settings: WorkerSettings, plain: list[list[int]]
) -> None:
    chosen = settings.model_copy(update={"speculation": kind, "num_drafts": 3})
    # No gate: whether guessing pays on this machine is not the question.
    speculator = DraftingSpeculator({kind: open_trained(kind, chosen, built.config)}, (kind,), 3, None)  # type: ignore[arg-type]
    assert tokens_with(built, chosen, speculator) == plain
    counters = speculator.counters()
    assert counters["speculation_proposed_at_1"] > 20
    assert counters["speculation_accepted_at_1"] / counters["speculation_proposed_at_1"] > least_acceptance


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_shipped_heads_belong_to_the_default_model_and_say_how_they_were_trained(kind: str, built: BuiltRunner) -> None:
    path = SHIPPED_DIR / f"SmolLM2-135M-Instruct.{kind}.safetensors"
    assert path.stat().st_size < 15_000_000
    file = read_drafter(path, kind, built.config.fingerprint)  # type: ignore[arg-type]
    report = json.loads(file.notes)
    assert report == json.loads(path.with_suffix(".json").read_text())
    assert report["coverage"]["held_out"] > 0.9
    with pytest.raises(StartupError, match="another target"):
        read_drafter(path, kind, "another")  # type: ignore[arg-type]
