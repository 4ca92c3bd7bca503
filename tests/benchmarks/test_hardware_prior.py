"""The textbook's arithmetic, number by number."""

from __future__ import annotations

import pytest

from benchmarks.hardware_catalogue import DEVICES
from benchmarks.hardware_prior import (
    DRAFTERS,
    QUANTISATIONS,
    best_drafter,
    best_quantisation,
    capacity_prior,
    fit,
    num_blocks_in,
    speculative_token_ms,
    step_ms,
    tokens_per_pass,
    tokens_per_pass_linear,
    transfer_ms,
)
from benchmarks.model_arithmetic import MODELS

BF16, FP8, INT8, INT4 = QUANTISATIONS


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("SmolLM2-135M", 0.1345),
        ("Mistral-7B", 7.24),
        ("Llama-3.1-8B", 8.03),
        ("Llama-3-70B", 70.55),
        ("Qwen3-8B", 8.19),
        ("Mixtral-8x7B", 46.7),
        ("Qwen3-30B-A3B", 30.5),
    ],
)
def test_parameters_come_out_as_published(name: str, billions: float) -> None:
    assert MODELS[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_active_parameters_of_experts_come_out_as_published() -> None:
    assert MODELS["Mixtral-8x7B"].num_active_parameters / 1e9 == pytest.approx(12.9, rel=0.02)
    assert MODELS["Qwen3-30B-A3B"].num_active_parameters / 1e9 == pytest.approx(3.3, rel=0.1)


def test_a_large_batch_touches_every_expert_and_one_token_its_own() -> None:
    model = MODELS["Mixtral-8x7B"]
    assert model.num_touched_parameters(1) == pytest.approx(model.num_active_parameters)
    whole = model.num_parameters - model.vocab_size * model.hidden_size
    assert model.num_touched_parameters(500) == pytest.approx(whole)


def test_kv_of_ten_thousand_tokens_of_70b_is_3_3_gb_and_65_ms_at_50_gb_per_s() -> None:
    kv_bytes = 10_000 * MODELS["Llama-3-70B"].kv_bytes_per_token()
    assert kv_bytes / 1e9 == pytest.approx(3.3, abs=0.05)
    assert transfer_ms(kv_bytes, 50e9) == pytest.approx(65, abs=1)


def test_kv_of_ten_thousand_tokens_of_8b_is_1_3_gb() -> None:
    assert 10_000 * MODELS["Llama-3.1-8B"].kv_bytes_per_token() / 1e9 == pytest.approx(1.3, abs=0.05)


def test_a_block_of_a_7b_model_is_two_mebibytes_and_60_gb_hold_28500() -> None:
    assert MODELS["Mistral-7B"].kv_block_bytes(16) == 2_097_152
    assert num_blocks_in(60e9, MODELS["Mistral-7B"]) == pytest.approx(28_500, rel=0.005)


def test_tokens_per_pass_at_80_percent_and_four_drafts_are_3_4() -> None:
    assert tokens_per_pass(0.8, 4) == pytest.approx(3.4, abs=0.05)
    assert tokens_per_pass(0.0, 4) == 1.0
    assert tokens_per_pass(1.0, 4) == 5.0


@pytest.mark.parametrize(("drafter", "expected_ms"), [("standalone", 12.4), ("eagle", 9.7), ("medusa", 12.0)])
def test_speculation_for_a_70b_target_at_42_ms(drafter: str, expected_ms: float) -> None:
    (one,) = [candidate for candidate in DRAFTERS if candidate.name == drafter]
    by_rule = speculative_token_ms(
        42.0, 42.0 * one.cost_share, 5, tokens_per_pass_linear(one.acceptance, one.num_drafts)
    )
    exact = speculative_token_ms(42.0, 42.0 * one.cost_share, 5, tokens_per_pass(one.acceptance, one.num_drafts))
    assert by_rule == pytest.approx(expected_ms, abs=0.05)
    assert exact > by_rule


def test_what_fits_and_what_does_not() -> None:
    assert fit(MODELS["Llama-3-70B"], DEVICES["H100"], BF16).kv_blocks == 0
    with pytest.raises(ValueError, match=r"141\.\d GB: it does not fit on 1 x H100"):
        capacity_prior(MODELS["Llama-3-70B"], DEVICES["H100"], BF16)
    room = fit(MODELS["Llama-3.1-8B"], DEVICES["H100"], BF16)
    assert room.num_sequences(4096) == room.kv_tokens // 4096
    assert 80 < room.num_sequences(4096) < 110


def test_int4_pays_for_one_stream_and_fp8_for_a_large_batch() -> None:
    model, device = MODELS["Llama-3.1-8B"], DEVICES["H100"]
    assert best_quantisation(model, device, batch=1, context_tokens=1024) is INT4
    assert best_quantisation(model, device, batch=512, context_tokens=128) is FP8


def test_speculation_pays_alone_and_not_in_a_crowd() -> None:
    model, device = MODELS["Llama-3.1-8B"], DEVICES["H100"]
    alone = best_drafter(model, device, BF16, batch=1, context_tokens=1024)
    crowd = best_drafter(model, device, BF16, batch=512, context_tokens=128)
    assert alone.drafter == "eagle"
    assert alone.speedup > 2
    assert crowd.drafter == "off"


def test_prior_says_what_the_roofline_says() -> None:
    model, device = MODELS["Llama-3.1-8B"], DEVICES["H100"]
    prior = capacity_prior(model, device, BF16)
    assert prior.tpot_ms(1, 1024) == pytest.approx(step_ms(model, device, BF16, 1, 1024), rel=0.02)
    # 16 GB of weights at 2.7 TB/s: about 6 ms; 8k tokens at 495 TFLOP/s: about a quarter of a second.
    assert 5 < prior.tpot_ms(1, 0) < 9
    assert 200 < prior.prefill_ms(8192, 0) < 400


def test_every_number_of_the_catalogue_has_a_source() -> None:
    assert {"H100", "H200", "B200", "L40S"} < set(DEVICES)
    assert all(len(device.source) > 20 for device in DEVICES.values())


def test_rates_are_dense_and_links_count_one_direction() -> None:
    hopper, blackwell, ada = DEVICES["H100"], DEVICES["B200"], DEVICES["L40S"]
    # The data sheets' own bf16 numbers are 1,979, 4,500 and 733: with sparsity.
    assert [device.flops["bf16"] / 1e12 for device in (hopper, blackwell, ada)] == [989, 2250, 362]
    assert DEVICES["H200"].flops == hopper.flops
    assert hopper.link_bytes_per_s == 900e9 / 2
    assert ada.link_bytes_per_s == ada.pcie_bytes_per_s == 64e9 / 2
    for device in DEVICES.values():
        assert device.flops_of("fp8") in (device.flops["bf16"], device.flops.get("fp8"))
        assert device.nic_bytes_per_s <= device.pcie_bytes_per_s <= device.link_bytes_per_s
