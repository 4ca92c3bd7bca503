"""A prefill and a decode worker of backend triton, their pools in device memory, give one process's tokens.

Without a GPU they run in Triton's interpreter, with torch's CPU memory for the device's: a model of two small layers.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

from tests.engine.steps import tokens_of_one_process
from tests.engine.tiny_models import VOCAB, random_model, save_safetensors
from tests.integration.worker_processes import Router, all_blocks_are_back, fleet_in

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NUM_TOKENS = 3
PROMPT_LENGTHS = (1, 18)
BACK_TIMEOUT_S = 60.0


async def test_tokens_through_two_workers_equal_one_process(tmp_path: Path) -> None:
    model = save_safetensors(
        random_model("llama", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1), tmp_path / "model"
    )
    draw = np.random.default_rng(1)
    prompts = [draw.integers(2, VOCAB, length).tolist() for length in PROMPT_LENGTHS]
    expected = tokens_of_one_process(model, prompts, NUM_TOKENS)
    async with fleet_in(tmp_path, model) as fleet:
        options = {"backend": "triton", "num_kv_blocks": 32}
        prefill, decode = await asyncio.gather(
            fleet.start("prefill", "prefill-0", **options), fleet.start("decode", "decode-0", **options)
        )
        async with Router(decode) as router:
            answers = await asyncio.gather(
                *(
                    router.generate(f"r{len(prompt)}", prompt, NUM_TOKENS, [prefill], deadline_ms=120_000)
                    for prompt in prompts
                )
            )
        for answer, tokens in zip(answers, expected, strict=True):
            assert answer.failure is None
            assert answer.token_ids == tokens
            timeline = answer.last.timeline
            assert (timeline.transport, timeline.prefill_worker_id) == ("shm", "prefill-0")
            assert timeline.kv_frames > 0
        for worker in (prefill, decode):
            await worker.wait_for(all_blocks_are_back, BACK_TIMEOUT_S, "blocks are back")
            assert (await worker.status()).details["backend"] == "triton"
            assert await asyncio.to_thread(worker.stop) == 0
