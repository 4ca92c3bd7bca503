"""EAGLE and Medusa in the engine: whatever they guess, the tokens are those of the model alone, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cluster.sampling_params import SamplingParams
from decode_worker.speculation.draft import Drafter
from decode_worker.speculation.eagle import BLOCKS_PER_CONTEXT, EagleDrafter
from decode_worker.speculation.eagle_layer import open_eagle_layer
from decode_worker.speculation.medusa import MedusaDrafter
from decode_worker.speculation.speculator import DraftingSpeculator
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.model_executor import ModelExecutor
from engine.native_runner import NativeRunner
from engine.request import EngineLimits
from tests.decode_worker.speculation.trained_files import eagle_file, medusa_file, random_eagle
from tests.engine.engine_bench import DEADLINE_S, Collector, make_request
from tests.engine.native_model import SMALL_LLAMA, RandomWeights, poisoned_memory

BLOCK_TOKENS = 4
TAPS = (0, 1)
WEIGHTS = RandomWeights(SMALL_LLAMA)
EMBEDDING = WEIGHTS.tensor("model.embed_tokens.weight")
NUM_CONTEXTS = 3  # fewer than requests at once
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.0, "frequency_penalty": 1.5},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2, "stop_token_ids": (1, 2, 3, 4, 5, 6)},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.0, "speculation": "off"},
    {"temperature": 1.0, "seed": 8, "min_p": 0.1, "logit_bias": {3: 2.0}},
]


def junk_eagle() -> Drafter:
    """Random weights, and the embedding as head: it guesses something at every step."""
    file = eagle_file(random_eagle(SMALL_LLAMA, TAPS), TAPS, 96)
    layer = open_eagle_layer(file, SMALL_LLAMA, EMBEDDING, EMBEDDING, NUM_CONTEXTS * BLOCKS_PER_CONTEXT)
    return EagleDrafter(layer, NUM_CONTEXTS, min_confidence=0.0, min_reach=0.0)


def junk_medusa() -> Drafter:
    file = medusa_file(SMALL_LLAMA, 96)
    norm = WEIGHTS.tensor("model.norm.weight")
    return MedusaDrafter(file, SMALL_LLAMA, EMBEDDING, norm, NUM_CONTEXTS, min_confidence=0.0)


def run(drafter: Drafter | None, *, num_blocks: int, chunk: int, at_once: int) -> tuple[list[list[int]], Any]:
    """Tokens of every kind of request; the counters of speculation, and what was said of each position."""
    speculator = None if drafter is None else DraftingSpeculator({drafter.name: drafter}, (drafter.name,), 4, None)
    memory = poisoned_memory(SMALL_LLAMA, dtype="float32", num_blocks=num_blocks, block_tokens=BLOCK_TOKENS)
    runner = NativeRunner(SMALL_LLAMA, WEIGHTS, memory, dtype="float32")
    limits = EngineLimits(
        max_model_len=128, max_sequences=at_once, max_batch_tokens=64, long_prefill_token_threshold=chunk
    )
    pool = BlockPool(num_blocks, BLOCK_TOKENS, "small")
    taps = () if speculator is None else speculator.tap_layers
    executor = ModelExecutor(runner, limits, BLOCK_TOKENS, memory, tap_layers=taps)
    engine = Engine(executor, pool, limits, speculator=speculator)
    sink = Collector()
    engine.start(sink)
    try:
        for index, kind in enumerate(KINDS):
            prompt = np.random.default_rng(index).integers(0, SMALL_LLAMA.vocab_size, 5 + 3 * index).tolist()
            sampling = SamplingParams(**{"max_tokens": 24, **kind})
            engine.submit(make_request(f"r{index}", prompt, sampling=sampling))
        for index in range(len(KINDS)):
            end = sink.end(f"r{index}")
            assert not end.error, end
    finally:
        engine.stop(DEADLINE_S)
    assert pool.census().conservation_error == 0
    runner.close()
    return [sink.tokens(f"r{index}") for index in range(len(KINDS))], (
        {} if speculator is None else speculator.counters()
    )


@pytest.mark.parametrize("make", [junk_eagle, junk_medusa])
@pytest.mark.parametrize(("num_blocks", "chunk", "at_once"), [(128, 64, 8), (128, 1, 1), (128, 17, 8), (30, 16, 8)])
def test_tokens_are_those_without_drafts(
    make: Callable[[], Drafter], num_blocks: int, chunk: int, at_once: int
) -> None:
    """Batch 1 and 8, chunks of 1, 16, 17, and a pool so small that sequences are preempted."""
    plain, _ = run(None, num_blocks=num_blocks, chunk=chunk, at_once=at_once)
    drafted, counters = run(make(), num_blocks=num_blocks, chunk=chunk, at_once=at_once)
    assert drafted == plain
    assert counters["speculation_drafts_proposed"] > 20


@pytest.mark.parametrize("make", [junk_eagle, junk_medusa])
def test_s31_a_prompt_from_the_prefix_cache_is_guessed_for_as_the_first_time(make: Callable[[], Drafter]) -> None:
    """They read decoded rows alone: rows that the cache spares are missed by nobody."""
    drafter = make()
    speculator = DraftingSpeculator({drafter.name: drafter}, (drafter.name,), 4, None)
    memory = poisoned_memory(SMALL_LLAMA, dtype="float32", num_blocks=64, block_tokens=BLOCK_TOKENS)
    runner = NativeRunner(SMALL_LLAMA, WEIGHTS, memory, dtype="float32")
    limits = EngineLimits(max_model_len=128, max_sequences=2, max_batch_tokens=64)
    executor = ModelExecutor(runner, limits, BLOCK_TOKENS, memory, tap_layers=speculator.tap_layers)
    engine = Engine(executor, BlockPool(64, BLOCK_TOKENS, "small"), limits, speculator=speculator)
    sink = Collector()
    engine.start(sink)
    prompt = np.random.default_rng(1).integers(0, SMALL_LLAMA.vocab_size, 40).tolist()
    counts = []
    try:
        for name in ("cold", "warm"):
            before = speculator.counters()
            engine.submit(make_request(name, prompt, sampling=SamplingParams(temperature=0.0, max_tokens=40)))
            assert not sink.end(name).error
            counts.append({key: value - before[key] for key, value in speculator.counters().items() if key in before})
    finally:
        engine.stop(DEADLINE_S)
    assert sink.of("warm")[0].cached_tokens > 30
    assert sink.tokens("cold") == sink.tokens("warm")
    proposed, accepted = "speculation_drafts_proposed", "speculation_drafts_accepted"
    assert counts[0][proposed] > 20
    assert [counts[1][key] for key in (proposed, accepted)] == [counts[0][key] for key in (proposed, accepted)]
    runner.close()


class RowsDrafter:
    """Guesses nothing; checks that each row's states come once, in order, beside the token that they chose."""

    name = "rows"
    tap_layers = (1,)

    def __init__(self) -> None:
        self.seen: dict[Any, dict[int, tuple[int, np.ndarray]]] = {}
        self.known: dict[Any, list[int]] = {}

    def begin(self, request_id: Any, token_ids: Any) -> None:
        self.known[request_id] = list(token_ids)

    def extend(self, request_id: Any, token_ids: Any) -> None:
        self.known[request_id] += token_ids

    def propose(self, request_id: Any, num_drafts: int) -> Any:
        from engine.draft import Draft

        return Draft.chain([(7 * len(self.known[request_id]) + index) % 50 for index in range(num_drafts)])

    def sampled(self, request_id: Any, position: int, token_ids: Any, taps: np.ndarray) -> None:
        rows = self.seen.setdefault(request_id, {})
        assert len(taps) == len(token_ids)
        for offset, token_id in enumerate(token_ids):
            assert position + offset not in rows, "a row came twice"
            rows[position + offset] = (token_id, taps[offset, 0].copy())

    def forget(self, request_id: Any) -> None: ...


def test_s16_each_row_of_hidden_states_belongs_to_its_token() -> None:
    """Last states through norm and head give the token at their position: drafts, chunks and prompt logprobs beside."""
    drafter = RowsDrafter()
    tokens, _ = run(drafter, num_blocks=30, chunk=16, at_once=8)
    norm = WEIGHTS.tensor("model.norm.weight")
    for index in (0, 4, 5):  # plain greedy ones
        prompt_len = 5 + 3 * index
        rows = drafter.seen[f"r{index}"]
        # All but the last token, at which the request ends.
        assert sorted(rows) == list(range(prompt_len, prompt_len + len(tokens[index]) - 1))
        for position, (token_id, state) in rows.items():
            assert token_id == tokens[index][position - prompt_len]
            hidden = torch.nn.functional.rms_norm(torch.from_numpy(state), state.shape, norm, SMALL_LLAMA.rms_norm_eps)
            assert int((EMBEDDING @ hidden).argmax()) == token_id
    assert "r6" not in drafter.seen, "a request without speculation has no rows"
