"""A decode worker that guesses with the layer that came with its checkpoint, behind a prefill worker and alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.decode_worker.speculation.mtp_checkpoints import save_mtp_checkpoint
from tests.engine.steps import tokens_of_one_process
from tests.engine.tiny_models import VOCAB
from tests.integration.worker_processes import Router, all_blocks_are_back, fleet_in

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NUM_TOKENS = 16
DEADLINE_MS = 60_000
BACK_TIMEOUT_S = 30.0


async def test_s33_tokens_are_those_of_the_target_behind_a_prefill_worker_and_alone(tmp_path: Path) -> None:
    model = save_mtp_checkpoint("mimo", tmp_path / "model").directory
    draw = np.random.default_rng(2)
    prompts = [draw.integers(2, VOCAB, length).tolist() for length in (5, 40, 17, 1)]
    expected = tokens_of_one_process(model, prompts, NUM_TOKENS)
    async with fleet_in(tmp_path, model) as fleet:
        options: dict[str, object] = {"backend": "torch", "dtype": "float32", "num_kv_blocks": 64, "speculation": "mtp"}
        prefill, decode = await asyncio.gather(
            fleet.start("prefill", "prefill-0", **options), fleet.start("decode", "decode-0", **options)
        )
        for turn, helpers in (("behind", [prefill]), ("alone", [])):
            async with Router(decode) as router:
                answers = await asyncio.gather(
                    *(
                        router.generate(f"{turn}-{index}", prompt, NUM_TOKENS, helpers, deadline_ms=DEADLINE_MS)
                        for index, prompt in enumerate(prompts)
                    )
                )
            assert [answer.failure for answer in answers] == [None] * len(prompts)
            assert [answer.token_ids for answer in answers] == expected
            status = await decode.wait_for(all_blocks_are_back, BACK_TIMEOUT_S, "blocks are back")
            assert "speculation_mtp_steps" in status.counters
