"""Both machines against each other over wires that drop, repeat, reorder, delay and spoil; crashes and restarts."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from kv_transfer import decode_ending, decode_quarantine, decode_receiving, decode_transfer, prefill_transfer
from kv_transfer import decode_events as on
from kv_transfer.decode_state import DecodePhase, DecodeTransfer, Ending, EndingKind, Outcome
from kv_transfer.prefill_events import AddPushCredit, CreditGranted
from kv_transfer.prefill_transfer import PrefillTransfer
from kv_transfer.protocol_limits import ProtocolViolation
from kv_transfer.transport import CancelGuarantee
from tests.kv_transfer.handoff_world import World

# 2 machines x 250 examples x 220 steps; TANDEM_HANDOFF_EXAMPLES asks for more.
NUM_EXAMPLES = int(os.environ.get("TANDEM_HANDOFF_EXAMPLES", "250"))
NUM_STEPS = 220
MIN_STEPS = 50_000  # of each machine, at the default number of examples
# Without Hypothesis between the steps: many more of them, none shrunk. TANDEM_HANDOFF_WALKS asks for more.
NUM_WALKS = int(os.environ.get("TANDEM_HANDOFF_WALKS", "1500"))


class FencedHandoff(RuleBasedStateMachine):
    """A transport whose receiver copies."""

    guarantee = CancelGuarantee.FENCED
    num_steps = 0  # of all examples

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.guarantee)

    @rule(choice=st.integers(0, 2**20))
    def step(self, choice: int) -> None:
        type(self).num_steps += 1
        self.world.step(choice)

    def teardown(self) -> None:
        self.world.settle()


class OneSidedHandoff(FencedHandoff):
    """A transport whose sender writes into the receiver's blocks, whatever became of them."""

    guarantee = CancelGuarantee.MUST_DRAIN


@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", [FencedHandoff, OneSidedHandoff])
def test_no_order_of_faults_loses_a_block_or_lets_a_wrong_byte_through(machine: type[FencedHandoff]) -> None:
    machine.num_steps = 0
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=NUM_STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
    assert machine.num_steps >= MIN_STEPS * min(1, NUM_EXAMPLES / 250)


@pytest.mark.timeout(3600)
def test_nor_does_any_of_many_more_random_orders() -> None:
    counts = _run_worlds(NUM_WALKS)
    # A walk that never meets a fault would prove nothing.
    for what in ("crashes", "decode crashes", "quarantines", "salvages", "destroyed endpoints", "stale frames"):
        assert counts[what] > NUM_WALKS // 50, (what, counts)


def _free_at_the_fence(transfer: DecodeTransfer, event: on.FenceClosed, now: float) -> Outcome:
    held = transfer.quarantined[0]
    return replace(transfer, quarantined=transfer.quarantined[1:]), (on.FreeQuarantined(held.ref, held.blocks),)


def _believe(transfer: DecodeTransfer, event: on.ArrivalChecked, now: float) -> Outcome:
    return decode_receiving.checked(transfer, replace(event, missing=(), digests_match=True), now)


def _do_not_wait(transfer: DecodeTransfer, event: on.PeerGone, now: float) -> Outcome:
    ending = Ending(EndingKind.RETRY, event.error)
    return decode_ending.endpoint_destroyed(
        replace(transfer, phase=DecodePhase.CANCELLING, ending=ending),
        on.EndpointDestroyed(transfer.live_attempt.ref),
        now,
    )


@pytest.mark.parametrize(
    ("table", "key", "broken"),
    [
        (decode_quarantine._HANDLERS, on.FenceClosed, _free_at_the_fence),
        (decode_transfer._TRANSITIONS, (DecodePhase.SEALED, on.ArrivalChecked), _believe),
        (decode_transfer._TRANSITIONS, (DecodePhase.RECEIVING, on.PeerGone), _do_not_wait),
    ],
    ids=["quarantine ends at the fence", "missing cells are believed", "blocks go back under a dead peer's writes"],
)
def test_the_world_finds_a_machine_that_breaks_a_rule(
    table: dict[Any, Any], key: Any, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(table, key, broken)
    with pytest.raises((AssertionError, ProtocolViolation, KeyError)):
        _run_worlds(400)


def _grant_twice(transfer: DecodeTransfer, event: on.FramesLanded, now: float) -> Outcome:
    transfer, actions = decode_receiving.landed(transfer, event, now)
    return transfer, tuple(
        replace(action, num_bytes=3 * action.num_bytes) if isinstance(action, on.SendCredit) else action
        for action in actions
    )


def _use_any_credit(transfer: PrefillTransfer, event: CreditGranted, now: float) -> prefill_transfer.Outcome:
    credit_bytes = transfer.credit_bytes + event.num_bytes
    return replace(transfer, credit_bytes=credit_bytes), (AddPushCredit(event.num_bytes),)


def test_a_decode_worker_that_grants_more_than_its_own_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(decode_transfer._TRANSITIONS, (DecodePhase.RECEIVING, on.FramesLanded), _grant_twice)
    assert _run_worlds(100)["refused credits"] > 10
    monkeypatch.setitem(
        prefill_transfer._TRANSITIONS, (prefill_transfer.PrefillPhase.COMPUTING, CreditGranted), _use_any_credit
    )
    with pytest.raises(AssertionError):
        _run_worlds(400)


def _run_worlds(num_worlds: int) -> Counter[str]:
    """Invariants hold after each step, and everything is over after each walk; what the walks met."""
    met: Counter[str] = Counter()
    for seed in range(num_worlds):
        choose = random.Random(seed)
        world = World(list(CancelGuarantee)[seed % 2])
        for _ in range(NUM_STEPS):
            world.step(choose.randrange(2**20))
        world.settle()
        met.update(world.counts)
    return met
