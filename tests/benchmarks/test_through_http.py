"""What `benchmarks.through_http` makes of threads' times and of records."""

from __future__ import annotations

import os
import time

import pytest

from benchmarks.measurement import RunFailed
from benchmarks.request_record import RequestRecord
from benchmarks.through_http import (
    CLIENT,
    ENGINE_THREAD,
    ThreadTime,
    Turn,
    mean_context,
    parts_between,
    read_threads,
    steps_between,
    table,
)
from tests.benchmarks.made_records import made_record


def test_the_busiest_thread_of_the_decode_worker_is_the_engines() -> None:
    before = {("decode", 1): ThreadTime(9.0, 0.0), ("decode", 2): ThreadTime(1.0, 0.5), ("router", 3): ThreadTime()}
    after = {
        ("decode", 1): ThreadTime(9.25, 0.0),
        ("decode", 2): ThreadTime(3.0, 0.75),
        ("decode", 4): ThreadTime(0.5, 0.0),  # began in between
        ("router", 3): ThreadTime(0.125, 0.0),
    }
    assert parts_between(before, after) == {
        ENGINE_THREAD: ThreadTime(2.0, 0.25),
        "decode": ThreadTime(0.75, 0.0),
        "router": ThreadTime(0.125, 0.0),
    }


def test_the_scheduler_counts_this_thread() -> None:
    before = read_threads({CLIENT: [os.getpid()]})
    begun_s = time.thread_time()
    while time.thread_time() - begun_s < 0.05:
        pass
    spent = parts_between(before, read_threads({CLIENT: [os.getpid()]}))
    assert spent[CLIENT].on_cpu_s >= 0.04


def test_only_tokens_of_the_window_count() -> None:
    records = [_record(1.0, 2.0, 3.0), _record(2.0, 3.0, 4.0)]
    assert steps_between(records, 1.5, 3.0) == 2.0
    assert mean_context(records, 100) == 102  # 1.5 before it, and half of the one in it
    with pytest.raises(RunFailed, match="--tokens"):
        mean_context([records[0], _record(4.0, 5.0)], 100)


def test_a_turn_says_what_was_lost() -> None:
    turn = Turn(0.016, 0.015, 0.020, 150, {ENGINE_THREAD: ThreadTime(0.017, 0.002), "router": ThreadTime(0.001, 0.0)})
    assert turn.lost == pytest.approx(0.2)
    text = table({1: [turn]})
    assert "| 1 | 150 | 16.00 [16.00 - 16.00] | 20.00 [20.00 - 20.00] | 20.0 [20.0 - 20.0] % |" in text
    assert "| 1 | 17,000 | 1,000 | 15,000 | 2,000 |" in text


def _record(*chunk_times_s: float) -> RequestRecord:
    return made_record(0, 0.0, chunk_times_s=chunk_times_s, chunk_tokens=(1,) * len(chunk_times_s))
