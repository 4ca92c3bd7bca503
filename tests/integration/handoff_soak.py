"""Workers that are killed, stopped, cancelled and restarted at every moment of a handoff; what must hold afterwards.

Two prefill workers and a decode worker as real processes, whose KV is compared with an oracle (`oracle_worker`). After
each fault: the answer is right or was cleanly failed, every block is back on every side, nothing wrong has landed. At
the end descriptors, threads, memory and shared memory are back where they were before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tandem.v1 import common_pb2, worker_pb2

from cluster.free_port import free_port
from tests.integration.mock_tokens import VOCAB_SIZE, expected_tokens
from tests.integration.oracle_worker import BREAK, cue_path, wrong_path
from tests.integration.worker_processes import Answer, Router, WorkerFleet, WorkerProcess, all_blocks_are_back

MODULE = "tests.integration.oracle_worker"
NUM_BLOCKS = 400
NUM_TOKENS = 6
# 16 tokens are 2 KiB of mock KV: a prompt of 600 takes some 100 ms to compute and as long to send.
PROMPT_TOKENS = 600
CANCELLED_TOKENS = 4 * PROMPT_TOKENS  # the cancel must come before the last byte, on a busy machine too
LINK_BYTES_PER_S = 1_000_000
BYTES_OF_A_TOKEN = 128
BACK_TIMEOUT_S = 60.0  # the peer of a stopped process waits for its silence, its drain and its connection's end
SHORT_STOP_S, LONG_STOP_S = 0.5, 7.0  # below, and above what every peer waits for
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # looked at, nothing is put there
MAX_GROWTH_BYTES = 24 * 1024 * 1024
# The event loop's executor starts its threads when they are first needed together, and keeps them: asyncio's own bound.
MAX_EXECUTOR_THREADS = min(32, (os.cpu_count() or 1) + 4)

PREFILL_STATES = ("accepted", "queued", "computing", "sealed", "committed", "cancelling", "free")
DECODE_STATES = ("match", "reserved", "requested", "receiving", "sealed", "verified", "cancelling", "runnable")


@dataclass(frozen=True)
class Fault:
    """What happens to whom, and when."""

    role: str
    state: str
    signal: signal.Signals
    moment: str = "entered"
    stop_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.signal.name} of {self.role} at {self.state}, {self.moment}, {self.stop_s} s"


@dataclass(frozen=True)
class Footprint:
    """What one process holds."""

    descriptors: tuple[str, ...]  # what each refers to
    num_threads: int
    rss_bytes: int

    @classmethod
    def of(cls, worker: WorkerProcess) -> Footprint:
        process = psutil.Process(worker.process.pid)
        return cls(descriptors_of(worker.process.pid), process.num_threads(), process.memory_info().rss)

    def is_within(self, before: Footprint) -> bool:
        return (
            len(self.descriptors) <= len(before.descriptors)
            and self.num_threads <= before.num_threads + MAX_EXECUTOR_THREADS
            and self.rss_bytes <= before.rss_bytes + MAX_GROWTH_BYTES
        )


def descriptors_of(pid: int) -> tuple[str, ...]:
    names = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            names.append(f"{link.name} -> {link.readlink()}")
    return tuple(sorted(names))


def shared_memory_names() -> list[str]:
    return sorted(path.name for path in SHARED_MEMORY.iterdir() if "tandem" in path.name)


def _is_all_on_disk(status: worker_pb2.WorkerStatus) -> bool:
    counters = status.counters
    is_saved = all_blocks_are_back(status) and counters["kv_tier_unsaved_blocks"] == 0
    return is_saved and counters["kv_tier_disk_blocks"] >= counters["kv_tier_host_blocks"] > 0


@dataclass
class HandoffSoak:
    """Owned by one test."""

    fleet: WorkerFleet
    folder: Path
    transport: str
    seed: int = 7
    decode_settings: dict[str, Any] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    _num_requests: int = 0

    async def start(self) -> None:
        self._choose = random.Random(self.seed)
        self._shared_before = shared_memory_names()
        self._addresses = {name: f"127.0.0.1:{free_port()}" for name in ("prefill-0", "prefill-1", "decode-0")}
        self.victim, self.healthy, self.decode = await asyncio.gather(
            self._start("prefill-0"), self._start("prefill-1"), self._start("decode-0")
        )
        await self._warm_up()
        self._before = {worker.settings.worker_id: Footprint.of(worker) for worker in self.workers}

    @property
    def workers(self) -> list[WorkerProcess]:
        return [self.victim, self.healthy, self.decode]

    # --- faults -------------------------------------------------------------------------------------------------------

    async def suffer(self, fault: Fault) -> None:
        """One request meets one fault; afterwards everything is as it was."""
        worker = self.victim if fault.role == "prefill" else self.decode
        for each in self.workers:
            await each.reset_prefix_cache()
        is_cancelled = (fault.role, fault.state) == ("decode", "cancelling")
        prompt = self._prompt(CANCELLED_TOKENS if is_cancelled else PROMPT_TOKENS)
        received = (await self.decode.status()).counters["kv_bytes_received"]
        cue = cue_path(self.folder, worker.settings.worker_id)
        cue.write_text(f"{fault.state} {fault.signal.name} {fault.moment}")
        async with Router(self.decode) as router:
            request_id = self._next_id()
            await router.submit(request_id, prompt, NUM_TOKENS, [self.victim, self.healthy], allow_local_prefill=True)
            if is_cancelled:
                await self.decode.wait_for(
                    lambda status: status.counters["kv_bytes_received"] > received, 60, "KV moves"
                )
                await router.cancel(request_id)
            await self._wait(lambda: not cue.exists(), f"{fault}: the state is reached")
            await self._heal(worker, fault)
            answer = await router.answer(request_id)
        self._judge(answer, prompt, str(fault))
        await self.all_is_back(str(fault))
        await self._ask(self.victim, str(fault))

    async def _heal(self, worker: WorkerProcess, fault: Fault) -> None:
        if fault.signal is signal.SIGSTOP:
            await asyncio.sleep(fault.stop_s)
            worker.process.send_signal(signal.SIGCONT)
            return
        await asyncio.to_thread(worker.process.wait, 60)
        await self.restart(worker)

    async def restart(self, worker: WorkerProcess) -> None:
        """A new process at the same address; the old one is dead, or is killed."""
        if worker.process.poll() is None:
            worker.kill()
        await worker.channel.close(None)
        again = await self._start(worker.settings.worker_id)
        if worker is self.decode:
            self.decode = again
        elif worker is self.victim:
            self.victim = again
        else:
            self.healthy = again
        self._before.pop(again.settings.worker_id, None)  # a new process: nothing to compare it with

    async def cancel_at_random(self, num_requests: int, num_at_once: int = 16) -> None:
        """Requests that are cancelled anywhere between their submission and their end."""
        gate = asyncio.Semaphore(num_at_once)
        async with Router(self.decode) as router:

            async def one() -> None:
                async with gate:
                    prompt = self._prompt(self._choose.randrange(1, PROMPT_TOKENS))
                    request_id = self._next_id()
                    peers = self._choose.sample([self.victim, self.healthy], 2)
                    local = self._choose.random() < 0.5
                    await router.submit(request_id, prompt, NUM_TOKENS, peers, allow_local_prefill=local)
                    await asyncio.sleep(self._choose.random() ** 2 * 1.5)
                    await router.cancel(request_id)
                    self._judge(await router.answer(request_id), prompt, "random cancel", may_be_cancelled=True)

            await asyncio.gather(*(one() for _ in range(num_requests)))
        await self.all_is_back("random cancels")

    async def salvage(self) -> int:
        """KV bytes that a second prefill worker sent, after the first was killed with most of the prompt sent."""
        for each in self.workers:
            await each.reset_prefix_cache()
        prompt = self._prompt(PROMPT_TOKENS)
        cue_path(self.folder, self.victim.settings.worker_id).write_text("sealed SIGKILL entered")
        async with Router(self.decode) as router:
            answer = await router.generate(self._next_id(), prompt, NUM_TOKENS, [self.victim, self.healthy])
        self._judge(answer, prompt, "salvage")
        assert answer.last.timeline.prefill_worker_id == self.healthy.settings.worker_id
        await self.restart(self.victim)
        await self.all_is_back("salvage")
        return int(answer.last.timeline.kv_bytes)

    async def restore_what_landed(self, num_prompts: int) -> int:
        """Prompts that landed, one of them from two workers, come back from a tier under a new decode worker, where the
        oracle looks at them again. Returns the blocks that came back."""
        prompts = [self._prompt(PROMPT_TOKENS) for _ in range(num_prompts)]
        cue_path(self.folder, self.victim.settings.worker_id).write_text("sealed SIGKILL entered")
        await self._ask_for(prompts[0], [self.victim, self.healthy])
        await self.restart(self.victim)
        for prompt in prompts[1:]:
            await self._ask_for(prompt, [self.healthy])
        await self.decode.wait_for(_is_all_on_disk, BACK_TIMEOUT_S, "everything has its file")
        await self.all_is_back("landed")
        await self.restart(self.decode)
        await self._warm_up()
        for prompt in prompts:
            await self._ask_for(prompt, [])
        await self.all_is_back("restored")
        return int((await self.decode.status()).counters["kv_tier_restored_blocks_from_disk"])

    async def _ask_for(self, prompt: list[int], peers: list[WorkerProcess]) -> None:
        async with Router(self.decode) as router:
            answer = await router.generate(self._next_id(), prompt, NUM_TOKENS, peers, allow_local_prefill=not peers)
        assert answer.token_ids == expected_tokens(prompt, NUM_TOKENS), answer
        self.outcomes["right"] += 1

    async def lose_links(self, num_rounds: int) -> None:
        """The KV connection breaks under several prompts at once, and nobody but its worker can compute them."""
        worker_id = self.victim.settings.worker_id
        for number in range(num_rounds):
            for each in self.workers:
                await each.reset_prefix_cache()
            state = ("computing", "sealed", "committed")[number % 3]
            cue = cue_path(self.folder, worker_id)
            cue.write_text(f"{state} {BREAK} entered")
            prompts = [self._prompt(PROMPT_TOKENS // 2) for _ in range(4)]
            async with Router(self.decode) as router:
                answers = await asyncio.gather(
                    *(router.generate(self._next_id(), prompt, NUM_TOKENS, [self.victim]) for prompt in prompts)
                )
            assert not cue.exists(), f"{state} was not reached"
            for answer, prompt in zip(answers, prompts, strict=True):
                assert answer.token_ids == expected_tokens(prompt, NUM_TOKENS), (state, answer, self.victim.log())
                self.outcomes["right"] += 1
                self.outcomes["asked again"] += answer.last.timeline.attempts > 1
            await self.all_is_back(f"link broken at {state}")

    async def ask_many(self, num_requests: int, num_choices: int) -> None:
        """Short prompts, each asked for by several choices at once, which end in any order."""
        gate = asyncio.Semaphore(16)
        async with Router(self.decode) as router:

            async def one(prompt: list[int], max_tokens: int) -> None:
                async with gate:
                    answer = await router.generate(self._next_id(), prompt, max_tokens, [self.healthy])
                assert answer.token_ids == expected_tokens(prompt, max_tokens), answer
                self.outcomes["right"] += 1

            prompts = [self._prompt(self._choose.randrange(1, 40)) for _ in range(num_requests)]
            lengths = [self._choose.randrange(1, 9) for _ in range(num_choices)]
            await asyncio.gather(*(one(prompt, length) for prompt in prompts for length in lengths))
        await self.all_is_back("many requests")

    async def restart_everybody(self, num_rounds: int) -> None:
        """Each worker in turn, killed while prompts move, and started again at the same port."""
        for number in range(num_rounds):
            worker = self.workers[number % len(self.workers)]
            async with Router(self.decode) as router:
                requests = {self._next_id(): self._prompt(PROMPT_TOKENS // 2) for _ in range(3)}
                for request_id, prompt in requests.items():
                    peers = [self.victim, self.healthy]
                    await router.submit(request_id, prompt, NUM_TOKENS, peers, allow_local_prefill=True)
                await asyncio.sleep(self._choose.random() * 0.2)
                await self.restart(worker)
                for request_id, prompt in requests.items():
                    self._judge(await router.answer(request_id), prompt, f"restart {number}")
            await self.all_is_back(f"restart {number}")
            await self._ask(self.victim, f"after restart {number}")

    # --- what must hold -----------------------------------------------------------------------------------------------

    async def all_is_back(self, what: str) -> None:
        for worker in self.workers:
            await worker.wait_for(
                all_blocks_are_back, BACK_TIMEOUT_S, f"{what}: blocks of {worker.settings.worker_id} are back"
            )
            wrong = wrong_path(self.folder, worker.settings.worker_id)
            assert not wrong.exists(), f"{what}: {wrong.read_text()}"

    async def nothing_is_left(self) -> None:
        """Descriptors, threads, memory of those who lived through it all, and shared memory."""
        await self._warm_up()
        for worker in self.workers:
            before = self._before.get(worker.settings.worker_id)
            if before is not None:
                await self._wait_for_footprint(worker, before)
        assert shared_memory_names() == self._shared_before

    async def _wait_for_footprint(self, worker: WorkerProcess, before: Footprint) -> None:
        deadline = time.monotonic() + BACK_TIMEOUT_S
        while not (now := Footprint.of(worker)).is_within(before):
            assert time.monotonic() < deadline, f"{worker.settings.worker_id} held {before}, now {now}: {worker.log()}"
            await asyncio.sleep(0.1)

    def _judge(self, answer: Answer, prompt: list[int], what: str, *, may_be_cancelled: bool = False) -> None:
        """Right, cleanly failed, or ended with its decode worker."""
        expected = expected_tokens(prompt, NUM_TOKENS)
        is_prefix = answer.token_ids == expected[: len(answer.token_ids)]
        assert is_prefix, f"{what}: {answer.token_ids} instead of {expected}"
        if answer.is_lost:
            self.outcomes["lost with its decode worker"] += 1
        elif answer.failure is not None:
            assert answer.failure.code, f"{what}: a failure without a code: {answer.failure}"
            self.outcomes[f"failed: {answer.failure.code}"] += 1
        elif answer.last.finish_reason == common_pb2.FINISH_REASON_CANCELLED:
            self.outcomes["cancelled"] += 1
        else:
            assert answer.token_ids == expected, f"{what}: {answer.token_ids} instead of {expected}"
            self.outcomes["right"] += 1

    # --- small steps --------------------------------------------------------------------------------------------------

    async def _start(self, worker_id: str) -> WorkerProcess:
        role = "prefill" if worker_id.startswith("prefill") else "decode"
        return await self.fleet.start(
            role,  # type: ignore[arg-type]
            worker_id,
            engine="mock",
            dtype="auto",
            listen=self._addresses[worker_id],
            num_kv_blocks=NUM_BLOCKS,
            max_batch_tokens=128,
            transports=(self.transport,),
            link_bytes_per_s=LINK_BYTES_PER_S if worker_id == "prefill-0" else 0,
            **(self.decode_settings if role == "decode" else {}),
        )

    async def _warm_up(self) -> None:
        """Both prefill workers are connected and have sent: what a worker opens once is open."""
        for worker in (self.victim, self.healthy):
            for _ in range(3):
                await self._ask(worker, "warm-up")
        await self.all_is_back("warm-up")

    async def _ask(self, prefill: WorkerProcess, what: str) -> None:
        """Traffic flows through this prefill worker, after a moment for the two to find each other again."""
        deadline = time.monotonic() + BACK_TIMEOUT_S
        while True:
            prompt = self._prompt(100)
            async with Router(self.decode) as router:
                answer = await router.generate(self._next_id(), prompt, NUM_TOKENS, [prefill])
            if answer.failure is None:
                assert answer.token_ids == expected_tokens(prompt, NUM_TOKENS), f"{what}: next request"
                assert answer.last.timeline.prefill_worker_id == prefill.settings.worker_id
                return
            assert time.monotonic() < deadline, f"{what}: traffic does not flow again: {answer.failure}"
            await asyncio.sleep(0.05)

    async def _wait(self, is_reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + BACK_TIMEOUT_S
        while not is_reached():
            assert time.monotonic() < deadline, f"not reached: {what}; {[worker.log() for worker in self.workers]}"
            await asyncio.sleep(0.005)

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._choose.randrange(VOCAB_SIZE) for _ in range(num_tokens)]

    def _next_id(self) -> str:
        self._num_requests += 1
        return f"r{self._num_requests}"
