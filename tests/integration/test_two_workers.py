"""A prefill and a decode worker as real processes with the real model: the same tokens, whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.exactness.make_greedy_reference import REFERENCE_FILE
from tests.integration.worker_processes import Router, WorkerFleet, all_blocks_are_back, fleet_in

pytestmark = [pytest.mark.model, pytest.mark.cluster, pytest.mark.timeout(600)]

BLOCK_TOKENS = 16
# The reference has prompts of these lengths; one token, around a block's edge, and the longest.
PROMPT_LENGTHS = (1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2000)
NUM_TOKENS = 16
BACK_TIMEOUT_S = 5.0


@pytest.fixture
async def fleet(tmp_path: Path, default_model_path: Path) -> AsyncIterator[WorkerFleet]:
    async with fleet_in(tmp_path, default_model_path) as fleet:
        yield fleet


def reference_row(num_tokens: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = json.loads(REFERENCE_FILE.read_text())
    return next(row for row in rows if len(row["prompt"]) == num_tokens)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_tokens_through_two_workers_equal_one_process(fleet: WorkerFleet, transport: str) -> None:
    prefill, decode = await asyncio.gather(
        fleet.start("prefill", "prefill-0"), fleet.start("decode", "decode-0", transports=(transport,))
    )
    async with Router(decode) as router:
        for num_tokens in PROMPT_LENGTHS:
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
