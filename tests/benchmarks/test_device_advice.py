"""What the tables say about models and devices whose arithmetic is known."""

from __future__ import annotations

import pytest

from benchmarks.device_advice import (
    BATCHES,
    MIN_SEQUENCES,
    Replica,
    advice_lines,
    best_replicas,
    drafter_rows,
    fleet_rows,
    quantisation_rows,
    smallest_replica,
    throughput,
)
from benchmarks.hardware_catalogue import DEVICES
from benchmarks.hardware_prior import QUANTISATIONS, all_reduce_ms, capacity_prior
from benchmarks.model_arithmetic import MODELS, ModelShape
from benchmarks.pool_capacity import TrafficShape

BF16, FP8, INT8, INT4 = QUANTISATIONS
LARGE, SMALL, EXPERTS = MODELS["Llama-3-70B"], MODELS["Llama-3.1-8B"], MODELS["Mixtral-8x7B"]
CHAT = TrafficShape(2000.0, 300.0)


def test_70b_in_bf16_needs_four_h100_two_h200_or_one_b200() -> None:
    found = [smallest_replica(LARGE, DEVICES[name], BF16, CHAT, 50.0) for name in ("H100", "H200", "B200")]
    assert [one.replica.num_devices for one in found if one is not None] == [4, 2, 1]
    in_fp8 = smallest_replica(LARGE, DEVICES["H100"], FP8, CHAT, 50.0)
    assert in_fp8 is not None
    assert in_fp8.replica.num_devices == 2


def test_a_replica_that_cannot_keep_the_objective_is_none() -> None:
    assert smallest_replica(LARGE, DEVICES["zen4-core"], INT4, CHAT, 50.0) is None
    assert best_replicas(LARGE, CHAT, 50.0)["zen4-core"] is None
    assert any(row[:2] == ("8 x zen4-core", "none") for row in fleet_rows(LARGE, CHAT, 50.0))


def test_a_batch_is_what_the_objective_and_the_pool_allow() -> None:
    replica = Replica(SMALL, DEVICES["H100"], 1, BF16)
    bound_by_time = throughput(replica, CHAT, 15.0)
    bound_by_memory = throughput(replica, CHAT, 500.0)
    model = capacity_prior(SMALL, DEVICES["H100"], BF16)
    assert model.tpot_ms(bound_by_time.batch, 2300) <= 15.0 < model.tpot_ms(bound_by_time.batch + 1, 2300)
    assert bound_by_memory.batch == bound_by_memory.num_sequences > bound_by_time.batch
    assert throughput(replica, CHAT, 1.0).output_tokens_per_s == 0.0


def test_two_devices_share_the_work_and_pay_for_talking() -> None:
    for name in ("H100", "L40S"):
        one, two = (Replica(SMALL, DEVICES[name], count, BF16).token_ms(64, 1024) for count in (1, 2))
        assert one / 2 < two < one
    # 8,192 bytes of activations a token, twice a layer; over PCIe fourteen times as dear as over NVLink.
    by_nvlink, by_pcie = (
        all_reduce_ms(SMALL, DEVICES[name], 4096, 2) - all_reduce_ms(SMALL, DEVICES[name], 0, 2)
        for name in ("H100", "L40S")
    )
    assert by_nvlink == pytest.approx(2 * 32 * 4096 * 8192 / 450e9 * 1e3)
    assert by_pcie / by_nvlink == pytest.approx(450 / 32)
    assert all_reduce_ms(SMALL, DEVICES["H100"], 4096, 1) == 0.0


def test_what_has_no_room_has_no_time_and_the_fastest_is_marked() -> None:
    head, *rows = quantisation_rows(Replica(LARGE, DEVICES["H100"], 1, BF16), 2300)
    assert head[-len(BATCHES) :] == tuple(map(str, BATCHES))
    by_name = {row[0]: row[3:] for row in rows}
    assert by_name["bf16"] == by_name["fp8"] == ("-",) * len(BATCHES)  # 141 and 71 GB of 68
    assert by_name["int4"][0].endswith("*")
    assert by_name["int4"][-1] == "-"


def test_the_rule_of_thumb_stands_beside_the_exact_tokens_of_a_pass() -> None:
    _, *rows = drafter_rows(Replica(LARGE, DEVICES["H200"], 2, BF16), 2300)
    eagle = next(row for row in rows if row[0] == "eagle")
    assert eagle[1:5] == ("5", "0.72", "3.07", "4.60")
    assert float(eagle[5]) > 2 > 1 > float(eagle[-1])  # alone it pays, at 256 it does not


@pytest.mark.parametrize("model", [LARGE, SMALL, EXPERTS])
def test_every_line_is_for_a_terminal_and_says_that_nothing_was_measured(model: ModelShape) -> None:
    lines = advice_lines(Replica(model, DEVICES["B200"], 1, FP8), CHAT, 50.0)
    assert "nothing measured" in lines[0]
    assert max(map(len, lines[1:])) < 170
    assert "\n".join(lines).count("*") >= len(BATCHES)


def test_experts_say_how_many_parameters_a_token_meets() -> None:
    lines = advice_lines(Replica(EXPERTS, DEVICES["H200"], 1, BF16), CHAT, 50.0)
    assert "46.7 billion parameters, 12.7 of them for a token" in lines[1]


def test_a_few_sequences_must_fit() -> None:
    found = best_replicas(SMALL, TrafficShape(30_000.0, 500.0), 50.0)
    assert all(one is None or one.num_sequences >= MIN_SEQUENCES for one in found.values())
