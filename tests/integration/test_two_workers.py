"""A prefill and a decode worker as real processes with the real model: the same tokens, whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tandem.v1 import common_pb2, worker_pb2

from tests.exactness.make_greedy_reference import REFERENCE_FILE
from tests.integration.worker_processes import Router, WorkerFleet, all_blocks_are_back, fleet_in
from tests.kv_transfer.all_transports import needs_library

pytestmark = [pytest.mark.model, pytest.mark.cluster, pytest.mark.timeout(600)]

BLOCK_TOKENS = 16
# The reference has prompts of these lengths; one token, around a block's edge, and the longest.
PROMPT_LENGTHS = {
    "shm-direct": (17, 1000),
    "shm": (1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2000),
    "tcp": (BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 200),
    "ucx": (BLOCK_TOKENS + 1, 200),
    "nixl": (BLOCK_TOKENS + 1, 200),
}
NUM_TOKENS = 16
BACK_TIMEOUT_S = 60.0
# 1,000 tokens of float32 KV are 46 MB: over four seconds on this link, so what a test does falls into the transfer.
SLOW_LINK_BYTES_PER_S = 10_000_000
# Of a transfer that is waited for.
OVERLAP_LINK_BYTES_PER_S = 20_000_000


@pytest.fixture
async def fleet(tmp_path: Path, default_model_path: Path) -> AsyncIterator[WorkerFleet]:
    async with fleet_in(tmp_path, default_model_path) as fleet:
        yield fleet


def reference_row(num_tokens: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = json.loads(REFERENCE_FILE.read_text())
    return next(row for row in rows if len(row["prompt"]) == num_tokens)


@pytest.mark.parametrize("transport", PROMPT_LENGTHS)
async def test_tokens_through_two_workers_equal_one_process(fleet: WorkerFleet, transport: str) -> None:
    needs_library(transport)
    prefill, decode = await asyncio.gather(
        fleet.start("prefill", "prefill-0", transports=(transport,)),
        fleet.start("decode", "decode-0", transports=(transport,)),
    )
    async with Router(decode) as router:
        for num_tokens in PROMPT_LENGTHS[transport]:
            row = reference_row(num_tokens)
            answer = await router.generate(f"r{num_tokens}", row["prompt"], NUM_TOKENS, [prefill])
            assert answer.failure is None
            assert answer.token_ids == row["tokens"][:NUM_TOKENS], f"prompt of {num_tokens} tokens"
            timeline = answer.last.timeline
            assert (timeline.transport, timeline.prefill_worker_id) == (transport, "prefill-0")
            assert timeline.kv_frames > 0
            assert answer.last.completion_tokens == NUM_TOKENS
            assert 0 < timeline.reserved_us < timeline.first_token_us
    await decode.wait_for(all_blocks_are_back, BACK_TIMEOUT_S, "decode blocks are back")
    await prefill.wait_for(all_blocks_are_back, BACK_TIMEOUT_S, "prefill blocks are back")
    assert await asyncio.to_thread(decode.stop) == 0
    assert await asyncio.to_thread(prefill.stop) == 0


async def test_kv40_auto_says_what_it_took_and_a_link_below_min_bandwidth_ends_in_local_prefill(
    fleet: WorkerFleet,
) -> None:
    auto, picky, decode = await asyncio.gather(
        fleet.start("prefill", "prefill-auto", transports=("auto",)),
        fleet.start("prefill", "prefill-picky", transports=("auto",), min_bandwidth=1e15),
        fleet.start("decode", "decode-0", transports=("auto",)),
    )
    row = reference_row(17)
    async with Router(decode) as router:
        for peer in (auto, picky):  # without membership a request is what makes them meet
            await router.generate(f"meet {peer.address}", row["prompt"], 1, [peer])
        expected = {"prefill-auto": "ready", "prefill-picky": "refused"}
        await decode.wait_for(
            lambda status: {peer.worker_id: peer.state for peer in status.peers} == expected, 60, "both were measured"
        )
        await decode.reset_prefix_cache()
        pushed = await router.generate("auto", row["prompt"], NUM_TOKENS, [auto])
        await decode.reset_prefix_cache()
        local = await router.generate("picky", row["prompt"], NUM_TOKENS, [picky], allow_local_prefill=True)
    assert pushed.token_ids == local.token_ids == row["tokens"][:NUM_TOKENS]
    assert (pushed.last.timeline.prefill_worker_id, local.last.timeline.prefill_worker_id) == ("prefill-auto", "")
    status = await decode.status()
    peers = {peer.worker_id: peer for peer in status.peers}
    assert peers["prefill-auto"].transport == pushed.last.timeline.transport
    assert peers["prefill-auto"].reason.startswith("auto among ")
    assert "min_bandwidth is" in peers["prefill-picky"].reason
    assert status.counters["local_prefills"] == 1


async def test_aggregated_worker_gives_the_same_tokens(fleet: WorkerFleet) -> None:
    worker = await fleet.start("aggregated", "solo-0")
    async with Router(worker) as router:
        for num_tokens in PROMPT_LENGTHS["tcp"]:
            row = reference_row(num_tokens)
            answer = await router.generate(f"r{num_tokens}", row["prompt"], NUM_TOKENS)
            assert answer.token_ids == row["tokens"][:NUM_TOKENS], f"prompt of {num_tokens} tokens"
            assert (answer.last.timeline.prefill_worker_id, answer.last.timeline.attempts) == ("", 0)
            assert answer.last.timeline.prefill_compute_us > 0
    await worker.wait_for(all_blocks_are_back, BACK_TIMEOUT_S, "blocks are back")


async def test_concurrent_requests_are_batched_with_the_tokens_they_have_alone(fleet: WorkerFleet) -> None:
    prefill, decode = await fleet.start_pair()
    rows = [reference_row(num_tokens) for num_tokens in (1, 15, 16, 17, 31, 32, 33, 100, 127, 200)]
    async with Router(decode) as router:
        answers = await asyncio.gather(
            *(router.generate(f"r{index}", row["prompt"], 32, [prefill]) for index, row in enumerate(rows))
        )
    assert [answer.token_ids for answer in answers] == [row["tokens"][:32] for row in rows]
    status = await decode.status()
    assert status.counters["max_batch_size"] >= 3
    assert status.counters["transfers_verified"] == len(rows)


async def test_k21_k22_prefix_on_the_decode_worker_is_neither_sent_nor_computed_again(fleet: WorkerFleet) -> None:
    prefill, decode = await fleet.start_pair()
    row = reference_row(200)
    async with Router(decode) as router:
        first = await router.generate("first", row["prompt"], NUM_TOKENS, [prefill])
        before = await decode.status()
        second = await router.generate("second", row["prompt"], NUM_TOKENS, [prefill])
    after = await decode.status()
    assert first.token_ids == second.token_ids == row["tokens"][:NUM_TOKENS]
    assert (first.first.cached_tokens, second.first.cached_tokens) == (0, 192)
    # 200 tokens are 12 full blocks and a part of one: only the last block travels again.
    block_bytes = before.counters["kv_bytes_received"] / 13
    assert after.counters["kv_bytes_received"] - before.counters["kv_bytes_received"] == block_bytes
    assert second.last.timeline.prefill_worker_id == "prefill-0"


async def test_f01_sigkill_of_prefill_in_mid_transfer_goes_on_with_another(fleet: WorkerFleet) -> None:
    slow, healthy, decode = await asyncio.gather(
        fleet.start("prefill", "prefill-slow", link_bytes_per_s=SLOW_LINK_BYTES_PER_S),
        fleet.start("prefill", "prefill-1"),
        fleet.start("decode", "decode-0"),
    )
    row = reference_row(1000)
    async with Router(decode) as router:
        await router.submit("r", row["prompt"], NUM_TOKENS, [slow, healthy])
        await decode.wait_for(lambda status: status.counters["kv_bytes_received"] > 0, 60, "KV moves")
        slow.kill()
        answer = await router.answer("r")
    assert answer.failure is None
    assert answer.token_ids == row["tokens"][:NUM_TOKENS]
    assert (answer.last.timeline.prefill_worker_id, answer.last.timeline.attempts) == ("prefill-1", 2)
    await decode.wait_for(all_blocks_are_back, BACK_TIMEOUT_S, "decode blocks are back")
    await healthy.wait_for(all_blocks_are_back, BACK_TIMEOUT_S, "prefill blocks are back")


async def test_f07_kv24_sigkill_of_the_only_prefill_worker_ends_in_local_prefill(fleet: WorkerFleet) -> None:
    prefill, decode = await asyncio.gather(
        fleet.start("prefill", "prefill-0", link_bytes_per_s=SLOW_LINK_BYTES_PER_S),
        fleet.start("decode", "decode-0"),
    )
    row = reference_row(1000)
    async with Router(decode) as router:
        await router.submit("r", row["prompt"], NUM_TOKENS, [prefill], allow_local_prefill=True)
        await decode.wait_for(lambda status: status.counters["kv_bytes_received"] > 0, 60, "KV moves")
        prefill.kill()
        answer = await router.answer("r")
        refused = await router.generate("refused", row["prompt"], NUM_TOKENS, [prefill])
    assert answer.token_ids == row["tokens"][:NUM_TOKENS]
    assert answer.last.timeline.prefill_worker_id == ""
    assert refused.failure is not None
    assert refused.failure.retryable
    status = await decode.wait_for(all_blocks_are_back, BACK_TIMEOUT_S, "decode blocks are back")
    assert status.counters["local_prefills"] == 1
    assert [(fallback.component, fallback.used) for fallback in status.fallbacks if fallback.component == "prefill"]


async def test_kv36_prefill_worker_restarts_on_the_same_address(fleet: WorkerFleet) -> None:
    prefill, decode = await fleet.start_pair()
    row = reference_row(100)
    async with Router(decode) as router:
        await router.generate("before", row["prompt"], 4, [prefill])
        prefill.kill()
        again = await fleet.start("prefill", "prefill-0")
        # Its stream broke with the old process; the new one is found behind the same address by itself.
        await decode.wait_for(lambda status: _peer_state(status) == "ready", 60, "reconnected")
        await decode.reset_prefix_cache()
        answer = await router.generate("after", row["prompt"], NUM_TOKENS, [again])
    assert answer.token_ids == row["tokens"][:NUM_TOKENS]
    assert answer.last.timeline.prefill_worker_id == "prefill-0"


async def test_f27_other_block_size_is_refused_at_hello_by_the_fields_name(fleet: WorkerFleet) -> None:
    prefill, decode = await asyncio.gather(
        fleet.start("prefill", "prefill-0", block_tokens=24), fleet.start("decode", "decode-0")
    )
    row = reference_row(33)
    async with Router(decode) as router:
        refused = await router.generate("remote", row["prompt"], 4, [prefill])
        assert refused.failure is not None
        assert "layout.block_tokens" in refused.failure.message
        local = await router.generate("local", row["prompt"], NUM_TOKENS, [prefill], allow_local_prefill=True)
    assert local.token_ids == row["tokens"][:NUM_TOKENS]
    status = await decode.status()
    assert [(peer.state, "layout.block_tokens" in peer.reason) for peer in status.peers] == [("refused", True)]


async def test_kv17_blocks_of_twice_the_size_are_gathered_into_ours_exactly(fleet: WorkerFleet) -> None:
    prefill, decode = await asyncio.gather(
        fleet.start("prefill", "prefill-0", block_tokens=32), fleet.start("decode", "decode-0")
    )
    for num_tokens in (33, 1000):
        row = reference_row(num_tokens)
        async with Router(decode) as router:
            answer = await router.generate(f"r{num_tokens}", row["prompt"], NUM_TOKENS, [prefill])
        assert answer.token_ids == row["tokens"][:NUM_TOKENS]
        assert answer.last.timeline.prefill_worker_id == "prefill-0"


async def test_layers_overlap_on_a_slow_link(fleet: WorkerFleet) -> None:
    """What both need at once is hidden, whichever takes longer on this machine: layers travel while later ones run."""
    prefill, decode = await asyncio.gather(
        fleet.start("prefill", "prefill-0", link_bytes_per_s=OVERLAP_LINK_BYTES_PER_S),
        fleet.start("decode", "decode-0"),
    )
    row = reference_row(1000)
    async with Router(decode) as router:
        answer = await router.generate("slow", row["prompt"], 2, [prefill])
    timeline = answer.last.timeline
    assert answer.token_ids == row["tokens"][:2]
    hidden_us = timeline.transfer_total_us - timeline.transfer_exposed_us
    assert hidden_us > 0.5 * min(timeline.transfer_total_us, timeline.prefill_compute_us)


async def test_f20_drain_finishes_what_runs_and_refuses_what_comes(fleet: WorkerFleet) -> None:
    prefill, decode = await fleet.start_pair()
    row = reference_row(100)
    async with Router(decode) as router:
        await router.submit("running", row["prompt"], 64, [prefill])
        await router.submit("keeps it open", row["prompt"], 4000, [prefill])
        await asyncio.gather(router.first_token("running"), router.first_token("keeps it open"))
        decode.terminate()
        await decode.wait_for(lambda status: status.load.draining, 60, "it drains")
        late = await router.generate("late", row["prompt"], 4, [prefill])
        await router.cancel("keeps it open")
        answer = await router.answer("running")
    assert answer.token_ids == row["tokens"][:64]
    assert late.failure is not None
    assert late.failure.retryable
    assert await asyncio.to_thread(decode.process.wait, 60) == 0
    assert await asyncio.to_thread(prefill.stop) == 0


async def test_f17_client_that_cancels_gives_blocks_back_on_both_sides(fleet: WorkerFleet) -> None:
    prefill, decode = await asyncio.gather(
        # A cancelled prompt ends with the engine's step: short steps, so that the bound below is about the workers.
        fleet.start("prefill", "prefill-0", link_bytes_per_s=SLOW_LINK_BYTES_PER_S, max_batch_tokens=64),
        fleet.start("decode", "decode-0"),
    )
    prompt = reference_row(1000)["prompt"]
    async with Router(decode) as router:
        for stage in ("at once", "in prefill", "in transfer", "while decoding"):
            await prefill.reset_prefix_cache()
            await decode.reset_prefix_cache()
            bytes_before = (await decode.status()).counters.get("kv_bytes_received", 0.0)
            await router.submit(stage, prompt, 500, [prefill])
            if stage == "in prefill":
                await prefill.wait_for(lambda status: status.load.running_requests > 0, 60, "P computes")
            elif stage == "in transfer":
                await decode.wait_for(lambda s: s.counters["kv_bytes_received"] > bytes_before, 60, "KV moves")  # noqa: B023
            elif stage == "while decoding":
                await router.first_token(stage)
            await router.cancel(stage)
            await decode.wait_for(all_blocks_are_back, BACK_TIMEOUT_S, f"decode blocks are back, cancelled {stage}")
            await prefill.wait_for(all_blocks_are_back, BACK_TIMEOUT_S, f"prefill blocks are back, cancelled {stage}")
            answer = await router.answer(stage)
            assert answer.last.finish_reason == common_pb2.FINISH_REASON_CANCELLED
        row = reference_row(17)
        assert (await router.generate("next", row["prompt"], 8, [prefill])).token_ids == row["tokens"][:8]


async def test_router_that_hangs_up_leaves_nothing(fleet: WorkerFleet) -> None:
    prefill, decode = await fleet.start_pair()
    row = reference_row(100)
    async with Router(decode) as router:
        for index in range(4):
            await router.submit(f"r{index}", row["prompt"], 500, [prefill])
        await router.first_token("r0")
        router.hang_up()
        await decode.wait_for(all_blocks_are_back, BACK_TIMEOUT_S, "decode blocks are back")
        await prefill.wait_for(all_blocks_are_back, BACK_TIMEOUT_S, "prefill blocks are back")
    assert (await decode.status()).load.running_requests == 0


async def test_f23_few_blocks_queue_and_never_deadlock(fleet: WorkerFleet) -> None:
    prefill, decode = await asyncio.gather(
        fleet.start("prefill", "prefill-0"), fleet.start("decode", "decode-0", num_kv_blocks=8)
    )
    rows = [reference_row(num_tokens) for num_tokens in (31, 32, 33, 47, 48, 49)]
    async with Router(decode) as router:
        answers = await asyncio.gather(
            *(router.generate(f"r{index}", row["prompt"], 8, [prefill]) for index, row in enumerate(rows))
        )
        too_large = await router.generate("large", reference_row(127)["prompt"], 20, [prefill])
    assert [answer.token_ids for answer in answers] == [row["tokens"][:8] for row in rows]
    assert too_large.failure is not None
    assert too_large.failure.code == "request_exceeds_kv_capacity"
    await decode.wait_for(all_blocks_are_back, BACK_TIMEOUT_S, "decode blocks are back")


def _peer_state(status: worker_pb2.WorkerStatus) -> str:
    return status.peers[0].state if status.peers else ""
