"""Tokens are the model's own, bit for bit in float32, however they are decoded.

What varies: the drafter, the batch, the chunks, where the prompt is computed, what memory pressure does, what the
prefix cache holds. The runs are a covering array: every pair of values of two factors occurs in some run. Every run has
the same requests, one for each thing that a request may ask for, and all that is said of them is compared with what a
plain engine says of each request alone: tokens, log-probabilities, ends.

Then the mutants: each breaks one rule of speculation in the engine and must be seen by one run.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tandem.v1 import handoff_pb2

from cluster.identity import BlockRef, RequestId
from cluster.sampling_params import SamplingParams
from decode_worker.speculation.draft import Drafter
from decode_worker.speculation.draft_model import DraftModelDrafter
from decode_worker.speculation.eagle import BLOCKS_PER_CONTEXT, EagleDrafter
from decode_worker.speculation.eagle_layer import open_eagle_layer
from decode_worker.speculation.medusa import MedusaDrafter
from decode_worker.speculation.mtp import open_mtp_layer
from decode_worker.speculation.ngram import NgramDrafter
from decode_worker.speculation.speculator import DraftingSpeculator
from decode_worker.speculation.suffix import SuffixDrafter
from engine.block_pool import BlockPool
from engine.draft import ROOT, Draft
from engine.drafting import Accepted, verify_match
from engine.engine import Engine
from engine.grammar import GrammarState
from engine.grammar_compiler import GrammarCompiler
from engine.model_executor import ModelExecutor
from engine.native_runner import NativeRunner
from engine.request import EngineLimits, EngineRequest, FinishReason, LandedPrompt, PositionLogprobs, SequenceOutput
from engine.result_taker import ResultTaker
from engine.sampler import SampleRow
from engine.stop_rules import StopDecision, apply_stop_rules
from engine.swap_space import SwapCosts, SwapSpace
from engine.weights.mtp_names import find_mtp_block
from tests.decode_worker.speculation.trained_files import eagle_file, medusa_file, random_eagle
from tests.engine.engine_bench import Collector
from tests.engine.hash_runner import VOCAB
from tests.engine.letter_tokenizer import END_IDS, letter_tokenizer, text_of
from tests.engine.native_model import SMALL_LLAMA, RandomWeights, poisoned_memory

BLOCK_TOKENS = 4
NUM_DRAFTS = 6
MAX_TOKENS = 20
DEADLINE_S = 60.0
LOGPROB_TOLERANCE = 1e-4
MODEL = replace(SMALL_LLAMA, vocab_size=VOCAB, tie_embeddings=False)
WEIGHTS = RandomWeights(MODEL)
EMBEDDING = WEIGHTS.tensor("model.embed_tokens.weight")
HEAD = WEIGHTS.tensor("lm_head.weight")
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
REPEATED = [9, 4, 17, 30, 9, 4, 17, 30, 9, 4, 17, 30, 9, 4]
ENDS = tuple(sorted(END_IDS))

# A prompt and what is asked: one request for each, the last three being choices of one prompt.
ASKED: list[tuple[list[int], dict[str, Any]]] = [
    (REPEATED, {"temperature": 0.0}),
    ([5], {"seed": 11}),
    ([3, 8, 2] * 6, {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02, "seed": 2}),
    ([1, 2, 3, 4], {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5}),
    ([7] * 17, {"seed": 4, "repetition_penalty": 1.3, "logit_bias": {3: 2.0, 7: -100.0}}),
    ([6, 5, 4], {"temperature": 0.9, "seed": 9, "stop_token_ids": (1, 2, 3, 10, 11, 39)}),
    ([12, 13] * 8, {"temperature": 0.8, "seed": 1, "logprobs": 2, "top_k": 9}),
    ([20, 21, 22, 23, 24, 25, 26, 27, 28], {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 0}),
    ([30, 31], {"seed": 6, "json_schema": SCHEMA, "stop_token_ids": ENDS}),
    ([32] * 33, {"temperature": 0.0, "speculation": "off", "min_tokens": 4, "stop_token_ids": (5, 6, 7)}),
    *((REPEATED[:11], {"seed": 8, "choice_index": choice}) for choice in range(3)),
]
REQUESTS = [(prompt, SamplingParams(**{"max_tokens": MAX_TOKENS, **asked})) for prompt, asked in ASKED]


class Said(NamedTuple):
    """All that an engine says of one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    prompt_logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    stop_token_id: int | None


class Way(NamedTuple):
    drafter: str
    at_once: int
    chunk: int
    prompt: str  # "here" | "landed"
    memory: str  # "enough" | "restart" | "swap"
    cache: str  # "cold" | "warm"


FACTORS: dict[str, tuple[Any, ...]] = {
    "drafter": ("off", "ngram", "suffix", "draft", "medusa", "eagle", "mtp", "cascade", "junk", "bushy"),
    "at_once": (1, 8),
    "chunk": (1, 16, 17),
    "prompt": ("here", "landed"),
    "memory": ("enough", "restart", "swap"),
    "cache": ("cold", "warm"),
}


def covering_array(factors: dict[str, tuple[Any, ...]], seed: int = 995) -> list[tuple[Any, ...]]:
    """Rows in which every pair of values of two factors occurs; each takes the best of many random candidates.

    With this seed there are rows in which sequences are preempted, by restart and by swap, beside trained drafters.
    """
    randomness = random.Random(seed)
    columns = list(factors.values())
    spans = list(itertools.combinations(range(len(columns)), 2))
    missing = {(a, b, x, y) for a, b in spans for x in columns[a] for y in columns[b]}
    rows: list[tuple[Any, ...]] = []
    while missing:
        a, b, x, y = min(missing, key=str)
        candidates = [tuple(map(randomness.choice, columns)) for _ in range(200)]
        candidates = [tuple({a: x, b: y}.get(index, value) for index, value in enumerate(row)) for row in candidates]
        covered = [{(i, j, row[i], row[j]) for i, j in spans} & missing for row in candidates]
        row, gained = max(zip(candidates, covered, strict=True), key=lambda pair: len(pair[1]))
        rows.append(row)
        missing -= gained
    return rows


CASCADE = ("ngram", "eagle")  # whose guesses are one tree

WAYS = [Way(*row) for row in covering_array(FACTORS)]


# --- drafters -------------------------------------------------------------------------------------------------------


class Junk(NgramDrafter):
    """Always guesses, hardly ever right."""

    name = "junk"

    def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        return Draft.chain([(31 * index + 17) % VOCAB for index in range(num_drafts)])


class Bushy(DraftModelDrafter):
    """The model's own tokens between wrong siblings that stand before and behind them: the right branch is no chain."""

    name = "bushy"

    def propose_all(self, wanted: Sequence[tuple[RequestId, int]]) -> list[Draft]:
        drafts = super().propose_all([(request_id, (count + 2) // 3) for request_id, count in wanted])
        return [_with_siblings(draft).first(count) for draft, (_, count) in zip(drafts, wanted, strict=True)]


def _with_siblings(chain: Draft) -> Draft:
    token_ids: list[int] = []
    parents: list[int] = []
    parent = ROOT
    for token_id in chain.token_ids:
        right = len(token_ids) + 1
        token_ids += [(token_id + 1) % VOCAB, token_id, (token_id + 2) % VOCAB]
        parents += [parent] * 3
        parent = right
    return Draft(tuple(token_ids), tuple(parents))


@cache
def trained_file(kind: str) -> Any:
    return eagle_file(random_eagle(MODEL, (0, 1)), (0, 1), 40) if kind == "eagle" else medusa_file(MODEL, VOCAB // 2)


class MtpSource(RandomWeights):
    """The target's own first layer between random norms and a random projection, as a block that comes with it."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        draw = torch.Generator().manual_seed(7)
        size, prefix = MODEL.hidden_size, "mtp.layers.0."
        own = {name: tensor for name, tensor in self.tensors.items() if name.startswith("model.layers.0.")}
        self.tensors |= {prefix + name.removeprefix("model.layers.0."): tensor for name, tensor in own.items()}
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.tensors[f"mtp.{norm}.weight"] = 0.5 + torch.rand(size, generator=draw)
        self.tensors["mtp.fc.weight"] = torch.randn(size, 2 * size, generator=draw) / size**0.5

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items() if name.startswith("mtp.")}


@cache
def mtp_source() -> MtpSource:
    return MtpSource()


def own_model() -> NativeRunner:
    memory = poisoned_memory(MODEL, dtype="float32", num_blocks=80, block_tokens=3)
    return NativeRunner(MODEL, WEIGHTS, memory, dtype="float32")


def make_drafter(name: str) -> Drafter:
    if name == "draft":
        return DraftModelDrafter(own_model(), 80, 3, 240)
    if name == "bushy":
        return Bushy(own_model(), 80, 3, 240)
    if name == "eagle":
        layer = open_eagle_layer(trained_file("eagle"), MODEL, EMBEDDING, HEAD, 3 * BLOCKS_PER_CONTEXT)
        return EagleDrafter(layer, 3, min_confidence=0.0, min_reach=0.0)
    if name == "mtp":
        source = mtp_source()
        layer = open_mtp_layer(find_mtp_block("here", MODEL, source.shapes()), MODEL, source, 3 * BLOCKS_PER_CONTEXT)
        return EagleDrafter(layer, 3, name=name, min_confidence=0.0, min_reach=0.0)
    if name == "medusa":
        norm = WEIGHTS.tensor("model.norm.weight")
        return MedusaDrafter(trained_file("medusa"), MODEL, HEAD, norm, 3, min_confidence=0.0)
    makers: dict[str, Callable[[], Drafter]] = {
        "ngram": lambda: NgramDrafter(min_ngram=1),
        "suffix": lambda: SuffixDrafter(min_match=1),
        "junk": Junk,
    }
    return makers[name]()


# --- engines --------------------------------------------------------------------------------------------------------


@dataclass
class Listener:
    """Keeps the block table of a prompt that another engine computes."""

    blocks: Sequence[BlockRef] = ()

    def blocks_allocated(self, blocks: Sequence[BlockRef], cached_tokens: int) -> None:
        self.blocks = tuple(blocks)

    def chunk_started(self, first_token: int, num_tokens: int) -> None: ...

    def layer_written(self, layer: int) -> None: ...

    def chunk_finished(self) -> None: ...


class Bench:
    """One engine on the small model. Use as a context manager: every block must be back at the end."""

    def __init__(
        self,
        way: Way,
        grammars: GrammarCompiler,
        *,
        deadline_s: float = DEADLINE_S,
        dtype: str = "float32",
        verifies_trees: bool = True,
    ) -> None:
        num_blocks = 200 if way.memory == "enough" else 26
        self.memory = poisoned_memory(MODEL, dtype=dtype, num_blocks=num_blocks, block_tokens=BLOCK_TOKENS)
        self.runner = NativeRunner(MODEL, WEIGHTS, self.memory, dtype=dtype)
        self.pool = BlockPool(num_blocks, BLOCK_TOKENS, "small", on_block_freed=self.memory.poison)
        self.speculator = None
        if way.drafter != "off":
            names = CASCADE if way.drafter == "cascade" else (way.drafter,)
            drafters = {name: make_drafter(name) for name in names}
            self.speculator = DraftingSpeculator(drafters, names, NUM_DRAFTS, None, verifies_trees=verifies_trees)
        limits = EngineLimits(
            max_model_len=128, max_sequences=way.at_once, max_batch_tokens=64, long_prefill_token_threshold=way.chunk
        )
        swap = None
        if way.memory == "swap":
            swap = SwapSpace(self.memory, self.memory.layout.block_bytes, 2**30)
            swap._costs = SwapCosts(token_s=1.0, block_copy_s=0.0)  # computing is slow here, copying costs nothing
            swap.saw_step = lambda num_tokens, step_s: None  # type: ignore[method-assign]
        taps = () if self.speculator is None else self.speculator.tap_layers
        executor = ModelExecutor(self.runner, limits, BLOCK_TOKENS, self.memory, tap_layers=taps)
        self.engine = Engine(executor, self.pool, limits, speculator=self.speculator, swap=swap, grammars=grammars)
        self.sink = Collector(deadline_s)

    def __enter__(self) -> Bench:
        self.engine.start(self.sink)
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.stop(DEADLINE_S)
        if error[0] is None:
            census = self.pool.census()
            assert census.conservation_error == 0
            assert census.owned == 0, "blocks leaked"

    def submit(self, name: str, index: int, **fields: Any) -> None:
        prompt, sampling = REQUESTS[index]
        request = EngineRequest(
            RequestId(f"{name}{index}"), np.array(prompt, np.int32), sampling=sampling, scope_key=b"tenant", **fields
        )
        self.engine.submit(request)

    def outputs(self, name: str, index: int) -> list[SequenceOutput]:
        end = self.sink.end(f"{name}{index}")
        assert not end.error, end.error
        return self.sink.of(f"{name}{index}")


def equal(said: Sequence[Said], others: Sequence[Said]) -> bool:
    """Tokens and ends to the last one; log-probabilities to what the order of a tree's sums may change."""
    return all(
        one._replace(logprobs=(), prompt_logprobs=()) == other._replace(logprobs=(), prompt_logprobs=())
        and are_close(one.logprobs, other.logprobs)
        and are_close(one.prompt_logprobs, other.prompt_logprobs)
        for one, other in zip(said, others, strict=True)
    )


def are_close(said: Sequence[PositionLogprobs], others: Sequence[PositionLogprobs]) -> bool:
    flat, flat_others = (
        [(place, top.token_id, top.logprob) for place, each in enumerate(some) for top in (each.chosen, *each.top)]
        for some in (said, others)
    )
    return len(flat) == len(flat_others) and all(
        one[:2] == other[:2] and abs(one[2] - other[2]) < LOGPROB_TOLERANCE
        for one, other in zip(flat, flat_others, strict=True)
    )


def told(outputs: Sequence[SequenceOutput]) -> Said:
    return Said(
        tuple(token_id for output in outputs for token_id in output.token_ids),
        tuple(each for output in outputs for each in output.logprobs),
        tuple(each for output in outputs for each in output.prompt_logprobs),
        outputs[-1].finish_reason,
        outputs[-1].stop_token_id,
    )


def hand_over(source: Bench, target: Bench, name: str, index: int) -> list[SequenceOutput]:
    """A prompt computed by one engine lands in another one's pool; the first token is the source's output."""
    listener = Listener()
    source.submit(name, index, hold_blocks=True, kv_listener=listener)
    outputs = source.outputs(name, index)
    (first,) = outputs[-1].token_ids
    blocks = target.pool.allocate(len(listener.blocks))
    assert blocks is not None, "the pool is too small for the prompts that land at once"
    content = source.memory.save_blocks([ref.block for ref in listener.blocks])
    target.memory.restore_blocks([ref.block for ref in blocks], content)
    source.engine.release(RequestId(f"{name}{index}"))
    logprobs = outputs[-1].logprobs[0] if outputs[-1].logprobs else None
    target.submit(name, index, landed=LandedPrompt(tuple(blocks), first, logprobs, 0))
    return outputs


def run(way: Way, grammars: GrammarCompiler, *, deadline_s: float = DEADLINE_S) -> tuple[list[Said], dict[str, float]]:
    """What is said of each request, in this way; the engine's counters."""
    names = ["w", "r"] if way.cache == "warm" else ["r"]
    with Bench(way, grammars, deadline_s=deadline_s) as bench:
        for name in names:  # a second time everything is in the prefix cache
            if way.prompt == "here":
                for index in range(len(REQUESTS)):
                    bench.submit(name, index)
                given = [told(bench.outputs(name, index)) for index in range(len(REQUESTS))]
                continue
            prefill = Way("off", 8, way.chunk, "here", "enough", "cold")
            given = []
            with Bench(prefill, grammars, deadline_s=deadline_s) as source:
                for start in range(0, len(REQUESTS), 2):  # what lands holds its blocks: not all of it fits at once
                    pair = range(start, min(start + 2, len(REQUESTS)))
                    before = [hand_over(source, bench, name, index) for index in pair]
                    for index, outputs in zip(pair, before, strict=True):
                        given.append(told([*outputs, *bench.outputs(name, index)]))
        counters = bench.engine.counters()
    return given, counters


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(letter_tokenizer, VOCAB)
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(grammars: GrammarCompiler) -> list[Said]:
    """Each request by itself in an engine without anything."""
    given = []
    with Bench(Way("off", 1, 64, "here", "enough", "cold"), grammars) as bench:
        for index in range(len(REQUESTS)):
            bench.submit("r", index)
            given.append(told(bench.outputs("r", index)))
    return given


def test_the_requests_ask_for_everything(alone: list[Said]) -> None:
    """What the runs compare is worth comparing: ends of both kinds, valid JSON, choices that differ."""
    assert {said.finish_reason for said in alone} == {FinishReason.STOP, FinishReason.LENGTH}
    assert len({said.token_ids for said in alone[-3:]}) == 3
    document = text_of([token_id for token_id in alone[8].token_ids if token_id not in END_IDS])
    assert alone[8].finish_reason is FinishReason.LENGTH or "a" in json.loads(document)
    assert len(alone[7].prompt_logprobs) == len(REQUESTS[7][0]) - 1
    assert len(alone[6].logprobs) == MAX_TOKENS


def test_every_pair_of_ways_occurs() -> None:
    for a, b in itertools.combinations(range(len(FACTORS)), 2):
        values = list(FACTORS.values())
        assert {(way[a], way[b]) for way in WAYS} == set(itertools.product(values[a], values[b]))
    assert len(WAYS) <= 31
    crowded = [way for way in WAYS if way.at_once == 8 and way.prompt == "here" and way.chunk > 1]
    preempted = {(way.drafter, way.memory) for way in crowded}
    trained = {("cascade", "restart"), ("eagle", "swap"), ("medusa", "swap"), ("mtp", "swap")}
    assert {("junk", "restart"), *trained} <= preempted


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(map(str, way)))
def test_tokens_are_the_models_own(way: Way, grammars: GrammarCompiler, alone: list[Said]) -> None:
    said, counters = run(way, grammars)
    assert [each.token_ids for each in said] == [each.token_ids for each in alone]
    assert equal(said, alone)
    if way.drafter != "off":
        assert counters["speculation_drafts_proposed"] > 0
    if way.drafter == "cascade":
        assert min(counters[f"speculation_{name}_steps"] for name in CASCADE) > 0
    if way.drafter in ("draft", "bushy"):
        assert counters["speculation_drafts_accepted"] > 0
    # Prompts that come token by token, two at a time, do not crowd the pool.
    if way.memory != "enough" and way.at_once == 8 and way.prompt == "here" and way.chunk > 1:
        assert counters["preemptions"] > 0
        assert (counters.get("preemptions_swapped", 0) > 0) == (way.memory == "swap")


def test_chains_in_bfloat16_change_no_bit(grammars: GrammarCompiler) -> None:
    """What `auto` verifies in 16 bits: tokens, ends and log-probabilities are those of plain decoding, exactly."""
    given: list[list[Said]] = []
    for drafter in ("off", "cascade", "bushy", "junk"):
        way = Way(drafter, 8, 16, "here", "enough", "cold")
        with Bench(way, grammars, dtype="bfloat16", verifies_trees=False) as bench:
            for index in range(len(REQUESTS)):
                bench.submit("r", index)
            given.append([told(bench.outputs("r", index)) for index in range(len(REQUESTS))])
            if bench.speculator is not None:
                assert bench.speculator.counters()["speculation_drafts_proposed"] > 100
    assert given[1] == given[0]
    assert given[2] == given[0]
    assert given[3] == given[0]


def test_s32_nothing_of_a_drafter_travels_with_a_prompt(grammars: GrammarCompiler, alone: list[Said]) -> None:
    """EAGLE learns a request by the rows that are decoded here: a handoff has no hidden states that could be wrong."""
    messages = handoff_pb2.DESCRIPTOR.message_types_by_name.values()
    names = [field.name for message in messages for field in message.fields]
    assert names
    assert not [name for name in names if any(word in name for word in ("hidden", "tap", "draft", "state_vector"))]
    said, counters = run(Way("eagle", 8, 16, "landed", "enough", "cold"), grammars)
    assert equal(said, alone)
    assert counters["speculation_drafts_proposed"] > 100


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "draft", "bushy", "cascade", "medusa", "eagle", "mtp"])
def test_kv20_as_many_guesses_hold_behind_a_prefill_worker_as_without_one(
    drafter: str, grammars: GrammarCompiler
) -> None:
    """No KV of a drafter travels, and none is missed: it reads the prompt's tokens, or the rows that are decoded here.

    A prompt that landed begins with one step without guesses: its first token came with it.
    """
    here, landed = (run(Way(drafter, 1, 16, prompt, "enough", "cold"), grammars)[1] for prompt in ("here", "landed"))
    steps, proposed, accepted = (f"speculation_{name}" for name in ("steps", "drafts_proposed", "drafts_accepted"))
    assert here[accepted] > 0
    assert here[steps] - landed[steps] <= 1.2 * len(REQUESTS)
    assert landed[proposed] / landed[steps] == pytest.approx(here[proposed] / here[steps], rel=0.1)
    assert landed[accepted] / landed[proposed] == pytest.approx(here[accepted] / here[proposed], abs=0.05)
    if drafter == "draft":  # the target's own guesses: a prompt that was not read would spoil them
        assert landed[accepted] > 0.6 * landed[proposed]


@pytest.mark.parametrize("drafter", ["off", "draft", "medusa", "eagle", "mtp"])
def test_kv21_a_prompts_listener_hears_each_layer_of_the_target_once_in_order_whatever_guesses(
    drafter: str, grammars: GrammarCompiler
) -> None:
    """Nothing of a drafter is written before, between or behind them, into the blocks that leave."""
    index = 9  # 33 tokens, in chunks of 16
    heard: list[tuple[str, int]] = []

    class Hearing(Listener):
        def chunk_started(self, first_token: int, num_tokens: int) -> None:
            heard.append(("chunk", first_token))

        def layer_written(self, layer: int) -> None:
            heard.append(("layer", layer))

        def chunk_finished(self) -> None:
            heard.append(("finished", 0))

    contents = []
    for each in ("off", drafter):
        heard.clear()
        with Bench(Way(each, 8, 16, "here", "enough", "cold"), grammars) as bench:
            for beside in range(3):  # others decode with drafts in the same steps
                bench.submit("beside", beside)
            bench.submit("r", index, hold_blocks=True, kv_listener=(listener := Hearing()))
            bench.outputs("r", index)
            contents.append(bench.memory.save_blocks([ref.block for ref in listener.blocks]).tobytes())
            bench.engine.release(RequestId(f"r{index}"))
            for beside in range(3):
                bench.outputs("beside", beside)
        layers = [("layer", layer) for layer in range(MODEL.num_layers)]
        assert heard == [part for first in (0, 16, 32) for part in (("chunk", first), *layers, ("finished", 0))]
    assert contents[0] == contents[1]


# --- mutants --------------------------------------------------------------------------------------------------------


# The mutants call what they replace.
_VERIFY = verify_match
_FORBIDDEN = GrammarState.forbidden
_SAMPLE_ROW = ModelExecutor._sample_row
_BOOK_COMPUTED = ResultTaker._book_computed


def _accepts_whatever_is_guessed(draft: Draft, target_ids: Sequence[int], failed_rows: Any = ()) -> Accepted:
    chain = draft.first_chain()
    nodes = [draft.token_ids.index(token_id) for token_id in chain.token_ids]
    rows = (0, *(node + 1 for node in nodes))
    return Accepted((*chain.token_ids, target_ids[rows[-1]]), rows)


def _accepts_one_more(draft: Draft, target_ids: Sequence[int], failed_rows: Any = ()) -> Accepted:
    """The first guess that the target does not say is kept, too."""
    if draft.is_chain and draft.token_ids[0] != target_ids[0]:
        return Accepted((draft.token_ids[0], target_ids[1]), (0, 1))
    return _VERIFY(draft, target_ids, failed_rows)


def _says_the_next_rows_token(draft: Draft, target_ids: Sequence[int], failed_rows: Any = ()) -> Accepted:
    accepted = _VERIFY(draft, target_ids, failed_rows)
    if accepted.num_accepted and accepted.num_accepted < len(draft):
        return accepted._replace(token_ids=(*accepted.token_ids[:-1], target_ids[accepted.rows[-1] + 1]))
    return accepted


def _stops_at_the_runs_end_alone(
    new_tokens: Sequence[int], params: SamplingParams, num_generated: int, max_generated: int
) -> StopDecision:
    if len(new_tokens) == 1:
        return apply_stop_rules(new_tokens, params, num_generated, max_generated)
    last = apply_stop_rules(new_tokens[-1:], params, num_generated + len(new_tokens) - 1, max_generated)
    kept = min(len(new_tokens), max_generated - num_generated)
    return StopDecision(kept, last.finish_reason, last.stop_token_id)


def _forbids_nothing_behind_guesses(self: Any, token_ids: Any, num_drafts: int) -> Any:
    return None if num_drafts else _FORBIDDEN(self, token_ids, 0)


def _keys_every_row_by_the_last_known_position(self: Any, chunk: Any, node: int) -> SampleRow:
    """The noise of a draft's row is that of the row before all drafts."""
    row = _SAMPLE_ROW(self, chunk, node)
    length = chunk.sequence.num_tokens
    return row._replace(token_ids=row.token_ids[len(row.token_ids) - length :]) if node != ROOT else row


def _rolls_back_one_too_few(self: Any, sequence: Any, num_computed: int) -> None:
    """The KV of the first rejected guess counts as that of the token that was said instead."""
    is_rejected = 0 < num_computed == sequence.num_tokens - 1 and sequence.draft and sequence.num_generated > 2
    _BOOK_COMPUTED(self, sequence, num_computed + bool(is_rejected))


PLAIN = Way("draft", 8, 16, "here", "enough", "cold")


class Mutant(NamedTuple):
    target: str
    replacement: Any
    drafter: str = "draft"


MUTANTS = {
    "accepts whatever is guessed": Mutant("engine.result_taker.verify_match", _accepts_whatever_is_guessed, "junk"),
    "accepts one guess more": Mutant("engine.result_taker.verify_match", _accepts_one_more, "junk"),
    "says the next row's token": Mutant("engine.result_taker.verify_match", _says_the_next_rows_token, "ngram"),
    "stops at the end of a run alone": Mutant("engine.result_taker.apply_stop_rules", _stops_at_the_runs_end_alone),
    "the grammar does not see guesses": Mutant(
        "engine.grammar.GrammarState.forbidden", _forbids_nothing_behind_guesses
    ),
    "noise of the wrong position": Mutant(
        "engine.model_executor.ModelExecutor._sample_row", _keys_every_row_by_the_last_known_position
    ),
    "rolls back one too few": Mutant("engine.result_taker.ResultTaker._book_computed", _rolls_back_one_too_few, "junk"),
    "the KV of a branch stays where it was": Mutant(
        "engine.result_taker.ResultTaker._move_kv", lambda *_: None, "bushy"
    ),
    "siblings see each other": Mutant("engine.draft.Draft.tree_masks", lambda self: (0,) * (1 + len(self)), "bushy"),
    "a tree's rows stand one behind the other": Mutant(
        "engine.draft.Draft.depths", lambda self: tuple(range(1, 1 + len(self))), "cascade"
    ),
    "rejected guesses count for penalties": Mutant("engine.penalties.TokenCounts.ahead", lambda self: self, "junk"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_die(name: str, grammars: GrammarCompiler, alone: list[Said], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    monkeypatch.setattr(mutant.target, mutant.replacement)
    try:
        said, _ = run(PLAIN._replace(drafter=mutant.drafter), grammars, deadline_s=10.0)
    except AssertionError:
        return
    assert not equal(said, alone), "nobody saw it"
