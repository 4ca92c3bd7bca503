"""Speculation on the default model in float32: tokens equal those without, and the worker's own way of opening it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.errors import StartupError
from cluster.identity import RequestId
from cluster.sampling_params import SamplingParams
from cluster.worker_settings import WorkerSettings
from decode_worker.speculation.draft import Drafter
from decode_worker.speculation.draft_model import open_draft_model
from decode_worker.speculation.ngram import NgramDrafter
from decode_worker.speculation.opening import open_speculator
from decode_worker.speculation.speculator import DraftingSpeculator
from decode_worker.speculation.suffix import SuffixDrafter
from engine.block_pool import BlockPool
from engine.draft import ROOT, Draft
from engine.drafting import Speculator
from engine.engine import Engine
from engine.model_executor import ModelExecutor
from engine.request import EngineLimits
from engine.runner_factory import BuiltRunner, build_runner
from engine.swap_space import SwapSpace
from tests.engine.engine_bench import DEADLINE_S, Collector, make_request
from tests.engine.tiny_models import random_model, save_gguf

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

REFERENCE = Path(__file__).parents[1] / "exactness" / "greedy_reference.json"
PROMPTS: list[list[int]] = [row["prompt"] for row in json.loads(REFERENCE.read_text())][:3]
COPIED = [*PROMPTS[0][:12]] * 4  # repeats itself, and the model goes on with it
NUM_TOKENS = 32


class JunkDrafter(NgramDrafter):
    """Always guesses, from what the model has said; rarely right."""

    name = "junk"

    def propose(self, request_id: object, num_drafts: int) -> Draft:
        return Draft.chain([17 + 31 * index for index in range(num_drafts)])


@pytest.fixture(scope="module")
def settings(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> WorkerSettings:
    return WorkerSettings(
        worker_id="speculation-test", model=str(default_model_path), listen="unix:unused",
        runtime_dir=tmp_path_factory.mktemp("runtime"), dtype="float32", num_kv_blocks=64, max_model_len=256,
    )  # fmt: skip


@pytest.fixture(scope="module")
def built(settings: WorkerSettings) -> BuiltRunner:
    return build_runner(settings)


@pytest.fixture(scope="module")
def plain(built: BuiltRunner, settings: WorkerSettings) -> list[list[int]]:
    return tokens_with(built, settings, None)


def tokens_with(
    built: BuiltRunner,
    settings: WorkerSettings,
    speculator: Speculator | None,
    *,
    num_blocks: int = 64,
    swap: SwapSpace | None = None,
    counters: dict[str, float] | None = None,
    max_tokens: int = NUM_TOKENS,
) -> list[list[int]]:
    pool = BlockPool(num_blocks, settings.block_tokens, built.config.fingerprint)
    limits = EngineLimits(max_model_len=built.max_model_len, max_sequences=8, max_batch_tokens=64)
    executor = ModelExecutor(built.runner, limits, settings.block_tokens, built.memory)
    engine = Engine(executor, pool, limits, speculator=speculator, swap=swap)
    sink = Collector(deadline_s=10 * DEADLINE_S)
    engine.start(sink)
    kinds = [{"temperature": 0.0}, {"temperature": 0.7, "seed": 5}]
    prompts = [(prompt, kind) for prompt in (*PROMPTS, COPIED) for kind in kinds]
    try:
        for index, (prompt, kind) in enumerate(prompts):
            sampling = SamplingParams(max_tokens=max_tokens, **kind)  # type: ignore[arg-type]
            engine.submit(make_request(f"r{index}", prompt, sampling=sampling))
        for index in range(len(prompts)):
            sink.end(f"r{index}")
    finally:
        engine.stop(DEADLINE_S)
    if counters is not None:
        counters.update(engine.counters())
    return [sink.tokens(f"r{index}") for index in range(len(prompts))]


def test_s10_tokens_in_float32_are_those_without_drafts(
    built: BuiltRunner, settings: WorkerSettings, plain: list[list[int]]
) -> None:
    junk = DraftingSpeculator({"junk": JunkDrafter()}, ("junk",), 4, None)
    assert tokens_with(built, settings, junk) == plain
    drafters: tuple[Drafter, ...] = (NgramDrafter(), SuffixDrafter())
    for drafter in drafters:
        speculator = DraftingSpeculator({drafter.name: drafter}, (drafter.name,), 4, None)
        assert tokens_with(built, settings, speculator) == plain
        assert speculator.counters()["speculation_drafts_accepted"] > 0
    # Whether the gate lets anything through depends on this machine's step costs; the tokens do not.
    opened = open_speculator(settings.model_copy(update={"speculation": "auto"}), built)
    assert opened is not None
    assert tokens_with(built, settings, opened) == plain


class BushyDrafter(SuffixDrafter):
    """The suffix drafter's guesses, each beside two others that nobody means, before and after it."""

    name = "bushy"

    def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        token_ids: list[int] = []
        parents: list[int] = []
        parent = ROOT
        for token_id in super().propose(request_id, num_drafts // 3).token_ids:
            token_ids += [token_id + 1 if token_id < 1000 else token_id - 1, token_id, (token_id + 500) % 49000]
            parents += [parent] * 3
            parent = len(token_ids) - 2
        return Draft(tuple(token_ids), tuple(parents))


@pytest.mark.parametrize("way", ["restart", "swap"])
def test_tokens_in_float32_survive_preemption_with_trees(
    built: BuiltRunner, settings: WorkerSettings, way: str, plain: list[list[int]]
) -> None:
    speculator = DraftingSpeculator({"bushy": BushyDrafter()}, ("bushy",), 15, None)
    swap = SwapSpace(built.memory, built.memory.layout.block_bytes, 2**28 if way == "swap" else 0)
    counters: dict[str, float] = {}
    assert tokens_with(built, settings, speculator, num_blocks=12, swap=swap, counters=counters) == plain
    assert counters["speculation_drafts_accepted"] > 0
    assert counters["preemptions"] > 0
    assert (counters["preemptions_swapped"] > 0) == (way == "swap")


def test_s34_a_drafter_that_cannot_run_fails_at_the_start(
    built: BuiltRunner, settings: WorkerSettings, tmp_path: Path
) -> None:
    assert open_speculator(settings, built) is None
    draft = settings.model_copy(update={"speculation": "draft"})
    with pytest.raises(StartupError, match="name one with --draft-model"):
        open_speculator(draft, built)
    other = save_gguf(random_model("llama"), tmp_path / "tiny.gguf")
    with pytest.raises(StartupError, match=r"has 160 tokens and the model 49152: take one of the same"):
        open_speculator(draft.model_copy(update={"draft_model": str(other)}), built)
    alike = save_gguf(random_model("llama", vocab_size=49152), tmp_path / "alike.gguf")
    with pytest.raises(StartupError, match="token 0 is"):
        open_speculator(draft.model_copy(update={"draft_model": str(alike)}), built)


def test_rejection_with_a_drafter_that_draws_nothing_fails_at_the_start(
    built: BuiltRunner, settings: WorkerSettings
) -> None:
    for speculation in ("off", "auto", "suffix", "eagle"):
        with pytest.raises(StartupError, match="guesses that are drawn"):
            open_speculator(
                settings.model_copy(update={"verification": "rejection", "speculation": speculation}), built
            )


def test_by_rejection_the_model_itself_is_never_rejected(
    built: BuiltRunner, settings: WorkerSettings, plain: list[list[int]]
) -> None:
    """Two runs of one law: p = q at every place, so each guess stays, and greedy tokens are those of plain decoding."""
    chosen = settings.model_copy(update={"draft_model": settings.model, "verification": "rejection"})
    own, draft = open_draft_model(chosen, built.config)
    speculator = DraftingSpeculator({"draft": own}, ("draft",), 4, None)
    said = tokens_with(built, settings, speculator, max_tokens=12)
    assert said[::2] == [tokens[:12] for tokens in plain[::2]]
    assert said[1::2] != [tokens[:12] for tokens in plain[1::2]], "drawn with noise of its own"
    counters = speculator.counters()
    assert counters["speculation_accepted_at_1"] > 0.98 * counters["speculation_proposed_at_1"] > 10
    draft.memory.close()


def test_the_model_itself_as_draft_model_is_always_right(
    built: BuiltRunner, settings: WorkerSettings, plain: list[list[int]]
) -> None:
    own, draft = open_draft_model(settings.model_copy(update={"draft_model": settings.model}), built.config)
    speculator = DraftingSpeculator({"draft": own}, ("draft",), 4, None)
    assert tokens_with(built, settings, speculator) == plain
    counters = speculator.counters()
    # Only the last guesses of a request are dropped: its length ends in the middle of them.
    assert counters["speculation_accepted_at_1"] == counters["speculation_proposed_at_1"] > 40
    draft.memory.close()
