"""Log lines are single, bounded JSON objects with the ids that tie them together."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.logs import MAX_MESSAGE_CHARS, JsonFormatter, request_context


class Lines:
    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream

    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._stream.getvalue().splitlines()]


@pytest.fixture
def log_lines() -> Iterator[tuple[logging.Logger, Lines]]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("decode_worker", "decode-0"))
    logger = logging.getLogger("tests.logs")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield logger, Lines(stream)
    logger.removeHandler(handler)


def test_line_carries_component_worker_request_and_extra_fields(log_lines: tuple[logging.Logger, Lines]) -> None:
    logger, lines = log_lines
    with request_context("chatcmpl-1"):
        logger.info("prefill asked", extra={"peer": "prefill-0", "num_tokens": 7})
    logger.info("idle")
    first, second = lines.all()
    expected = {"message": "prefill asked", "level": "info", "component": "decode_worker", "worker_id": "decode-0"}
    assert first.items() >= {**expected, "request_id": "chatcmpl-1", "peer": "prefill-0", "num_tokens": 7}.items()
    assert "request_id" not in second


def test_f35_hostile_text_stays_one_bounded_line(log_lines: tuple[logging.Logger, Lines]) -> None:
    logger, lines = log_lines
    logger.warning("peer sent %s", '\n{"level": "fake"}\x1b[31m' + "x" * 10_000, extra={"reason": "y\n" * 10_000})
    (line,) = lines.all()
    assert line["level"] == "warning"
    assert len(line["message"]) == len(line["reason"]) == MAX_MESSAGE_CHARS


def test_traceback_keeps_its_end(log_lines: tuple[logging.Logger, Lines]) -> None:
    logger, lines = log_lines
    try:
        raise ValueError("x" * 10_000 + "the end")
    except ValueError:
        logger.exception("failed")
    assert lines.all()[0]["traceback"].endswith("the end")
