"""What KV tiers are worth: the time to first token of a prompt that comes back, and of conversations in a small pool.

    python -m benchmarks.kv_tiers [--model M] [--tokens 2000] [--rounds 5] [--folder F] [--part prompt|turns] [--json]

prompt   one prompt computed, restored from host memory, from files in the page cache, and from files that were dropped
         from it, in turns; beside the floors: the same bytes copied, and the same files read
turns    conversations that take turns in a pool that holds a third of them, with tiers and without, in turns

One engine in this process, without a network. Wall time, and processor time of all its threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cluster.identity import RequestId
from cluster.model_files import DEFAULT_MODEL
from cluster.sampling_params import SamplingParams
from cluster.worker_settings import WorkerSettings
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.kv_tiering import KvTiering
from engine.model_executor import ModelExecutor
from engine.request import EngineLimits, EngineRequest, SequenceOutput
from engine.runner_factory import BuiltRunner, build_runner
from kv_transfer.tiers.disk_tier import DiskTier
from kv_transfer.tiers.opening import layout_fingerprint
from kv_transfer.tiers.tier_stack import TierStack

DEADLINE_S = 120.0
MAX_MODEL_LEN = 4096
HOST_BYTES, DISK_BYTES = 2**30, 8 * 2**30
BLOCK_TOKENS = 16
# Of the conversations: each turn brings so many new tokens and gets so many back.
CONVERSATIONS, TURNS, TURN_TOKENS, ANSWER_TOKENS = 6, 4, 192, 16
POOL_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class First:
    """One request up to its first token."""

    wall_ms: float
    cpu_ms: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Figure:
    """Medians over the rounds; floors have no cached tokens."""

    what: str
    wall_ms: float
    fastest_ms: float
    slowest_ms: float
    cpu_ms: float
    cached_tokens: float


class OneAtATime:
    """The sink of an engine that has one request at a time."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.first: First | None = None
        self.started = (0.0, 0.0)
        self.ended = threading.Event()

    def begin(self) -> None:
        self.tokens, self.first = [], None
        self.ended.clear()
        self.started = (time.perf_counter(), time.process_time())

    def __call__(self, outputs: Sequence[SequenceOutput]) -> None:
        for output in outputs:
            if self.first is None:
                wall_s, cpu_s = time.perf_counter() - self.started[0], time.process_time() - self.started[1]
                self.first = First(wall_s * 1000, cpu_s * 1000, output.cached_tokens)
            self.tokens.extend(output.token_ids)
            if output.finish_reason is not None:
                self.ended.set()


class Served:
    """An engine on its own pool, with or without tiers. Closed by `serving`."""

    def __init__(self, built: BuiltRunner, num_blocks: int, stack: TierStack | None) -> None:
        limits = EngineLimits(max_model_len=MAX_MODEL_LEN, max_sequences=8, max_batch_tokens=512)
        self.pool = BlockPool(num_blocks, BLOCK_TOKENS, built.config.fingerprint)
        executor = ModelExecutor(built.runner, limits, BLOCK_TOKENS, built.memory)
        tiering = KvTiering(self.pool, built.memory, stack) if stack is not None else None
        self.engine = Engine(executor, self.pool, limits, tiering=tiering)
        self._sink = OneAtATime()
        self._num_requests = 0
        self.engine.start(self._sink)

    def ask(self, token_ids: Sequence[int], max_tokens: int = 1) -> tuple[First, list[int]]:
        """One request to its end."""
        self._num_requests += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        name = RequestId(f"r{self._num_requests}")
        self._sink.begin()
        self.engine.submit(EngineRequest(name, np.array(token_ids, np.int32), sampling, scope_key=b"bench"))
        if not self._sink.ended.wait(DEADLINE_S) or self._sink.first is None:
            raise TimeoutError(f"no answer within {DEADLINE_S:.0f} s")
        return self._sink.first, self._sink.tokens

    def wait_until_saved(self) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while self.pool.num_unsaved:
            if time.monotonic() > deadline_s:
                raise TimeoutError("the tiers do not take the blocks")
            time.sleep(0.005)


class Bench:
    """One model and one folder for all measurements."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        num_tokens = max(options.tokens + 64, CONVERSATIONS * TURNS * (TURN_TOKENS + ANSWER_TOKENS))
        settings = WorkerSettings(
            worker_id="kv-tiers-benchmark",
            model=options.model,
            listen="unix:unused",
            runtime_dir=folder,
            dtype=options.dtype,
            max_model_len=MAX_MODEL_LEN,
            num_kv_blocks=num_tokens // BLOCK_TOKENS + 2,
        )
        self._options = options
        self._folder = folder
        self._built = build_runner(settings)
        self._layout = self._built.memory.layout

    @contextmanager
    def serving(self, num_blocks: int, folder: Path | None) -> Iterator[tuple[Served, TierStack | None]]:
        """`folder` None: without tiers."""
        stack = None
        if folder is not None:
            fingerprint = layout_fingerprint(self._layout, self._built.config.fingerprint, "none")
            block_bytes = self._layout.block_bytes
            stack = TierStack(HOST_BYTES, block_bytes, DiskTier(folder, DISK_BYTES, block_bytes, fingerprint))
        served = Served(self._built, num_blocks, stack)
        try:
            yield served, stack
        finally:
            served.engine.stop(DEADLINE_S)
            if stack is not None:
                stack.close()

    # --- one prompt ---------------------------------------------------------------------------------------------------

    def prompt(self) -> list[Figure]:
        num_tokens, folder = self._options.tokens, self._folder / "prompt"
        num_blocks = self._built.memory.num_blocks
        found: dict[str, list[First]] = {}
        for number in range(self._options.rounds):
            token_ids = self._random_tokens(num_tokens, number)
            with self.serving(num_blocks, folder) as (served, stack):
                served.ask(self._random_tokens(64, 10_000 + number))  # the first step has costs of its own
                found.setdefault("computed", []).append(served.ask(token_ids)[0])
                served.wait_until_saved()
                served.pool.reset_prefix_cache()
                found.setdefault("from host memory", []).append(served.ask(token_ids)[0])
                if stack is None or not stack.flush(DEADLINE_S):
                    raise TimeoutError("the disk does not take the blocks")
            for what in ("from disk, in the page cache", "from disk"):
                if what == "from disk":
                    _drop_from_page_cache(folder)
                with self.serving(num_blocks, folder) as (served, _):
                    served.ask(self._random_tokens(64, 20_000 + number))
                    found.setdefault(what, []).append(served.ask(token_ids)[0])
            found.setdefault("floor: bytes copied", []).append(self._copy(num_tokens))
            found.setdefault("floor: files read", []).append(_read_all(folder, num_tokens // BLOCK_TOKENS))
        return [_figure(what, firsts) for what, firsts in found.items()]

    def _copy(self, num_tokens: int) -> First:
        num_bytes = num_tokens // BLOCK_TOKENS * self._layout.block_bytes
        source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        np.copyto(target, source)
        return First((time.perf_counter() - wall_s) * 1000, (time.process_time() - cpu_s) * 1000, 0)

    # --- conversations ------------------------------------------------------------------------------------------------

    def turns(self) -> list[Figure]:
        longest = TURNS * (TURN_TOKENS + ANSWER_TOKENS)
        num_blocks = int(CONVERSATIONS * longest * POOL_SHARE) // BLOCK_TOKENS
        found: dict[str, list[First]] = {}
        answers: dict[int, list[list[int]]] = {}
        for number in range(self._options.rounds):
            for what in ("turns without tiers", "turns with tiers"):
                folder = self._folder / f"turns-{number}" if what == "turns with tiers" else None
                with self.serving(num_blocks, folder) as (served, _):
                    firsts, tokens = self._converse(served, number)
                found.setdefault(what, []).extend(firsts)
                if answers.setdefault(number, tokens) != tokens:
                    print(
                        "note: answers differ with tiers and without, at near ties of a 16-bit model", file=sys.stderr
                    )
        return [_figure(what, firsts) for what, firsts in found.items()]

    def _converse(self, served: Served, seed: int) -> tuple[list[First], list[list[int]]]:
        """Everybody's second and later turns, and all answers."""
        histories: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
        firsts: list[First] = []
        for turn in range(TURNS):
            for index, history in enumerate(histories):
                history.extend(self._random_tokens(TURN_TOKENS, 1000 * seed + 100 * turn + index))
                first, tokens = served.ask(history, ANSWER_TOKENS)
                history.extend(tokens)
                if turn:
                    firsts.append(first)
        return firsts, histories

    def _random_tokens(self, num_tokens: int, seed: int) -> list[int]:
        chance = np.random.default_rng(seed)
        return [int(token) for token in chance.integers(100, self._built.config.vocab_size, num_tokens)]


def _drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # what is not written cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _read_all(folder: Path, num_files: int) -> First:
    """So many files, dropped from the page cache, read by one thread."""
    _drop_from_page_cache(folder)
    paths = sorted(folder.rglob("*.kv"))[:num_files]
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for path in paths:
        path.read_bytes()
    return First((time.perf_counter() - wall_s) * 1000, (time.process_time() - cpu_s) * 1000, 0)


def _figure(what: str, firsts: Sequence[First]) -> Figure:
    walls = [first.wall_ms for first in firsts]
    return Figure(
        what,
        statistics.median(walls),
        min(walls),
        max(walls),
        statistics.median(first.cpu_ms for first in firsts),
        statistics.median(first.cached_tokens for first in firsts),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary one")
    parser.add_argument("--part", choices=("prompt", "turns", "all"), default="all")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bench = Bench(options, Path(folder))
        figures = bench.prompt() if options.part != "turns" else []
        figures += bench.turns() if options.part != "prompt" else []
    if options.json:
        print(json.dumps([asdict(figure) for figure in figures], indent=1))
        return
    print(f"{'time to first token':32}{'ms':>9}{'least':>9}{'most':>9}{'CPU ms':>9}{'cached':>9}")
    for figure in figures:
        print(
            f"{figure.what:32}{figure.wall_ms:9.1f}{figure.fastest_ms:9.1f}{figure.slowest_ms:9.1f}"
            f"{figure.cpu_ms:9.1f}{figure.cached_tokens:9.0f}"
        )


if __name__ == "__main__":
    main()
