"""Traces: both formats, and what a wrong line says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.traces import TraceError, TraceRequest, read_trace, scaled

MOONCAKE = """\
{"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}
{"timestamp": 27000, "input_length": 1300, "output_length": 26, "hash_ids": [46, 47, 2366]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def test_mooncake_keeps_time_lengths_and_blocks_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    first, second = read_trace(path)
    assert first == TraceRequest(0.0, 1300, 26, (46, 47, 2366))
    assert second.time_s == pytest.approx(0.482)


def test_azure_times_start_at_zero_and_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    first, second = read_trace(path)
    assert (first.time_s, first.input_tokens, first.output_tokens, first.block_ids) == (0.0, 374, 44, ())
    assert second.time_s == pytest.approx(4.314579)


def test_scaling_shrinks_blocks_with_the_prompt() -> None:
    small = scaled(TraceRequest(0.0, 1024, 40, (1, 2)), input_factor=0.25, output_factor=0.5)
    assert (small.input_tokens, small.output_tokens, small.block_tokens) == (256, 20, 128)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"timestamp": 1}', r"a\.jsonl:1: .*input_length"),
        ("a.jsonl", "nonsense", r"a\.jsonl:1"),
        ("a.csv", "time,in,out\n1,2,3\n", "ContextTokens"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", r"a\.csv:2"),
        ("a.jsonl", "\n", "no requests"),
        ("a.txt", "", r"\.jsonl"),
    ],
)
def test_a_bad_trace_names_the_file_the_line_and_the_fault(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=said):
        read_trace(tmp_path / name)
