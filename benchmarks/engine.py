"""How near the CPU engine is to the machine's limit: decode by batch and context, prefill by length, against floors.

    python -m benchmarks.engine [--dtype D] [--quantization Q] [--weight-compression off] [--batches 1,4,8,16] [--json]

A floor is the larger of two times: the bytes that a step must read (weights once, each sequence's KV once) over the
read rate, and its operations over the product rate, both measured in the same run (`benchmarks.native_floors`). One
thread; times are its own processor time, so other work on the machine does not count, though its use of the memory
does. Decoded tokens are chosen by argmax, so Python's work at both ends of a step is in the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.native_floors import Floors, measure_floors
from benchmarks.option_types import counts, counts_or_none, instruction_set
from cluster.model_files import DEFAULT_MODEL, resolve_model
from engine.kv_memory import KvMemory, layout_of
from engine.model_config import ModelConfig
from engine.model_loader import open_weights
from engine.native_library import NumberFormat
from engine.native_runner import NativeRunner
from engine.sampler import sample_greedily
from engine.step import StepInput

BLOCK_TOKENS = 16
CHUNK_TOKENS = 512  # of a prompt in one step, as the scheduler's default budget


@dataclass(frozen=True, slots=True)
class Figure:
    """One kind of step: medians over the repeats, beside its floor."""

    work: str
    batch: int
    context: int
    milliseconds: float
    fastest_ms: float
    slowest_ms: float
    floor_ms: float
    tokens_per_s: float

    @property
    def share_of_floor(self) -> float:
        return self.floor_ms / self.milliseconds


class EngineUnderTest:
    """One model with a pool large enough for the largest step."""

    def __init__(self, options: argparse.Namespace, num_tokens: int) -> None:
        weights = open_weights(resolve_model(options.model))
        dtype = options.dtype
        self.config: ModelConfig = weights.config
        num_blocks = num_tokens // BLOCK_TOKENS + 1
        self.memory = KvMemory(layout_of(self.config, dtype, BLOCK_TOKENS), num_blocks)
        self.memory.zero()
        self.runner = NativeRunner(
            self.config,
            weights,
            self.memory,
            dtype=dtype,
            quantization=options.quantization,
            compression=options.weight_compression,
            isa=options.isa,
        )
        weights.close()
        formats = self.runner.weight_formats
        self.product_kind = (
            NumberFormat.Q8_0
            if set(formats) & {"Q4_0", "Q4_1", "Q8_0"}
            else (NumberFormat.F32 if dtype == "float32" else NumberFormat.BF16)
        )
        self.attention_kind = NumberFormat.F32 if dtype == "float32" else NumberFormat.BF16
        self._random = np.random.default_rng(0)

    def step(self, batch: int, cached: int, new: int, *, wants_logits: bool = True) -> StepInput:
        """`batch` sequences with `cached` tokens in the pool and `new` ones now; the last of each may want logits."""
        context = cached + new
        width = -(-context // BLOCK_TOKENS)
        tables = np.arange(batch * width, dtype=np.int32).reshape(batch, width)
        positions = np.tile(np.arange(cached, context, dtype=np.int32), batch)
        owners = np.repeat(np.arange(batch), new)
        slots = tables[owners, positions // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + positions % BLOCK_TOKENS
        starts = np.arange(batch + 1, dtype=np.int32) * new
        return StepInput(
            token_ids=self._random.integers(0, self.config.vocab_size, batch * new).astype(np.int32),
            positions=positions,
            slots=slots,
            query_starts=starts,
            context_lens=np.full(batch, context, np.int32),
            block_tables=tables,
            logit_rows=starts[1:] - 1 if wants_logits else np.empty(0, np.int32),
        )

    def floor_s(self, floors: Floors, batch: int, cached: int, new: int, *, wants_logits: bool = True) -> float:
        """The floor of one step: see the module's docstring. In the last layer only the rows whose logits are wanted
        need more than keys and values."""
        config, tokens, wanted = self.config, batch * new, batch * wants_logits
        kv_bytes = batch * (cached + new) * config.kv_bytes_per_token(self.memory.layout.element_bytes)
        keys_seen = batch * sum(range(cached + 1, cached + new + 1))
        attended = (config.num_layers - 1) * keys_seen + wanted * (cached + new)
        attention = 4 * config.num_heads * config.head_dim * attended
        head = config.vocab_size * config.hidden_size
        for_wanted = head + last_layer_rest(config)
        products = 2 * (tokens * (num_parameters(config) - for_wanted) + wanted * for_wanted)
        packed_bytes = self.runner.status()["packed_bytes"]
        if not isinstance(packed_bytes, int):
            raise TypeError("packed_bytes of the runner's status is a number")
        return floors.seconds(
            packed_bytes + kv_bytes, [(self.product_kind, products), (self.attention_kind, attention)]
        )


def num_parameters(config: ModelConfig) -> int:
    """Parameters that a token is multiplied with: all matrices, the output head once."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv + 3 * config.intermediate_size)
    return config.num_layers * layer + config.vocab_size * config.hidden_size


def last_layer_rest(config: ModelConfig) -> int:
    """Parameters of the last layer that come after keys and values: of queries, attention's output and the MLP."""
    return config.hidden_size * (2 * config.num_heads * config.head_dim + 3 * config.intermediate_size)


def measure_decode(engine: EngineUnderTest, floors: Floors, batch: int, context: int, repeats: int) -> Figure:
    """One step of `batch` sequences that each have `context` tokens after it."""
    times = timed(partial(decode, engine, engine.step(batch, context - 1, 1)), repeats)
    return figure("decode", batch, context, times, engine.floor_s(floors, batch, context - 1, 1), batch)


def decode(engine: EngineUnderTest, step: StepInput) -> list[int]:
    """The step's tokens, found as the engine finds them."""
    output = engine.runner.forward(step, None)
    token_ids: list[int] = sample_greedily(output.logits, output.most_likely).token_ids.tolist()
    return token_ids


def measure_prefill(engine: EngineUnderTest, floors: Floors, length: int, repeats: int) -> Figure:
    """One prompt of `length` tokens in chunks."""
    chunks = [(start, min(CHUNK_TOKENS, length - start)) for start in range(0, length, CHUNK_TOKENS)]
    steps = [engine.step(1, start, count, wants_logits=start + count == length) for start, count in chunks]

    def prefill() -> None:
        for step in steps:
            engine.runner.forward(step, None)

    floor_s = sum(
        engine.floor_s(floors, 1, start, count, wants_logits=start + count == length) for start, count in chunks
    )
    return figure("prefill", 1, length, timed(prefill, repeats), floor_s, length)


def measure_python_share(engine: EngineUnderTest, repeats: int) -> float:
    """The part of a one-sequence decode step that is spent outside the native call."""
    step = engine.step(1, 127, 1)
    whole = statistics.median(timed(partial(decode, engine, step), repeats))
    call = engine.runner.native_call(step)
    return 1 - min(1.0, statistics.median(timed(call, repeats)) / whole)


def timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of this thread for each repeat, after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return times


def figure(work: str, batch: int, context: int, times: Sequence[float], floor_s: float, tokens: int) -> Figure:
    median = statistics.median(times)
    return Figure(
        work=work,
        batch=batch,
        context=context,
        milliseconds=1e3 * median,
        fastest_ms=1e3 * min(times),
        slowest_ms=1e3 * max(times),
        floor_ms=1e3 * floor_s,
        tokens_per_s=tokens / median,
    )


def print_table(figures: Sequence[Figure], floors: Floors) -> None:
    rates = ", ".join(f"{kind.name} {rate / 1e9:.0f} G/s" for kind, rate in floors.operations_per_s.items())
    print(f"floors of one core: read {floors.read_bytes_per_s / 1e9:.1f} GB/s; products {rates}")
    heads = f"{'ms':>9} {'[min - max]':>21} {'tokens/s':>9} {'floor ms':>9} {'share':>6}"
    print(f"{'work':8} {'batch':>5} {'context':>7} {heads}")
    for row in figures:
        spread = f"[{row.fastest_ms:.2f} - {row.slowest_ms:.2f}]"
        print(
            f"{row.work:8} {row.batch:5d} {row.context:7d} {row.milliseconds:9.2f} {spread:>21} "
            f"{row.tokens_per_s:9.1f} {row.floor_ms:9.2f} {row.share_of_floor:6.0%}"
        )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The CPU engine's decode and prefill against the machine's floors.")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=("none", "int8", "int4", "file"), default="none")
    parser.add_argument("--weight-compression", choices=("auto", "off"), default="auto", help="of bfloat16 weights")
    parser.add_argument(
        "--isa", type=instruction_set, default="", help="instruction set of the kernels; empty: the best"
    )
    parser.add_argument("--batches", type=counts, default=[1, 4, 8, 16, 32])
    parser.add_argument("--contexts", type=counts, default=[128, 2048])
    parser.add_argument("--prompts", type=counts_or_none, default=[512, 2048], help="lengths of the prefilled prompts")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    largest = max([max(options.batches) * (max(options.contexts) + BLOCK_TOKENS), *options.prompts])
    engine = EngineUnderTest(options, largest)
    floors = measure_floors(options.isa)
    figures = [
        measure_decode(engine, floors, batch, context, options.repeats)
        for context in options.contexts
        for batch in options.batches
    ]
    figures += [measure_prefill(engine, floors, length, max(3, options.repeats // 3)) for length in options.prompts]
    python_share = measure_python_share(engine, options.repeats)
    if options.json:
        status = engine.runner.status()
        rows = [asdict(row) | {"share_of_floor": row.share_of_floor} for row in figures]
        print(json.dumps({"status": status, "figures": rows, "python_share": python_share}, indent=1))
    else:
        kept = " + ".join(engine.runner.weight_formats)
        print(
            f"{options.model} {options.dtype} {options.quantization} ({kept}), kernels {engine.runner.status()['isa']}"
        )
        print_table(figures, floors)
        print(f"Python's share of a decode step of one sequence: {python_share:.1%}")
    engine.runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
