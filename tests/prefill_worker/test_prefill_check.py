"""What a prefill worker takes on: every field at and beyond its edge."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tandem.v1 import handoff_pb2

from cluster.errors import ServerOverloaded, TandemError
from cluster.identity import new_transfer_id
from cluster.sampling_params import SamplingParams
from prefill_worker.prefill_check import PrefillLimits, check_load, check_prefill

LIMITS = PrefillLimits(vocab_size=1000, max_model_len=256, block_tokens=16, total_blocks=20, max_credit_bytes=2**20)


def request(num_tokens: int = 40, have_tokens: int = 16) -> handoff_pb2.PrefillRequest:
    num_blocks = -(-(num_tokens - have_tokens) // 16)
    return handoff_pb2.PrefillRequest(
        key=handoff_pb2.TransferKey(transfer_id=new_transfer_id(), epoch=1),
        token_ids=range(num_tokens),
        sampling=SamplingParams(max_tokens=8).to_proto(),
        have_tokens=have_tokens,
        destination=[handoff_pb2.BlockRef(block=index, generation=3) for index in range(num_blocks)],
        deadline_ms=1000,
        idle_ms=5000,
        credit_bytes=1 << 20,
    )


@pytest.mark.parametrize(("num_tokens", "have_tokens"), [(1, 0), (15, 0), (16, 0), (17, 0), (17, 16), (255, 240)])
def test_requests_at_the_edges_are_taken(num_tokens: int, have_tokens: int) -> None:
    checked = check_prefill(request(num_tokens, have_tokens), LIMITS)
    assert len(checked.token_ids) == num_tokens
    assert len(checked.destination) == -(-(num_tokens - have_tokens) // 16)


def _no_key(message: handoff_pb2.PrefillRequest) -> None:
    message.key.transfer_id = b"short"


def _epoch_zero(message: handoff_pb2.PrefillRequest) -> None:
    message.key.epoch = 0


def _foreign_token(message: handoff_pb2.PrefillRequest) -> None:
    message.token_ids[3] = 1000


def _negative_token(message: handoff_pb2.PrefillRequest) -> None:
    message.token_ids[39] = -1


def _unaligned_prefix(message: handoff_pb2.PrefillRequest) -> None:
    message.have_tokens = 17


def _all_is_there(message: handoff_pb2.PrefillRequest) -> None:
    message.token_ids[:] = range(16)


def _too_few_blocks(message: handoff_pb2.PrefillRequest) -> None:
    del message.destination[-1]


def _same_block_twice(message: handoff_pb2.PrefillRequest) -> None:
    message.destination[1].block = message.destination[0].block


def _too_much_credit(message: handoff_pb2.PrefillRequest) -> None:
    message.credit_bytes = LIMITS.max_credit_bytes + 1


def _no_credit(message: handoff_pb2.PrefillRequest) -> None:
    message.credit_bytes = 0


def _all_generated(message: handoff_pb2.PrefillRequest) -> None:
    message.num_generated_tokens = 40


def _bad_temperature(message: handoff_pb2.PrefillRequest) -> None:
    message.sampling.temperature = -1


def _adapter(message: handoff_pb2.PrefillRequest) -> None:
    message.scope.lora_name = "x"


@pytest.mark.parametrize(
    ("spoil", "param"),
    [
        (_no_key, "key"),
        (_epoch_zero, "key"),
        (_foreign_token, "token_ids"),
        (_negative_token, "token_ids"),
        (_unaligned_prefix, "have_tokens"),
        (_all_is_there, "have_tokens"),
        (_too_few_blocks, "destination"),
        (_same_block_twice, "destination"),
        (_no_credit, "deadline_ms"),
        (_too_much_credit, "credit_bytes"),
        (_all_generated, "num_generated_tokens"),
        (_bad_temperature, "temperature"),
        (_adapter, "scope.lora_name"),
    ],
)
def test_s_b27_kv71_what_does_not_fit_is_refused(
    spoil: Callable[[handoff_pb2.PrefillRequest], None], param: str
) -> None:
    message = request()
    spoil(message)
    with pytest.raises(TandemError) as error:
        check_prefill(message, LIMITS)
    assert error.value.param == param


def test_over_long_prompt_is_refused() -> None:
    with pytest.raises(TandemError) as error:
        check_prefill(request(256), LIMITS)
    assert error.value.error_code == "context_length_exceeded"


def test_f24_admission_looks_at_pinned_blocks() -> None:
    check_load(waiting=0, max_waiting=4, pinned_blocks=10, limits=LIMITS)
    with pytest.raises(ServerOverloaded, match="sent or acknowledged"):
        check_load(waiting=0, max_waiting=4, pinned_blocks=11, limits=LIMITS)
    with pytest.raises(ServerOverloaded, match="wait here"):
        check_load(waiting=4, max_waiting=4, pinned_blocks=0, limits=LIMITS)
