"""Drafters against no speculation, side by side in one process: tokens a second, acceptance, where the time goes.

    python -m benchmarks.speculation [--drafters auto,eagle] [--prompts FILE.jsonl] [--task own|copy|long]
                                     [--num-prompts N] [--tokens N] [--batch B] [--temperature T] [--num-drafts K]
                                     [--model M] [--max-s S] [--json]

Each batch of prompts is decoded by every drafter in turn (the order rotates), on one runner. What is timed is decoding:
from the first token that the engine gives to the last one, in processor time of the engine's thread beside wall time,
so other work on the machine does not count, though its use of the memory does. Without a file the prompts are our own
(`drafter_training.instructions`, a seed that no training uses): `copy` such that the answer stands in the prompt,
`long` behind about 1,500 tokens. A file has a JSON object on each line, with `turns`: the first one is asked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.option_types import names_of
from cluster.identity import RequestId
from cluster.model_files import DEFAULT_MODEL, resolve_model
from cluster.sampling_params import SPECULATION_MODES, SamplingParams
from cluster.tokenizer import load_tokenizer
from cluster.worker_settings import WorkerSettings
from decode_worker.speculation.opening import open_speculator
from decode_worker.speculation.speculator import OFF, DraftingSpeculator
from drafter_training.conversations import ChatFormat
from drafter_training.instructions import instructions
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.model_executor import ModelExecutor
from engine.request import EngineLimits, EngineRequest, FinishReason, SequenceOutput
from engine.runner_factory import BuiltRunner, build_runner

DRAFTERS = tuple(mode for mode in SPECULATION_MODES if mode != OFF)
OWN_PROMPTS_SEED = 987_654_321
SAMPLING_SEED = 5
LONG_LIST = 105  # instructions before the question: about 1,500 tokens
DEADLINE_S = 300.0
MAX_MODEL_LEN = 2048


@dataclass(frozen=True, slots=True)
class Decoded:
    """One batch by one drafter. Times are of decoding after the first tokens, which are not among `num_tokens`."""

    drafter: str
    token_ids: tuple[tuple[int, ...], ...]
    num_tokens: int
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class DrafterFigures:
    """All batches by one drafter, beside no speculation on the same prompts."""

    drafter: str
    tokens_per_cpu_s: float
    tokens_per_s: float
    speedup_cpu: float  # all tokens over all time
    speedup_wall: float
    median_speedup_cpu: float  # of the batches
    tokens_per_step: float  # of the steps that verified drafts
    acceptance: tuple[float, ...]  # of the i-th draft of a chain, where there was one
    same_tokens: float  # share of answers that equal those without speculation


class DecodeClock:
    """An engine's sink: notes the engine thread's time at the first and the last output after all have begun."""

    def __init__(self, num_requests: int) -> None:
        self.tokens: dict[RequestId, list[int]] = {}
        self.num_timed_tokens = 0
        self.cpu_s = self.wall_s = 0.0
        self._num_requests = num_requests
        self._num_ended = 0
        self._start: tuple[float, float] | None = None
        self._done = threading.Event()

    def __call__(self, outputs: Sequence[SequenceOutput]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is FinishReason.ERROR:
                raise RuntimeError(f"a request failed: {output.error}")
            self._num_ended += output.finish_reason is not None
        now = (time.thread_time(), time.perf_counter())
        if self._start is not None:
            self.num_timed_tokens += sum(len(output.token_ids) for output in outputs)
            self.cpu_s, self.wall_s = now[0] - self._start[0], now[1] - self._start[1]
        elif len(self.tokens) == self._num_requests:
            self._start = now
        if self._num_ended == self._num_requests:
            self._done.set()

    def wait(self) -> None:
        if not self._done.wait(DEADLINE_S):
            raise TimeoutError(f"the engine gave no answer within {DEADLINE_S:.0f} s")


class Bench:
    """One runner, and a speculator for each drafter, opened as a worker opens it."""

    def __init__(self, options: argparse.Namespace, runtime_dir: Path) -> None:
        self._settings = WorkerSettings(
            worker_id="speculation-benchmark",
            model=options.model,
            listen="unix:unused",
            runtime_dir=runtime_dir,
            dtype=options.dtype,
            quantization=options.quantization,
            max_model_len=MAX_MODEL_LEN,
            num_drafts=options.num_drafts,
            max_sequences=max(8, options.batch),
            num_kv_blocks=(options.batch + 1) * MAX_MODEL_LEN // 16,
        )
        self._tokens = options.tokens
        self._temperature = options.temperature
        self._built: BuiltRunner = build_runner(self._settings)
        self.speculators: dict[str, DraftingSpeculator | None] = {OFF: None}
        for drafter in options.drafters:
            chosen = self._settings.model_copy(update={"speculation": drafter})
            self.speculators[drafter] = open_speculator(chosen, self._built)

    def decode(self, drafter: str, prompts: Sequence[Sequence[int]]) -> Decoded:
        settings, built, speculator = self._settings, self._built, self.speculators[drafter]
        limits = EngineLimits(
            max_model_len=MAX_MODEL_LEN, max_sequences=settings.max_sequences, max_batch_tokens=MAX_MODEL_LEN
        )
        pool = BlockPool(built.memory.num_blocks, settings.block_tokens, built.config.fingerprint)
        executor = ModelExecutor(
            built.runner,
            limits,
            settings.block_tokens,
            built.memory,
            tap_layers=() if speculator is None else speculator.tap_layers,
        )
        engine = Engine(executor, pool, limits, speculator=speculator)
        clock = DecodeClock(len(prompts))
        engine.start(clock)
        try:
            sampling = SamplingParams(
                temperature=self._temperature,
                seed=SAMPLING_SEED,
                max_tokens=self._tokens,
                stop_token_ids=tuple(built.config.eos_token_ids),
            )
            names = [RequestId(f"r{index}") for index in range(len(prompts))]
            for name, prompt in zip(names, prompts, strict=True):
                engine.submit(EngineRequest(name, np.array(prompt, np.int32), sampling=sampling, scope_key=b"bench"))
            clock.wait()
        finally:
            engine.stop(DEADLINE_S)
        answers = tuple(tuple(clock.tokens[name]) for name in names)
        return Decoded(drafter, answers, clock.num_timed_tokens, clock.cpu_s, clock.wall_s)


def figures(runs: dict[str, list[Decoded]], speculators: dict[str, DraftingSpeculator | None]) -> list[DrafterFigures]:
    plain = runs[OFF]
    found = []
    for drafter, batches in runs.items():
        speculator = speculators[drafter]
        counters = {} if speculator is None else speculator.counters()
        proposed = [counters[name] for name in sorted(counters) if name.startswith("speculation_proposed_at_")]
        accepted = [counters[name] for name in sorted(counters) if name.startswith("speculation_accepted_at_")]
        num_steps = counters.get("speculation_steps", 0)
        answers = [pair for batch, off in zip(batches, plain, strict=True) for pair in _pairs(batch, off)]
        found.append(
            DrafterFigures(
                drafter=drafter,
                tokens_per_cpu_s=_rate(batches, "cpu_s"),
                tokens_per_s=_rate(batches, "wall_s"),
                speedup_cpu=_rate(batches, "cpu_s") / _rate(plain, "cpu_s"),
                speedup_wall=_rate(batches, "wall_s") / _rate(plain, "wall_s"),
                median_speedup_cpu=statistics.median(
                    _rate([batch], "cpu_s") / _rate([off], "cpu_s") for batch, off in zip(batches, plain, strict=True)
                ),
                tokens_per_step=1 + sum(accepted) / num_steps if num_steps else 1.0,
                acceptance=tuple(hits / tries for hits, tries in zip(accepted, proposed, strict=True) if tries),
                same_tokens=sum(mine == theirs for mine, theirs in answers) / len(answers),
            )
        )
    return found


def _pairs(batch: Decoded, off: Decoded) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return list(zip(batch.token_ids, off.token_ids, strict=True))


def _rate(batches: Sequence[Decoded], time_name: str) -> float:
    seconds: float = sum(getattr(batch, time_name) for batch in batches)
    return sum(batch.num_tokens for batch in batches) / max(1e-9, seconds)


def read_prompts(path: str, task: str, count: int) -> list[str]:
    if not path:
        return list(islice(OWN_TASKS[task](), count))
    with open(path, encoding="utf-8") as file:
        return [json.loads(line)["turns"][0] for line in islice(file, count)]


def asking() -> Iterator[str]:
    return iter(instructions(OWN_PROMPTS_SEED))


def asking_behind_much() -> Iterator[str]:
    """A question behind a long list that says nothing about it."""
    source = instructions(OWN_PROMPTS_SEED)
    while True:
        text = "\n".join(next(source) for _ in range(LONG_LIST))
        yield f"Somebody asked all of this:\n\n{text}\n\nAnswer only this one: {next(source)}"


def copying() -> Iterator[str]:
    """Tasks whose answer is mostly in the prompt, over texts made of instructions that no training uses."""
    source = instructions(OWN_PROMPTS_SEED)
    while True:
        text = "\n".join(f"{number}. {next(source)}" for number in range(1, 7))
        yield f"Copy this list word for word, all six lines, and write nothing else:\n\n{text}"
        yield f"Here is a list:\n\n{text}\n\nWrite the whole list again with every line as it is."
        yield f"{text}\n\nRepeat the text above exactly."


OWN_TASKS: dict[str, Callable[[], Iterator[str]]] = {"own": asking, "copy": copying, "long": asking_behind_much}


def print_table(rows: Sequence[DrafterFigures]) -> None:
    print(
        f"{'drafter':8} {'tokens/CPU s':>12} {'tokens/s':>9} {'speed-up CPU':>12} {'median':>7} {'wall':>6} "
        f"{'tokens/step':>11} {'same':>5}  acceptance by position"
    )
    for row in rows:
        acceptance = " ".join(f"{rate:.2f}" for rate in row.acceptance)
        print(
            f"{row.drafter:8} {row.tokens_per_cpu_s:12.1f} {row.tokens_per_s:9.1f} {row.speedup_cpu:12.2f} "
            f"{row.median_speedup_cpu:7.2f} {row.speedup_wall:6.2f} {row.tokens_per_step:11.2f} "
            f"{row.same_tokens:5.0%}  {acceptance}"
        )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Drafters against no speculation, side by side.")
    parser.add_argument("--drafters", type=names_of(DRAFTERS), default=["auto", "eagle"])
    parser.add_argument("--prompts", default="", help="JSON lines with `turns`; empty: our own")
    parser.add_argument("--task", choices=tuple(OWN_TASKS), default="own", help="which of our own prompts")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer, at most")
    parser.add_argument("--batch", type=int, default=1, help="prompts at once")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--num-drafts", type=int, default=8)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=("none", "int8", "int4", "file"), default="none")
    parser.add_argument("--max-s", type=float, default=1e9, help="no further prompts after that")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    chat = ChatFormat(load_tokenizer(resolve_model(options.model)))
    asked = read_prompts(options.prompts, options.task, options.num_prompts)
    prompts = [chat.encode([{"role": "user", "content": text}]) for text in asked]
    prompts = [prompt for prompt in prompts if len(prompt) + options.tokens < MAX_MODEL_LEN]
    with tempfile.TemporaryDirectory() as runtime_dir:
        bench = Bench(options, Path(runtime_dir))
        names = list(bench.speculators)
        bench.decode(OFF, prompts[:1])  # pays for buffers
        runs: dict[str, list[Decoded]] = {name: [] for name in names}
        end_s = time.monotonic() + options.max_s
        for index, start in enumerate(range(0, len(prompts), options.batch)):
            if index and time.monotonic() > end_s:
                break
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                runs[name].append(bench.decode(name, prompts[start : start + options.batch]))
    rows = figures(runs, bench.speculators)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print_table(rows)
        print(f"{len(runs[OFF])} of {-(-len(prompts) // options.batch)} batches")
    return 0


if __name__ == "__main__":
    sys.exit(main())
