"""`engine.tensor_parallel.step_message`: what arrives is what was sent."""

from __future__ import annotations

import socket
import threading
from dataclasses import fields

import numpy as np
import pytest

from engine.step import StepInput
from engine.tensor_parallel.step_message import receive_step, send_step

TIMEOUT_S = 60.0


def a_step(num_tokens: int, width: int, *, hidden: int = 0, has_masks: bool = False) -> StepInput:
    draw = np.random.default_rng(num_tokens)
    return StepInput(
        token_ids=draw.integers(0, 9, num_tokens, np.int32),
        positions=draw.integers(0, 9, num_tokens, np.int32),
        slots=draw.integers(0, 2**40, num_tokens, np.int64),
        query_starts=np.array([0, 1, num_tokens], np.int32),
        context_lens=draw.integers(0, 9, 2, np.int32),
        block_tables=draw.integers(0, 9, (2, 2 * width), np.int32)[:, ::2],  # a view: not contiguous
        logit_rows=np.array([], np.int32),
        inputs=draw.random((num_tokens, hidden), np.float32) if hidden else None,
        tree_masks=draw.integers(0, 9, num_tokens, np.int32) if has_masks else None,
    )


@pytest.mark.parametrize(
    "step",
    [a_step(2, 1), a_step(512, 4096), a_step(7, 3, hidden=5), a_step(7, 0, has_masks=True)],
    ids=["small", "larger than a socket's buffer", "inputs", "tree"],
)
def test_step_arrives_as_it_was_sent(step: StepInput) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(TIMEOUT_S)

        def send_twice() -> None:
            with ours:
                send_step(ours, step)
                send_step(ours, step)

        sending = threading.Thread(target=send_twice)
        sending.start()
        for _ in range(2):
            arrived = receive_step(theirs)
            assert arrived is not None
            for field in fields(StepInput):
                sent, received = getattr(step, field.name), getattr(arrived, field.name)
                assert np.array_equal(sent, received) if isinstance(sent, np.ndarray) else sent == received
                assert not isinstance(sent, np.ndarray) or sent.dtype == received.dtype
        assert receive_step(theirs) is None
        sending.join(TIMEOUT_S)


@pytest.mark.parametrize("num_bytes", [5, 30])
def test_connection_that_ends_within_a_step_is_an_error(num_bytes: int) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(b"\x01" * num_bytes)
        with pytest.raises(EOFError):
            receive_step(theirs)
