"""Kills, stops, cancels and restarts of real workers: a small round here, all of it with TANDEM_HANDOFF_SOAK=full."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kv_transfer.transports.registry import SENDERS
from tests.integration.handoff_soak import (
    BYTES_OF_A_TOKEN,
    DECODE_STATES,
    LONG_STOP_S,
    MODULE,
    PREFILL_STATES,
    PROMPT_TOKENS,
    SHORT_STOP_S,
    Fault,
    HandoffSoak,
)
from tests.integration.worker_processes import fleet_in
from tests.kv_transfer.all_transports import needs_library

pytestmark = [pytest.mark.model, pytest.mark.cluster, pytest.mark.timeout(1800)]

IS_FULL = os.environ.get("TANDEM_HANDOFF_SOAK") == "full"
TRANSPORTS = tuple(SENDERS) if IS_FULL else ("shm",)
NUM_CANCELS = 500 if IS_FULL else 60
NUM_LOST_LINKS = 12 if IS_FULL else 3
NUM_RESTARTS = 20 if IS_FULL else 3
NUM_SHORT_REQUESTS = 2500 if IS_FULL else 40


def kills() -> list[Fault]:
    everywhere = [("prefill", state) for state in PREFILL_STATES] + [("decode", state) for state in DECODE_STATES]
    if not IS_FULL:
        everywhere = [("prefill", "computing"), ("decode", "receiving")]
    moments = ("entered", "acted") if IS_FULL else ("acted",)
    return [Fault(role, state, signal.SIGKILL, moment) for role, state in everywhere for moment in moments]


def stops() -> list[Fault]:
    everywhere = [("prefill", state) for state in PREFILL_STATES] + [("decode", state) for state in DECODE_STATES]
    if not IS_FULL:
        return [Fault("prefill", "computing", signal.SIGSTOP, "acted", LONG_STOP_S)]
    return [
        Fault(role, state, signal.SIGSTOP, moment, stop_s)
        for role, state in everywhere
        for moment, stop_s in (("entered", LONG_STOP_S), ("acted", SHORT_STOP_S))
    ]


@pytest.fixture(params=TRANSPORTS)
async def soak(request: pytest.FixtureRequest, tmp_path: Path, default_model_path: Path) -> AsyncIterator[HandoffSoak]:
    needs_library(request.param)
    async with fleet_in(tmp_path, default_model_path, MODULE) as fleet:
        soak = HandoffSoak(fleet, tmp_path, request.param)
        await soak.start()
        yield soak
        await soak.nothing_is_left()
        assert soak.outcomes["right"] > 0, soak.outcomes


async def test_f01_f02_f03_kv4_killed_at_every_state_of_a_transfer(soak: HandoffSoak) -> None:
    for fault in kills():
        await soak.suffer(fault)


async def test_f04_f06_stopped_at_every_state_of_a_transfer(soak: HandoffSoak) -> None:
    for fault in stops():
        await soak.suffer(fault)


async def test_f17_kv44_random_cancels_leave_nothing(soak: HandoffSoak) -> None:
    await soak.cancel_at_random(NUM_CANCELS)
    assert soak.outcomes["cancelled"] > NUM_CANCELS // 10, soak.outcomes


async def test_kv36_kv37_kv57_restarts_at_the_same_port(soak: HandoffSoak) -> None:
    await soak.restart_everybody(NUM_RESTARTS)


async def test_f01_kv24_the_verified_prefix_outlives_its_sender_and_only_the_rest_is_asked_of_another(
    soak: HandoffSoak,
) -> None:
    num_bytes = await soak.salvage()
    assert 0 < num_bytes < 0.75 * PROMPT_TOKENS * BYTES_OF_A_TOKEN


async def test_kv29_kv48_kv52_choices_and_short_requests_never_meet(soak: HandoffSoak) -> None:
    await soak.ask_many(NUM_SHORT_REQUESTS, num_choices=4)


async def test_kv39_a_link_that_breaks_is_opened_again_and_no_request_fails(soak: HandoffSoak) -> None:
    await soak.lose_links(NUM_LOST_LINKS)
    assert soak.outcomes["asked again"] > 0, soak.outcomes


async def test_kv31_tiers_hold_what_landed_and_not_what_was_there_before(
    tmp_path: Path, default_model_path: Path
) -> None:
    """Blocks are poisoned before their KV lands: a tier that stored them too early would bring poison back."""
    tiers = {"kv_host_tier_bytes": 8 * 2**20, "kv_disk_tier": str(tmp_path / "kv")}
    async with fleet_in(tmp_path, default_model_path, MODULE) as fleet:
        soak = HandoffSoak(fleet, tmp_path, "shm", decode_settings=tiers)
        await soak.start()
        num_restored = await soak.restore_what_landed(3)
    assert num_restored >= 3 * (PROMPT_TOKENS // 16 - 1)
