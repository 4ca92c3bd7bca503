"""A network that parts between real processes: router and decode worker, then decode and prefill workers.

Nothing is refused and nothing is reset: bytes just stop, and arrive late when it heals. Mock workers' tokens are known
beforehand: every answer is right, whoever gave it, and late words of a worker that was given up are not heard.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tandem.v1 import handoff_pb2, inference_pb2, inference_pb2_grpc, membership_pb2

from cluster.membership_state import ChangeKind, MembershipChange
from cluster.router_settings import RouterSettings
from cluster.tokenizer import load_tokenizer
from router.grpc_front import GrpcFront
from router.limits import ServingLimits
from router.router_core import RouterCore, build_core
from tests.integration.mock_tokens import VOCAB_SIZE, expected_tokens
from tests.integration.relay import Relay
from tests.integration.worker_processes import SECURITY, WorkerProcess, all_blocks_are_back, fleet_in

pytestmark = [pytest.mark.model, pytest.mark.cluster, pytest.mark.timeout(400)]

NUM_STREAMS = 6
NUM_TOKENS = 24
PROMPT_TOKENS = 200
ANSWER_TIMEOUT_S = 60.0
REACHED_TIMEOUT_S = 60.0


class Load:
    """Streams one after the other on `NUM_STREAMS` tasks; each answer is compared token by token."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.decoded_by: Counter[str] = Counter()
        self.prefilled_by: Counter[str] = Counter()
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(NUM_STREAMS)]

    async def until(self, is_reached: Callable[[], bool]) -> None:
        """Polls while the load runs, and fails with the first answer that was wrong or none."""
        async with asyncio.timeout(REACHED_TIMEOUT_S):
            while not is_reached():
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.02)

    async def answers(self, count: int) -> None:
        target = self.decoded_by.total() + count
        await self.until(lambda: self.decoded_by.total() >= target)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, number: int) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            round_number = 0
            while True:
                round_number += 1
                prompt = [(7919 * number + 104_729 * round_number + at) % VOCAB_SIZE for at in range(PROMPT_TOKENS)]
                request = inference_pb2.GenerateRequest(
                    token_ids=inference_pb2.TokenIds(ids=prompt), max_tokens=NUM_TOKENS, temperature=0.0,
                    ignore_eos=True, return_timeline=True,
                )  # fmt: skip
                tokens: list[int] = []
                async for response in stub.Generate(request, timeout=ANSWER_TIMEOUT_S):
                    tokens += [token for choice in response.choices for token in choice.token_ids]
                assert tokens == expected_tokens(prompt, NUM_TOKENS)
                self.decoded_by[response.timeline.decode_worker_id] += 1
                self.prefilled_by[response.timeline.prefill_worker_id] += 1


@asynccontextmanager
async def router_in_front(model: Path, directory: Path) -> AsyncIterator[tuple[RouterCore, str]]:
    tokenizer = load_tokenizer(model)
    limits = ServingLimits("mock", tokenizer.vocab_size, 8192)
    settings = RouterSettings.model_validate({"model": "unused", "runtime_dir": directory, "policy": "least_loaded"})
    core = build_core(settings, tokenizer, None, limits, SECURITY, None)
    front = GrpcFront(core.grpc_servicer, "127.0.0.1:0", settings.max_body_bytes)
    await front.start()
    try:
        yield core, f"127.0.0.1:{front.port}"
    finally:
        await front.stop(0)
        await core.stop()


async def announce(core: RouterCore, worker: WorkerProcess, address: str) -> None:
    status = await worker.status()
    record = membership_pb2.WorkerRecord(
        identity=status.identity,
        control_address=address,
        layout=handoff_pb2.KvLayout(num_layers=4, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=16),
        ready=True,
        load=status.load,
    )
    core.registry.on_membership_change(MembershipChange(ChangeKind.JOINED, record))


def is_routable(core: RouterCore, worker_id: str) -> bool:
    return any(state.worker_id == worker_id and state.is_routable for state, _ in core.registry.workers)


async def test_f16_a_parted_network_costs_no_request_and_no_token_and_heals(default_model_path: Path) -> None:
    directory = Path(tempfile.mkdtemp(prefix="tdm-"))
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        fleet = await stack.enter_async_context(fleet_in(directory, default_model_path))
        names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
        workers = await asyncio.gather(
            *(
                fleet.start("prefill" if name.startswith("p") else "decode", name, engine="mock", dtype="auto")
                for name in names
            )
        )
        core, address = await stack.enter_async_context(router_in_front(default_model_path, directory))
        to_prefill, to_decode = [
            await stack.enter_async_context(Relay(directory / f"relay-{worker.settings.worker_id}", worker.address))
            for worker in (workers[0], workers[2])
        ]
        for worker, seen_at in zip(
            workers, (to_prefill.address, workers[1].address, to_decode.address, workers[3].address), strict=True
        ):
            await announce(core, worker, seen_at)
        async with asyncio.timeout(REACHED_TIMEOUT_S):  # a router that has no worker yet refuses requests
            while not all(is_routable(core, name) for name in names):  # noqa: ASYNC110  sessions have no event
                await asyncio.sleep(0.02)
        load = Load(address)
        stack.push_async_callback(load.close)
        await load.until(lambda: load.decoded_by.keys() | load.prefilled_by.keys() >= set(names))

        # Router and decode worker: its streams go on elsewhere at the next token, and it is asked again afterwards.
        to_decode.freeze()
        await load.until(lambda: not is_routable(core, "decode-0"))
        await load.answers(2 * NUM_STREAMS)
        to_decode.heal()
        await load.until(lambda: is_routable(core, "decode-0"))
        before = load.decoded_by["decode-0"]
        await load.until(lambda: load.decoded_by["decode-0"] > before + 3)

        # Decode and prefill worker: prompts go to another one, or are computed where they are decoded.
        to_prefill.freeze()
        await load.answers(4 * NUM_STREAMS)
        assert to_prefill.num_held > 0
        to_prefill.heal()
        before = load.prefilled_by["prefill-0"]
        await load.until(lambda: load.prefilled_by["prefill-0"] > before + 3)

        await load.close()
        for worker in workers:
            await worker.wait_for(all_blocks_are_back, 60, f"{worker.settings.worker_id} has its blocks back")
        assert core.service.num_running == 0
