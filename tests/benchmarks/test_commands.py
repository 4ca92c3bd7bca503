"""The commands as a user types them."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.commands import bench, plan
from benchmarks.request_record import read_records
from benchmarks.scripted_server import Answer, ScriptedServer, token_stream

RUNNER = CliRunner()
PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture
def server_url() -> Iterator[str]:
    """A scripted server in its own thread: commands run their own event loop."""
    ready = threading.Event()
    url: list[str] = []
    stop: list[Callable[[], object]] = []

    def script(number: int, body: dict[str, Any], now_s: float) -> Answer:
        if "model" not in body:
            return Answer(body=json.dumps({"data": [{"id": "scripted"}]}))
        return token_stream(now_s + 0.01 * (1 + place) for place in range(body["max_tokens"]))

    async def serve() -> None:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(done.set))
        async with ScriptedServer(script) as server:
            url.append(server.url)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    yield url[0]
    stop[0]()
    thread.join(60)


def _load(*arguments: str) -> Any:
    return RUNNER.invoke(bench, ["load", *arguments])


def test_open_loop_writes_records_summary_and_says_what_came_back(server_url: str, tmp_path: Path) -> None:
    result = _load("--url", server_url, "--out", str(tmp_path), "--rate", "40", "--duration-s", "0.5",
                   "--input-tokens", "8:16", "--output-tokens", "3")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("flags: ")
    _, records = read_records(tmp_path / "records" / "load.jsonl")
    assert all(record.num_output_tokens == 3 for record in records)
    document = json.loads((tmp_path / "summary.json").read_text())
    assert document["rows"][0]["summary"]["num_ok"] > 0
    # A file of results names no server.
    assert "127.0.0.1" not in (tmp_path / "summary.json").read_text()


def test_closed_loop_trace_and_sessions_run_too(server_url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = ({"timestamp": 100 * i, "input_length": 600, "output_length": 4, "hash_ids": [1, 2 + i]} for i in range(4))
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dialogues = tmp_path / "dialogues.jsonl"
    dialogues.write_text(json.dumps({"turns": ["one", "two"]}) + "\n")
    common = ("--url", server_url, "--output-tokens", "2", "--duration-s", "0.5")
    ways = {
        "closed": ("--concurrency", "4", "--num-requests", "12", "--warmup", "4"),
        "trace": ("--trace", str(trace), "--length-factor", "0.1"),
        "sessions": ("--sessions", str(dialogues), "--rate", "4"),
        "classes": ("--class", "chat=20,8:16,2", "--class", "long=20,64,3"),
    }
    for name, flags in ways.items():
        result = _load(*common, "--out", str(tmp_path / name), *flags)
        assert result.exit_code == 0, result.output
        _, records = read_records(tmp_path / name / "records" / "load.jsonl")
        assert records
        assert all(record.is_ok for record in records)
    _, mixed = read_records(tmp_path / "classes" / "records" / "load.jsonl")
    assert {record.traffic_class for record in mixed} == {"chat", "long"}
    assert [record.index for record in mixed] == list(range(len(mixed)))
    _, traced = read_records(tmp_path / "trace" / "records" / "load.jsonl")
    assert [record.shareable_tokens for record in traced] == [0, 51, 51, 51]


def test_compare_ends_with_one_when_b_is_worse(server_url: str, tmp_path: Path) -> None:
    for name in "ab":
        flags = ("--concurrency", "2", "--num-requests", "8", "--output-tokens", "3", "--out", str(tmp_path / name))
        assert _load("--url", server_url, *flags).exit_code == 0
    same = RUNNER.invoke(bench, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--tolerance", "5"])
    assert same.exit_code == 0
    worse = RUNNER.invoke(bench, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--tolerance", "0"])
    assert ("worse" in worse.stdout) == (worse.exit_code == 1)
    nothing = RUNNER.invoke(bench, ["compare", str(tmp_path / "a"), str(tmp_path)])
    assert nothing.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rate", "1", "--concurrency", "2"), "exactly one of"),
        (("--rate", "1", "--arrivals", "sometimes"), "sometimes"),
        (("--rate", "1", "--input-tokens", "many"), "many"),
        (("--rate", "1", "--dialect", "latin"), "latin"),
        (("--class", "chat=2,8"), "NAME=RATE,INPUT,OUTPUT"),
        (("--rate", "1", "--url", "http://127.0.0.1:1"), "127.0.0.1:1"),
    ],
)
def test_what_cannot_run_is_one_line_and_status_2(
    arguments: tuple[str, ...], said: str, server_url: str, tmp_path: Path, capfd: Any
) -> None:
    url = () if "--url" in arguments else ("--url", server_url)
    result = _load("--out", str(tmp_path), *url, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_plan_from_data_sheets_and_its_refusals() -> None:
    app = typer.Typer()
    app.command()(plan)
    good = RUNNER.invoke(app, ["--model", "Llama-3.1-8B", "--device", "H100", "--input-tokens", "4000"])
    assert good.exit_code == 0, good.output
    assert "prefill for each decode" in good.stdout
    assert "nothing measured" in good.stdout
    for arguments, said in (
        (["--model", "Llama-3-70B", "--device", "H100"], "does not fit"),
        (["--model", "GPT-9"], "GPT-9"),
        ([], "give a sweep's directory"),
    ):
        refused = RUNNER.invoke(app, arguments)
        assert refused.exit_code == 2
        assert said in refused.stderr


def test_traces_of_different_shape_give_different_ratios(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(plan)
    rows = {
        "chat": [{"timestamp": t, "input_length": 400, "output_length": 300, "hash_ids": [t]} for t in range(9)],
        "long": [{"timestamp": t, "input_length": 6000, "output_length": 20, "hash_ids": [*range(99 * t, 99 * t + 12)]}
                 for t in range(9)],
        "agent": [{"timestamp": t, "input_length": 6000, "output_length": 20, "hash_ids": [*range(11), 500 + t]}
                  for t in range(9)],
    }  # fmt: skip
    ratios = {}
    for name, requests in rows.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in requests))
        flags = ["--model", "Llama-3.1-8B", "--device", "H100", "--trace", str(path), "--out", str(tmp_path / name)]
        assert RUNNER.invoke(app, flags).exit_code == 0
        ratios[name] = json.loads((tmp_path / name / "pd_plan.json").read_text())["ratio"]
    # Long prompts want prefill; where most of a prompt is cached they want it less.
    assert ratios["long"] > 2 * ratios["agent"] > 2 * ratios["chat"]


def test_the_tandem_command_finds_these_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deploy import cli

    declared = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]["tandem.commands"]
    metadata = tmp_path / "tandem_serve-0.0.0.dist-info"
    metadata.mkdir()
    lines = "\n".join(f"{name} = {target}" for name, target in declared.items())
    (metadata / "entry_points.txt").write_text(f"[tandem.commands]\n{lines}\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tandem-serve\nVersion: 0.0.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = importlib.metadata.entry_points(group="tandem.commands")
    assert {entry.name for entry in found} == {"bench", "plan", "eval", "simulate", "drafter"}
    monkeypatch.setattr(cli, "app", typer.Typer())
    cli._add_installed_commands()
    for arguments, said in (
        (["bench", "--help"], "sweep"),
        (["plan", "--help"], "--max-workers"),
        (["simulate", "--help"], "--mtbf-s"),
    ):
        result = RUNNER.invoke(cli.app, arguments)
        assert result.exit_code == 0, result.output
        assert said in result.stdout
