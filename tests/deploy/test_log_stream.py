"""All processes' logs as one stream: whole lines under a process's name, none lost when a file is cut, none twice."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from pathlib import Path

import pytest

from deploy.launcher import LocalLauncher
from deploy.log_stream import MAX_LINE_BYTES, FollowedLog, LogStream
from deploy.process_log import ProcessLog
from deploy.process_spec import ProcessSpec, Stage

TIMEOUT_S = 60.0
RECORD = {"time": "2026-01-02T03:04:05.678+00:00", "level": "info", "logger": "x", "message": "asked", "peer": "p-1"}


def _lines(out: io.StringIO) -> list[str]:
    return out.getvalue().splitlines()


def test_json_lines_keep_their_fields_and_others_become_messages() -> None:
    out = io.StringIO()
    LogStream(out, "json").write("decode-0", [json.dumps(RECORD), "a library's words", "", '{"broken'])
    record, words, broken = map(json.loads, _lines(out))
    assert record == {"process": "decode-0", **RECORD}
    assert (words["process"], words["message"]) == ("decode-0", "a library's words")
    assert broken["message"] == '{"broken'


def test_text_lines_say_when_who_and_what() -> None:
    out = io.StringIO()
    LogStream(out, "text").write("decode-0", [json.dumps(RECORD), "a library's words"])
    record, words = _lines(out)
    assert record == "03:04:05.678 decode-0 info: asked peer=p-1"
    assert words.endswith(" decode-0: a library's words")


def test_a_traceback_follows_its_line() -> None:
    out = io.StringIO()
    LogStream(out, "text").write("decode-0", [json.dumps({**RECORD, "traceback": "Traceback\n  it broke"})])
    assert _lines(out)[1:] == ["Traceback", "  it broke"]


def test_what_this_process_prints_comes_out_by_whole_lines() -> None:
    out = io.StringIO()
    own = LogStream(out, "json").of("tandem")
    own.write("decode-0 ")
    assert _lines(out) == []
    own.write("ready\nmore")
    assert [json.loads(line)["message"] for line in _lines(out)] == ["decode-0 ready"]


def test_lines_of_a_file_come_once_and_whole_and_none_is_lost_when_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.log"
    path.write_text("an earlier run\n")
    log, out = ProcessLog(path, max_bytes=1000), io.StringIO()
    followed = FollowedLog(path, "decode-0", LogStream(out, "json"))
    child = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        for number in range(300):
            os.write(child, f"line {number}".encode())
            if number % 7 == 0:
                followed.pass_on()  # in the middle of a line
            os.write(child, b"\n")
            log.bound()
            if number % 11 == 0:
                followed.pass_on()
        os.write(child, b"the end")
    finally:
        os.close(child)
    followed.pass_on(is_last=True)
    expected = [f"line {number}" for number in range(300)]
    assert [json.loads(line)["message"] for line in _lines(out)] == [*expected, "the end"]


def test_a_line_without_end_is_not_kept_for_ever(tmp_path: Path) -> None:
    path, out = tmp_path / "decode-0.log", io.StringIO()
    followed = FollowedLog(path, "decode-0", LogStream(out, "text"))
    path.write_bytes(b"x" * (MAX_LINE_BYTES + 1))
    followed.pass_on()
    assert out.getvalue().endswith("x" * (MAX_LINE_BYTES + 1) + "\n")


async def test_a_launched_process_is_followed_to_its_last_word(runtime_dir: Path) -> None:
    out = io.StringIO()
    spec = ProcessSpec("worker", Stage.WORKER, (sys.executable, "-c", "print('hello'); print('bye', end='')"), _never)
    process = await LocalLauncher(runtime_dir / "logs", LogStream(out, "json")).launch(spec)
    assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0
    assert [json.loads(line)["message"] for line in _lines(out)] == ["hello", "bye"]
    assert process.last_lines(2) == ["hello", "bye"]
    assert [task for task in asyncio.all_tasks() if "follow-" in task.get_name()] == []


async def test_nobody_who_reads_the_stream_ends_no_process(runtime_dir: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        spec = ProcessSpec("worker", Stage.WORKER, (sys.executable, "-c", "print('hello')"), _never)
        process = await LocalLauncher(runtime_dir / "logs", LogStream(out, "text")).launch(spec)
        assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0
        with pytest.raises(BrokenPipeError):
            out.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)  # so that it closes


async def _never() -> bool:
    raise AssertionError("only a supervisor asks")
