"""Two runs of the same arrivals: better, worse, or the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.comparison import compare_directories, comparison_markdown
from benchmarks.request_record import Outcome, RequestRecord, write_records
from tests.benchmarks.made_records import made_record


def _records(slower_by: float = 1.0, num_failed: int = 0, shift_s: float = 0.0) -> list[RequestRecord]:
    rng = np.random.default_rng(7)
    records = []
    for place in range(120):
        intended_s = place / 10 + shift_s
        ttft_s = 0.1 * (1 + rng.exponential(0.5)) * slower_by
        times = (intended_s + ttft_s, intended_s + ttft_s + 0.05)
        # Sent a little late, as an open loop does.
        records.append(made_record(place, intended_s, sent_s=intended_s + 1e-3, chunk_times_s=times, ended_s=times[-1]))
    for place in range(num_failed):
        records[place] = replace(records[place], outcome=Outcome.HTTP_ERROR)
    return records


def _directory(path: Path, records: Sequence[RequestRecord], deployment: str = "1P1D") -> Path:
    (path / "records").mkdir(parents=True)
    write_records(path / "records" / f"coupled-{deployment}-rate10-repeat0.jsonl", {}, records)
    return path


def test_the_same_run_is_not_worse(tmp_path: Path) -> None:
    result = compare_directories(_directory(tmp_path / "a", _records()), _directory(tmp_path / "b", _records()))
    assert not result.is_worse
    assert {row.metric for row in result.rows} == {"TTFT", "TPOT", "latency"}


def test_a_slower_b_is_worse_and_a_faster_one_is_not(tmp_path: Path) -> None:
    a = _directory(tmp_path / "a", _records())
    slower = compare_directories(a, _directory(tmp_path / "b", _records(1.15), deployment="2A"))
    assert slower.is_worse
    (ttft,) = [row for row in slower.rows if row.metric == "TTFT"]
    assert ttft.difference.contains(0.15)
    assert "worse" in comparison_markdown(slower)
    assert not compare_directories(a, _directory(tmp_path / "c", _records(0.8))).is_worse


def test_more_failures_are_worse(tmp_path: Path) -> None:
    a = _directory(tmp_path / "a", _records())
    assert compare_directories(a, _directory(tmp_path / "b", _records(num_failed=20))).is_worse


def test_other_arrivals_are_not_compared(tmp_path: Path) -> None:
    a = _directory(tmp_path / "a", _records())
    result = compare_directories(a, _directory(tmp_path / "b", _records(shift_s=0.5)))
    assert result.rows == ()
    assert list(result.skipped.values()) == ["the arrivals differ"]
    assert "the arrivals differ" in comparison_markdown(result)


def test_nothing_in_common_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    a = _directory(tmp_path / "a", _records())
    (tmp_path / "b" / "records").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="--rates"):
        compare_directories(a, tmp_path / "b")
