"""FP8 KV in the reference: what is written comes back within e4m3's rounding, wherever it lies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.errors import StartupError
from cluster.kv_layout import FP8_KV
from engine.kernels import fp8_kv
from engine.kernels.reference import kv_write
from engine.kv_memory import KvMemory, layout_of
from engine.native_runner import NativeRunner
from engine.torch_runner import TorchRunner
from tests.engine.native_model import SMALL_LLAMA, RandomWeights
from tests.engine.steps import BlockDealer, TestSequence, make_step

CONFIG = replace(SMALL_LLAMA, num_layers=2)
# Half a step of e4m3's three bits, and what float32 adds.
ROUNDING = 2.0**-4 * 1.0001


def make_runner(dtype: str) -> tuple[TorchRunner, KvMemory]:
    memory = KvMemory(layout_of(CONFIG, dtype, 16), 80)
    return TorchRunner(RandomWeights(CONFIG), memory, dtype="float32"), memory


def test_rows_come_back_within_rounding_of_their_own_largest_element() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((7, 3, 64), generator=generator) * torch.logspace(-30, 30, 7)[:, None, None]
    rows[3, 1] = 0
    values, scales = fp8_kv.quantize(rows)
    restored = fp8_kv.dequantize(values.view(torch.uint8), scales)
    largest = rows.abs().amax(-1, keepdim=True)
    assert ((restored - rows).abs() <= ROUNDING * rows.abs() + largest * 2.0**-18).all()
    assert torch.equal(restored.abs().amax(-1), largest[..., 0])
    assert restored[3, 1].eq(0).all()


def test_written_rows_lie_in_their_slots_and_nowhere_else() -> None:
    memory = KvMemory(layout_of(CONFIG, FP8_KV, 8), 4)
    memory.tensor.fill_(0xAB)
    before = memory.tensor.clone()
    key, value = torch.randn((2, 3, CONFIG.num_kv_heads, CONFIG.head_dim), generator=torch.Generator().manual_seed(1))
    slots = torch.tensor([0, 8 + 7, 16 + 3])
    kv_write(key, value, memory.tensor, 1, slots)
    values, scales = fp8_kv.split_pool(memory.tensor)
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, 8)
        for part, rows in enumerate((key[token], value[token])):
            restored = fp8_kv.dequantize(values[block, 1, part, :, offset], scales[block, 1, part, :, offset])
            torch.testing.assert_close(restored, rows, atol=0.02, rtol=ROUNDING)
    changed = (memory.tensor != before).flatten(4)
    assert not changed[:, 0].any()
    num_written = 3 * 2 * CONFIG.num_kv_heads
    assert num_written * CONFIG.head_dim * 0.9 < int(changed.sum()) <= num_written * (CONFIG.head_dim + 4)


def test_k19_prompts_of_every_residue_stay_near_what_they_are_with_wide_kv() -> None:
    """Sixteen prompts, 16 to 31 tokens, and the eight tokens after each: no residue is worse than the others."""
    outputs = []
    for dtype in ("float32", FP8_KV):
        runner, memory = make_runner(dtype)
        dealer = BlockDealer(memory)
        draw = np.random.default_rng(5)
        sequences = [
            dealer.sequence(draw.integers(0, CONFIG.vocab_size, 24 + residue).tolist()) for residue in range(16)
        ]
        rows = [runner.forward(make_step(dealer, [(each, 16 + n) for n, each in enumerate(sequences)]), None).logits]
        rows += [runner.forward(make_step(dealer, [(each, 1) for each in sequences]), None).logits for _ in range(8)]
        outputs.append(torch.stack(rows, 1))
    expected, logits = outputs
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)  # [residue, token]
    assert 0 < errors.max() < 0.2  # random weights pass every rounding on
    assert errors.mean(1).max() < 1.6 * errors.mean()


def test_chunks_of_any_size_give_the_same_logits() -> None:
    """A scale belongs to its token alone."""
    last = []
    for chunk in (37, 16, 5):
        runner, memory = make_runner(FP8_KV)
        dealer = BlockDealer(memory)
        sequence: TestSequence = dealer.sequence(range(37))
        while sequence.computed < 37:
            logits = runner.forward(make_step(dealer, [(sequence, min(chunk, 37 - sequence.computed))]), None).logits
        last.append(logits.clone())
    for other in last[1:]:
        torch.testing.assert_close(other, last[0], atol=2e-3, rtol=0)


def test_moved_tokens_take_their_scales_along() -> None:
    memory = KvMemory(layout_of(CONFIG, FP8_KV, 4), 3)
    memory.tensor.copy_(torch.randint(0, 127, memory.tensor.shape, generator=torch.Generator().manual_seed(2)))
    before = [part.clone() for part in fp8_kv.split_pool(memory.tensor)]
    memory.move_tokens([1, 5, 11], [2, 1, 4])
    for part, old in zip(fp8_kv.split_pool(memory.tensor), before, strict=True):
        assert torch.equal(part[0, :, :, :, 2], old[0, :, :, :, 1])
        assert torch.equal(part[0, :, :, :, 1], old[1, :, :, :, 1])
        assert torch.equal(part[1, :, :, :, 0], old[2, :, :, :, 3])
        assert torch.equal(part[2], old[2])


def test_a_block_has_its_scales_and_what_cannot_be_laid_out_or_read_is_refused() -> None:
    layout = layout_of(CONFIG, FP8_KV, 16)
    assert layout.block_bytes == 2 * 2 * CONFIG.num_kv_heads * 16 * (CONFIG.head_dim + 4)
    assert layout.order != layout_of(CONFIG, "bfloat16", 16).order
    with pytest.raises(StartupError, match="multiple of 4"):
        layout_of(replace(CONFIG, head_dim=2), FP8_KV, 1)
    with pytest.raises(StartupError, match="backend native keeps KV in bfloat16 or float32, not fp8_e4m3"):
        NativeRunner(CONFIG, RandomWeights(CONFIG), KvMemory(layout, 4), dtype="float32")
