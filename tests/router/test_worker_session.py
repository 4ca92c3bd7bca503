"""The stream to one worker: who answers there, what it may say, and that it ends when told to."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from tandem.v1 import worker_pb2

from cluster.ended_tasks import end_tasks
from cluster.errors import TandemError, WorkerUnavailable
from router import worker_session
from router.worker_session import WorkerSession
from router.worker_state import WorkerState, state_from_record
from tests.router.scripted_worker import SECURITY, ScriptedWorker

HELLO = worker_pb2.RouterHello(router_id="r", incarnation="i", protocol_version=1)


class HeardSequence:
    """Notes what a session tells it."""

    def __init__(self, submission_id: str = "a-0") -> None:
        self.submission_id = submission_id
        self.fence = 0
        self.token_ids: list[int] = []
        self.failures: list[TandemError] = []
        self.changed = asyncio.Event()

    def on_step(self, token_ids: Any, event: worker_pb2.RequestEvent | None) -> None:
        self.token_ids.extend(token_ids)
        self.changed.set()

    def on_failure(self, error: TandemError) -> None:
        self.failures.append(error)
        self.changed.set()


def _session(worker: ScriptedWorker) -> tuple[WorkerSession, WorkerState, asyncio.Event]:
    state = state_from_record(worker.record(), time.monotonic())
    assert state is not None
    changed = asyncio.Event()
    return WorkerSession(state, HELLO, SECURITY, changed.set), state, changed


async def _connected(session: WorkerSession, changed: asyncio.Event) -> None:
    session.start()
    async with asyncio.timeout(60):
        while not session.worker.is_connected:
            changed.clear()
            await changed.wait()


@pytest.fixture
def scripted(socket_directory: Path) -> ScriptedWorker:
    return ScriptedWorker(f"unix:{socket_directory}/w", "decode-0", "one")


async def test_a_session_ends_when_told_to_even_while_its_stream_breaks(scripted: ScriptedWorker) -> None:
    for _ in range(10):
        await scripted.start()
        session, _, changed = _session(scripted)
        await _connected(session, changed)
        async with asyncio.timeout(60):
            await asyncio.gather(scripted.stop(), session.stop())


async def test_a_broken_stream_fails_what_was_live_and_connects_again(scripted: ScriptedWorker) -> None:
    await scripted.start()
    session, state, changed = _session(scripted)
    await _connected(session, changed)
    never = asyncio.Event()
    scripted.pace = lambda *_: never.wait()
    sequence = HeardSequence()
    session.submit(sequence, worker_pb2.SubmitRequest(request_id="a-0", token_ids=[1]))
    await scripted.wait_for(lambda: bool(scripted.submits))
    await scripted.stop()
    async with asyncio.timeout(60):
        await sequence.changed.wait()
    assert isinstance(sequence.failures[0], WorkerUnavailable)
    assert not state.is_connected
    with pytest.raises(WorkerUnavailable):
        session.submit(sequence, worker_pb2.SubmitRequest(request_id="a-0"))
    await scripted.start()
    async with asyncio.timeout(60):
        while not state.is_connected:
            changed.clear()
            await changed.wait()
    await session.stop()
    await scripted.stop()


async def test_another_process_at_the_address_is_not_used(scripted: ScriptedWorker) -> None:
    await scripted.start()
    session, state, _ = _session(scripted)
    scripted.incarnation = "two"
    session.start()
    await scripted.wait_for(lambda: scripted.num_sessions >= 2)  # it was refused, and tried again
    assert not state.is_connected
    await session.stop()
    await scripted.stop()


def _step(**columns: Any) -> worker_pb2.DecodeMessage:
    return worker_pb2.DecodeMessage(step=worker_pb2.StepTokens(**columns))


async def test_steps_with_columns_that_do_not_fit_are_refused(scripted: ScriptedWorker) -> None:
    session, _, _ = _session(scripted)
    for columns in (
        {"request_ids": ["a"], "token_counts": [2], "token_ids": [1]},
        {"request_ids": ["a", "b"], "token_counts": [1], "token_ids": [1]},
        {"request_ids": [], "token_counts": [], "token_ids": [1]},
    ):
        with pytest.raises(WorkerUnavailable, match="columns"):
            session._on_message(_step(**columns))
    with pytest.raises(WorkerUnavailable, match="mid-stream"):
        session._on_message(worker_pb2.DecodeMessage(hello=worker_pb2.DecodeHello()))


async def test_what_an_older_placement_says_is_not_heard(scripted: ScriptedWorker) -> None:
    session, state, _ = _session(scripted)
    state.is_connected = True
    sequence = HeardSequence()
    sequence.fence = 2
    session.submit(sequence, worker_pb2.SubmitRequest(request_id="a-0"))
    old = worker_pb2.RequestEvent(request_id="a-0", fence=1)
    session._on_message(_step(request_ids=["a-0"], token_counts=[1], token_ids=[7], events=[old]))
    session._on_message(worker_pb2.DecodeMessage(failed=worker_pb2.RequestFailed(request_id="a-0", fence=1)))
    assert (sequence.token_ids, sequence.failures) == ([], [])
    new = worker_pb2.RequestEvent(request_id="a-0", fence=2)
    session._on_message(_step(request_ids=["a-0", "b-0"], token_counts=[1, 2], token_ids=[7, 8, 9], events=[new]))
    assert sequence.token_ids == [7]


async def test_f06_a_worker_that_owes_tokens_and_does_not_answer_is_given_up_and_one_that_answers_is_not(
    scripted: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parted network resets nothing: without asking, its requests would wait for their deadline."""
    monkeypatch.setattr(worker_session, "SILENCE_S", 0.1)
    monkeypatch.setattr(worker_session, "PROBE_TIMEOUT_S", 1.5)
    gate = asyncio.Event()
    scripted.pace = lambda *_: gate.wait()
    await scripted.start()
    session, state, changed = _session(scripted)
    await _connected(session, changed)
    sequence = HeardSequence()
    session.submit(sequence, worker_pb2.SubmitRequest(request_id="a-0", token_ids=[1]))
    await scripted.wait_for(lambda: scripted.num_status_asks >= 3)
    assert state.is_connected
    assert not sequence.failures
    scripted.answers_status.clear()
    async with asyncio.timeout(60):
        await sequence.changed.wait()
    assert [failure.error_code for failure in sequence.failures] == ["worker_lost"]
    assert "does not answer" in sequence.failures[0].message
    scripted.answers_status.set()
    await scripted.wait_for(lambda: scripted.num_sessions == 2)  # it is asked again by itself
    gate.set()
    await session.stop()
    await scripted.stop()


async def test_a_write_that_gets_stuck_ends_the_stream(
    scripted: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_session, "WRITE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(worker_session, "SILENCE_S", 0.02)
    await scripted.start()
    session, _, changed = _session(scripted)
    await _connected(session, changed)

    class StuckCall:
        async def write(self, message: worker_pb2.RouterMessage) -> None:
            await asyncio.Event().wait()

    sequence = HeardSequence()
    never = asyncio.Event()
    scripted.pace = lambda *_: never.wait()
    session.submit(sequence, worker_pb2.SubmitRequest(request_id="a-0", token_ids=[1]))
    await scripted.wait_for(lambda: bool(scripted.submits))  # from here on the session's own writer has nothing to do
    session._outbox.append(worker_pb2.RouterMessage())
    writer = asyncio.create_task(session._write(StuckCall()))
    async with asyncio.timeout(60):
        await sequence.changed.wait()
    assert "it takes no requests" in sequence.failures[0].message
    await end_tasks(writer)
    await session.stop()
    await scripted.stop()
