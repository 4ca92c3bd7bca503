"""Traffic of different shapes wants different ratios: made-up traces here, the published ones where they lie."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.trace_ratios import main, ratios_markdown, trace_ratio

# The folder with the four published files, as docs/planning.md has them.
TRACES = os.environ.get("TANDEM_TRACES", "")
PUBLISHED = {
    "AzureLLMInferenceTrace_code.csv": 15.4,
    "AzureLLMInferenceTrace_conv.csv": 1.7,
    "conversation_trace.jsonl": 1.6,
    "synthetic_trace.jsonl": 2.3,
}


def _azure(path: Path, num_input: int, num_output: int) -> Path:
    rows = [f"2023-11-16 18:17:{second:02}.0000000,{num_input},{num_output}" for second in range(9)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


def _mooncake(path: Path, num_input: int, num_output: int, num_shared_blocks: int) -> Path:
    def blocks(index: int) -> list[int]:
        num_own = -(-num_input // 512) - num_shared_blocks
        return [*range(num_shared_blocks), *range(1_000 * (index + 1), 1_000 * (index + 1) + num_own)]

    rows = [
        {"timestamp": index, "input_length": num_input, "output_length": num_output, "hash_ids": blocks(index)}
        for index in range(9)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_each_shape_of_traffic_has_a_ratio_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        _azure(tmp_path / "code.csv", 2_048, 28),
        _azure(tmp_path / "chat.csv", 1_155, 211),
        _mooncake(tmp_path / "agents.jsonl", 12_000, 150, 16),
        _mooncake(tmp_path / "documents.jsonl", 12_000, 150, 0),
    ]
    found = {path.stem: trace_ratio(path).plan for path in paths}
    ratios = {name: made.ratio for name, made in found.items()}
    assert ratios["code"] > 3 * ratios["documents"] > 3 * ratios["agents"] > 1.5 * ratios["chat"]
    splits = {(made.split.prefill, made.split.decode) for made in found.values() if made.split is not None}
    assert len(splits) >= 3
    assert main([str(path) for path in paths]) == 0
    assert capsys.readouterr().out == ratios_markdown([trace_ratio(path) for path in paths])


def test_without_a_file_it_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "give the traces' files" in capsys.readouterr().err


@pytest.mark.skipif(not TRACES, reason="TANDEM_TRACES names no folder with the published traces")
def test_the_published_traces_have_the_ratios_of_the_documentation() -> None:
    found = {path.name: path for path in Path(TRACES).rglob("*") if path.name in PUBLISHED}
    assert {name: round(trace_ratio(path).plan.ratio, 1) for name, path in found.items()} == PUBLISHED
