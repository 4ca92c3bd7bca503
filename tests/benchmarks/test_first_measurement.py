"""The first measurement against a server whose speed is known, and what it writes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.first_measurement import main, measure
from benchmarks.measurement import RunFailed, Shape
from benchmarks.measurement_stages import rate_while_all_decode
from benchmarks.openai_client import Endpoint
from benchmarks.scripted_server import Answer, ScriptedServer, token_stream
from tests.benchmarks.made_records import made_record

PREFILL_S = 0.02
STEP_S = 0.01


def _script(number: int, body: dict[str, Any], now_s: float) -> Answer:
    if "prompt" not in body:
        return Answer(status=404, body="{}")
    return token_stream(now_s + PREFILL_S + STEP_S * place for place in range(body["max_tokens"]))


async def test_figures_are_the_servers_own_speed() -> None:
    shape = Shape(runs=2, single_output_tokens=12, batch_streams=4, batch_output_tokens=12, prefill_tokens=64)
    async with ScriptedServer(_script) as server:
        measurement = await measure(Endpoint(server.url, "scripted"), shape, lambda stage: None)
    figures = {figure.name: figure.value.value for figure in measurement.figures}
    assert figures["one stream: decode"] == pytest.approx(1 / STEP_S, rel=0.15)
    assert figures["4 streams: decode while all decode"] == pytest.approx(4 / STEP_S, rel=0.25)
    assert figures["one stream: ITL p50"] == pytest.approx(STEP_S * 1e3, rel=0.2)
    assert figures["one stream: TTFT"] >= PREFILL_S * 1e3
    # Nothing is silently left out.
    assert "no timeline" in measurement.missing["KV handoff of 64 tokens"]


async def test_interference_counts_the_window_alone_and_a_stall_as_a_gap() -> None:
    """Four streams at a steady pace; one more stops for good, and what it no longer sends is a gap up to the end."""
    stall_s = 0.3

    def script(number: int, body: dict[str, Any], now_s: float) -> Answer:
        if "prompt" not in body:
            return Answer(status=404, body="{}")
        is_stalled = number == 1
        times_s = [now_s + PREFILL_S + STEP_S * place for place in range(body["max_tokens"])]
        return token_stream([*times_s[:30], now_s + 60.0] if is_stalled else times_s)

    shape = Shape(
        runs=1,
        prefill_tokens=64,
        interference_streams=4,
        interference_interval_s=0.5,
        interference_lead_s=0.2,
        interference_window_s=1.0,
    )
    async with ScriptedServer(script) as server:
        measurement = await measure(Endpoint(server.url, "scripted"), shape, lambda stage: None, ["interference"])
    figures = {figure.name.split(": ")[1]: figure.value.value for figure in measurement.figures}
    assert figures["streamed"] == pytest.approx(3 / STEP_S, rel=0.25)
    assert figures["ITL p50"] == pytest.approx(STEP_S * 1e3, rel=0.3)
    assert figures["prompts answered in time"] == 100
    assert figures["TTFT of an answered prompt"] >= PREFILL_S * 1e3
    assert figures["longest gap"] >= stall_s * 1e3


async def test_long_context_is_a_stage_of_its_own() -> None:
    shape = Shape(runs=1, single_output_tokens=12, prefill_tokens=64)
    async with ScriptedServer(_script) as server:
        measurement = await measure(Endpoint(server.url, "scripted"), shape, lambda stage: None, ["long-context"])
    (figure,) = [one for one in measurement.figures if one.unit == "tokens/s"]
    assert figure.name == "one stream behind 64 tokens: decode"
    assert figure.value.value == pytest.approx(1 / STEP_S, rel=0.2)


@pytest.fixture
def served_models() -> Iterator[str]:
    """A scripted server in a thread of its own that lists a model too, as `main` runs its own event loop."""
    ready = threading.Event()
    url: list[str] = []
    stop: list[Callable[[], object]] = []

    def script(number: int, body: dict[str, Any], now_s: float) -> Answer:
        if "prompt" not in body:
            return Answer(body=json.dumps({"data": [{"id": "scripted"}]}))
        return _script(number, body, now_s)

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


def test_main_writes_json_table_and_plot(served_models: str, tmp_path: Path, capsys: Any) -> None:
    status = main(["--url", f"{served_models}/v1", "--out", str(tmp_path), "--runs", "2", "--streams", "2"])
    assert status == 0
    document = json.loads((tmp_path / "first_measurement.json").read_text())
    assert document["version"] == 1
    assert document["model"] == "scripted"
    assert document["machine"]["logical_cpus"] >= 1
    assert (tmp_path / "first_measurement.png").stat().st_size > 1000
    table = (tmp_path / "first_measurement.md").read_text()
    assert "| one stream: decode |" in table
    assert table in capsys.readouterr().out


def test_an_unreachable_server_is_one_line_and_exit_code_2(tmp_path: Path, capsys: Any) -> None:
    assert main(["--url", "http://127.0.0.1:1", "--out", str(tmp_path)]) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_streams_that_never_decode_together_have_no_common_rate() -> None:
    early, late = made_record(0, 0.0), made_record(1, 9.0)
    with pytest.raises(RunFailed, match="no moment"):
        rate_while_all_decode([early, late])
