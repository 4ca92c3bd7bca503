"""Streams as servers really send them, read into records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.openai_client import StreamCapture
from benchmarks.request_record import Outcome, RequestRecord
from benchmarks.scripted_server import chunk
from benchmarks.stream_record import read_stream
from benchmarks.workload import PlannedRequest

PLANNED = PlannedRequest(index=0, intended_s=0.0, output_tokens=16, token_ids=(1, 2, 3))


def _record(timed: Sequence[tuple[float, str]], **capture: Any) -> RequestRecord:
    pieces = [(time_s, f"data: {data}\n\n".encode()) for time_s, data in timed]
    fields: dict[str, Any] = {"http_status": 200, "ended_s": timed[-1][0] if timed else 0.0, "pieces": pieces}
    full = StreamCapture(**fields | capture)
    return read_stream(PLANNED, full, 0.0, intended_s=0.0)


def _delta(text: str, **fields: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text} | fields}]})


def test_b2_one_token_reply_has_no_gaps() -> None:
    record = _record([(0.05, chunk(" a", 1)), (0.06, "[DONE]")])
    assert record.is_ok
    assert record.num_output_tokens == 1
    assert record.itl_gaps_s() == ()


def test_b3_an_empty_role_chunk_is_not_the_first_token() -> None:
    record = _record([(0.05, _delta("", role="assistant")), (0.3, _delta("Hello")), (0.4, "[DONE]")])
    assert record.ttft_s == pytest.approx(0.3)


def test_b5_a_first_chunk_of_many_tokens_does_not_inflate_the_rate() -> None:
    later = [(0.1 + 0.01 * step, chunk(" a", 8 + step)) for step in range(1, 9)]
    record = _record([(0.1, chunk("eight tokens", 8)), *later, (0.18, "[DONE]")])
    assert record.num_output_tokens == 16
    assert record.tpot_s == pytest.approx(0.080 / 8)
    assert sum(weight for _, weight in record.itl_gaps_s()) == 8


def test_b6_held_text_counts_its_tokens_when_it_shows() -> None:
    held = [(0.01 * count, chunk("", count)) for count in (1, 2, 3)]
    record = _record([*held, (0.05, chunk("shown", 4)), (0.07, chunk(" more", 5)), (0.08, "[DONE]")])
    assert record.ttft_s == pytest.approx(0.05)
    assert record.chunk_tokens == (4, 1)
    assert record.held_tokens == 3
    assert record.tpot_s == pytest.approx(0.02)


def test_b7_a_hundred_spaces_are_a_hundred_tokens() -> None:
    spaces = [(0.01 * count, chunk(" ", count)) for count in range(1, 101)]
    assert _record([*spaces, (1.1, "[DONE]")]).num_output_tokens == 100


def test_b7_without_counts_a_chunk_is_a_token_and_the_total_decides_whether_that_was_right() -> None:
    texts = [(0.01 * count, chunk(" ")) for count in range(1, 5)]
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})
    right = _record([*texts, (0.05, usage), (0.05, "[DONE]")])
    assert (right.num_output_tokens, right.are_counts_exact) == (4, True)
    wrong = _record([*texts[:2], (0.05, usage), (0.05, "[DONE]")])
    assert (wrong.num_output_tokens, wrong.are_counts_exact) == (2, False)


def test_a_chunk_of_m_tokens_gives_m_gaps() -> None:
    record = _record([(0.1, chunk("a", 1)), (0.4, chunk("bcd", 4)), (0.5, "[DONE]")])
    ((gap_s, weight),) = record.itl_gaps_s()
    assert gap_s == pytest.approx(0.1)
    assert weight == 3


def test_token_ids_and_llamacpp_timings_count_too() -> None:
    with_ids = json.dumps({"choices": [{"text": "ab", "token_ids": [5, 6]}]})
    with_timings = json.dumps({"choices": [{"text": "c"}], "timings": {"predicted_n": 3}})
    assert _record([(0.1, with_ids), (0.2, with_timings), (0.3, "[DONE]")]).chunk_tokens == (2, 1)


def test_an_end_token_without_text_belongs_to_the_last_chunk() -> None:
    assert _record([(0.1, chunk("a", 1)), (0.2, chunk("", 2)), (0.2, "[DONE]")]).num_output_tokens == 2


def test_events_are_read_across_piece_boundaries_with_either_line_end() -> None:
    raw = f"data: {chunk('a', 1)}\r\n\r\ndata: {chunk('b', 2)}\n\ndata: [DONE]\n\n".encode()
    pieces = [(0.001 * place, raw[place : place + 1]) for place in range(len(raw))]
    record = read_stream(PLANNED, StreamCapture(http_status=200, pieces=pieces), 0.0, intended_s=0.0)
    assert record.is_ok
    assert record.chunk_tokens == (1, 1)
    assert record.chunk_times_s[0] == pytest.approx(0.001 * (raw.index(b"\r\n\r\n") + 3))


def test_usage_details_give_the_cache_hits() -> None:
    record = _record([(0.1, chunk("a", 1, prompt_tokens=64, cached_tokens=48)), (0.1, "[DONE]")])
    assert (record.prompt_tokens, record.cached_tokens) == (64, 48)
    assert _record([(0.1, chunk("a", 1)), (0.1, "[DONE]")]).cached_tokens is None


def test_a_timeline_in_the_last_chunk_becomes_stages() -> None:
    timeline = {"placedUs": "1500", "prefillComputeUs": "90000", "transferTotalUs": "92000", "kvBytes": "46000000"}
    last = json.dumps({"choices": [], "tandem": {"timeline": timeline | {"transport": "shm"}}})
    stages = _record([(0.1, chunk("a", 1)), (0.1, last), (0.1, "[DONE]")]).stages
    assert stages is not None
    assert (stages.route_ms, stages.stage_ms("prefill_compute"), stages.transport) == (1.5, 90.0, "shm")
    assert stages.kv_bytes == 46_000_000


@pytest.mark.parametrize(
    ("timed", "capture", "outcome"),
    [
        ([], {"http_status": 500}, Outcome.HTTP_ERROR),
        ([(0.1, chunk("a", 1)), (0.2, '{"error": {"code": "internal_error"}}')], {}, Outcome.STREAM_ERROR),
        ([(0.1, chunk("a", 1))], {}, Outcome.STREAM_ERROR),
        ([(0.1, "[DONE]")], {}, Outcome.STREAM_ERROR),
        ([(0.1, "{not json")], {}, Outcome.STREAM_ERROR),
        ([(0.1, chunk("a", 1))], {"failure": "connection"}, Outcome.STREAM_ERROR),
        ([], {"failure": "connection", "http_status": 0}, Outcome.CONNECTION),
        ([(0.1, chunk("a", 1))], {"failure": "timeout"}, Outcome.TIMEOUT),
        ([(0.1, chunk("a", 1))], {"failure": "cancelled"}, Outcome.UNFINISHED),
    ],
)
def test_every_bad_end_has_its_name(timed: list[tuple[float, str]], capture: dict[str, Any], outcome: Outcome) -> None:
    assert _record(timed, **capture).outcome is outcome
