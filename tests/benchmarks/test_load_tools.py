"""Tools in turns, their results in one table; the tools are small programs that write what the real ones write."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.load_tools import FIGURES, Load, Tool, ToolFailed, aiperf, compare, main, markdown, ours, vllm_bench
from benchmarks.request_record import write_records
from tests.benchmarks.made_records import made_record

LOAD = Load("http://127.0.0.1:1", "m", "tokenizer", 2.0, 40, 128, 32)
VLLM = {
    "median_ttft_ms": 50.0, "p99_ttft_ms": 90.0, "median_tpot_ms": 9.0, "median_e2el_ms": 330.0,
    "output_throughput": 60.0, "total_output_tokens": 1280, "completed": 40,
}  # fmt: skip
AIPERF = {
    "time_to_first_token": {"p50": 51.0, "p99": 91.0}, "inter_token_latency": {"p50": 8.8},
    "request_latency": {"p50": 331.0}, "output_token_throughput": {"avg": 61.0},
    "output_sequence_length": {"avg": 33.5},
}  # fmt: skip


def scripted(tool: Tool, file: str, document: object) -> Tool:
    """The tool with a program in its place that writes its results."""
    program = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.parent.mkdir(parents=True, exist_ok=True); "
    program += "p.write_text(sys.argv[2])"

    def command(load: Load, seed: int, out: Path) -> Sequence[str]:
        assert load is LOAD
        return (sys.executable, "-c", program, str(out / file), json.dumps(document))

    return Tool(tool.name, command, tool.read)


def test_tools_take_turns_and_their_figures_mean_the_same(tmp_path: Path) -> None:
    said: list[str] = []
    tools = [
        scripted(vllm_bench("vllm"), "vllm.json", VLLM),
        scripted(aiperf("aiperf"), "deep/profile_export_aiperf.json", AIPERF),
    ]
    measured = compare(tools, LOAD, 2, tmp_path, said.append)
    assert [line.rpartition(": ")[2] for line in said] == ["vllm bench serve", "aiperf"] * 2
    assert list(measured["vllm bench serve"][1].values()) == [50.0, 90.0, 9.0, 330.0, 60.0, 32.0]
    assert list(measured["aiperf"][0].values()) == [51.0, 91.0, 8.8, 331.0, 61.0, 33.5]
    table = markdown(measured)
    assert all(figure in table for figure in FIGURES)
    assert "| tokens an answer | 32 [32 - 32] | 33.5 [33.5 - 33.5] |" in table


def test_our_own_files_are_read(tmp_path: Path) -> None:
    distribution = {"p50": {"value": 40.0}, "p99": {"value": 80.0}}
    summary = dict.fromkeys(("ttft_ms", "tpot_ms", "latency_ms"), distribution) | {"output_tokens_per_s": 62.0}
    (tmp_path / "summary.json").write_text(json.dumps({"rows": [{"summary": summary}]}))
    (tmp_path / "records").mkdir()
    write_records(tmp_path / "records" / "load.jsonl", {}, [made_record(0, 0.0), made_record(1, 0.5)])
    figures = ours().read(tmp_path)
    assert figures["TTFT p99"] == 80.0
    assert figures["tokens an answer"] == 2.0


def test_every_turn_has_prompts_of_its_own_and_the_same_load() -> None:
    for tool in (ours(), vllm_bench("vllm"), aiperf("aiperf", "--use-server-token-count")):
        first, second = (tool.command(LOAD, seed, Path("out")) for seed in (1, 2))
        assert len(first) == len(second)
        assert sum(one != other for one, other in zip(first, second, strict=True)) == 1
        assert {"128", "32", LOAD.url} <= set(first)
    assert aiperf("aiperf", "--a b").command(LOAD, 1, Path("out"))[-2:] == ("--a", "b")


def test_a_tool_that_fails_or_leaves_nothing_is_named_with_its_last_words(tmp_path: Path) -> None:
    failing = Tool("broken", lambda *_: (sys.executable, "-c", "import sys; sys.exit('no server')"), lambda _: {})
    with pytest.raises(ToolFailed, match="broken ended with 1: no server"):
        compare([failing], LOAD, 1, tmp_path, lambda _: None)
    silent = Tool("aiperf", lambda *_: (sys.executable, "-c", ""), aiperf("x").read)
    with pytest.raises(ToolFailed, match="aiperf left no results"):
        compare([silent], LOAD, 1, tmp_path, lambda _: None)
    missing = Tool("gone", lambda *_: ("/nowhere/gone",), lambda _: {})
    with pytest.raises(ToolFailed, match=r"gone: .*No such file"):
        compare([missing], LOAD, 1, tmp_path, lambda _: None)


def test_what_is_missing_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path)]
    assert main(out) == 2
    assert "no other tool" in capsys.readouterr().err
    assert main([*out, "--vllm", "no-such-program"]) == 2
    assert "no executable 'no-such-program'" in capsys.readouterr().err
    assert main([*out, "--vllm", sys.executable]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert main([*out, "--vllm", sys.executable, "--tokenizer", "x", "--url", "ftp://x"]) == 2
    assert "begins with http" in capsys.readouterr().err
