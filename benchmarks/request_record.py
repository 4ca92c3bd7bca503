"""One request as it was measured, and the JSON Lines file that holds a run's records.

Every latency is a subtraction of two times of the record; all times are seconds since the start of the run. The first
line of a file is a header with the schema's version; a reader refuses a version that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks.ttft_stages import TtftStages, stages_from_row

SCHEMA_VERSION = 1


class Outcome(Enum):
    """How a request ended. Only OK has latencies that count; everything else misses its objective."""

    OK = "ok"
    HTTP_ERROR = "http_error"  # a status other than 200
    STREAM_ERROR = "stream_error"  # an error frame, or a stream that ended without its end
    CONNECTION = "connection"
    TIMEOUT = "timeout"
    UNFINISHED = "unfinished"  # the run was over first
    NOT_SENT = "not_sent"  # the client was at its own limit, or the run was over first


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times of one request; `chunk_times_s[i]` brought `chunk_tokens[i]` tokens that the user could see."""

    index: int
    traffic_class: str
    session: int
    turn: int
    is_warmup: bool
    intended_s: float
    sent_s: float
    ended_s: float
    outcome: Outcome
    detail: str = ""
    http_status: int = 0
    request_id: str = ""
    finish_reason: str = ""
    chunk_times_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    # False: the server gave no counts, and each chunk was taken for one token.
    are_counts_exact: bool = True
    # Tokens that had been generated at some time while the server's parser showed nothing of them.
    held_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None: not reported
    shareable_tokens: int | None = 0  # None: not known
    stages: TtftStages | None = None  # None: the server does not tell

    @property
    def is_ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def num_output_tokens(self) -> int:
        return sum(self.chunk_tokens)

    @property
    def dispatch_delay_s(self) -> float:
        """What the client itself was late."""
        return self.sent_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        """From the intended send time to the first visible token."""
        return self.chunk_times_s[0] - self.intended_s if self.chunk_times_s else None

    @property
    def latency_s(self) -> float:
        """From the intended send time to the end."""
        return self.ended_s - self.intended_s

    @property
    def service_s(self) -> float:
        """From the actual send time to the end: what a tool reports that hides its own delays."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first chunk; None where the answer came in one chunk (one token, say).

        The first chunk's tokens are not counted: they came at once, and would inflate the rate.
        """
        num_later = self.num_output_tokens - self.chunk_tokens[0] if self.chunk_tokens else 0
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / num_later if num_later else None

    def itl_gaps_s(self) -> tuple[tuple[float, int], ...]:
        """(gap, weight) of each later chunk: m tokens after a silence of g seconds are m gaps of g / m."""
        return tuple(
            ((self.chunk_times_s[i] - self.chunk_times_s[i - 1]) / self.chunk_tokens[i], self.chunk_tokens[i])
            for i in range(1, len(self.chunk_tokens))
        )


class RecordsError(ValueError):
    """A records file cannot be read."""


def write_records(path: Path, header: dict[str, Any], records: Iterable[RequestRecord]) -> None:
    """Writes the whole file beside its place first, so that a reader never sees half of one."""
    partial = path.with_suffix(path.suffix + ".partial")
    with partial.open("w", encoding="utf-8") as lines:
        lines.write(json.dumps({"schema": "tandem.bench.records", "version": SCHEMA_VERSION, **header}) + "\n")
        for record in records:
            lines.write(json.dumps(asdict(record) | {"outcome": record.outcome.value}, separators=(",", ":")) + "\n")
    partial.replace(path)


def read_records(path: Path) -> tuple[dict[str, Any], list[RequestRecord]]:
    """The header and all records of a file."""
    with path.open(encoding="utf-8") as lines:
        header: dict[str, Any] = json.loads(next(lines, "{}"))
        if header.get("version") != SCHEMA_VERSION:
            raise RecordsError(f"{path}: schema version {header.get('version')!r}, this tool reads {SCHEMA_VERSION}")
        return header, [_from_row(json.loads(line)) for line in lines]


def _from_row(row: dict[str, Any]) -> RequestRecord:
    row["outcome"] = Outcome(row["outcome"])
    row["chunk_times_s"] = tuple(row["chunk_times_s"])
    row["chunk_tokens"] = tuple(row["chunk_tokens"])
    row["stages"] = stages_from_row(row["stages"])
    return RequestRecord(**row)
