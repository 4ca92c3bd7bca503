"""Published request traces as (time, lengths, shared blocks): Mooncake's JSONL and Azure's CSV.

A trace holds no text. Mooncake's `hash_ids` name blocks of 512 prompt tokens; two requests whose lists begin alike
share that prefix, and `workload` builds prompts that share it token for token. Azure's trace has lengths only: its
prompts share nothing. The files are read where the user has them; none is part of this project.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path

MOONCAKE_BLOCK_TOKENS = 512
# Azure writes seven decimals of a second, Python's parser takes six.
AZURE_TIME_FORMAT = "%Y-%m-%d %H:%M:%S.%f"
AZURE_TIME_CHARS = len("2023-11-16 18:17:03.979960")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. `block_ids` name its prompt's blocks in order; empty: nothing is shared."""

    time_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


class TraceError(ValueError):
    """A line of a trace cannot be read: the file, the line and what is wrong with it."""


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests of a Mooncake `.jsonl` or an Azure `.csv` trace in order of time, from time 0 on."""
    with path.open(encoding="utf-8", newline="") as lines:
        if path.suffix == ".jsonl":
            requests = list(_mooncake(lines, str(path)))
        elif path.suffix == ".csv":
            requests = list(_azure(lines, str(path)))
        else:
            raise TraceError(f"{path}: a trace is a .jsonl (Mooncake) or a .csv (Azure) file")
    if not requests:
        raise TraceError(f"{path}: the trace has no requests")
    requests.sort(key=lambda request: request.time_s)
    start_s = requests[0].time_s
    return [replace(request, time_s=request.time_s - start_s) for request in requests]


def scaled(request: TraceRequest, input_factor: float, output_factor: float) -> TraceRequest:
    """The request with shorter (or longer) prompt and answer; its blocks shrink alike, so what was shared stays shared.

    For a model whose context is shorter than the trace's prompts. The share of shared tokens is kept, up to the
    rounding of one block.
    """
    return replace(
        request,
        input_tokens=max(1, round(request.input_tokens * input_factor)),
        output_tokens=max(1, round(request.output_tokens * output_factor)),
        block_tokens=max(1, round(request.block_tokens * input_factor)),
    )


def shareable_tokens(trace: Iterable[TraceRequest]) -> list[int]:
    """For each request the leading prompt tokens that an earlier one had: what a prefix cache without bound serves."""
    seen: set[int] = set()
    result = []
    for request in trace:
        # A block's key holds all blocks before it: the same id behind another prefix is another block.
        chain = list(accumulate(request.block_ids, lambda key, block_id: hash((key, block_id)), initial=0))[1:]
        num_leading = next((place for place, key in enumerate(chain) if key not in seen), len(chain))
        result.append(min(request.input_tokens, num_leading * request.block_tokens))
        seen.update(chain)
    return result


def _mooncake(lines: Iterable[str], name: str) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield TraceRequest(
                time_s=float(row["timestamp"]) / 1000.0,
                input_tokens=int(row["input_length"]),
                output_tokens=int(row["output_length"]),
                block_ids=tuple(int(block) for block in row["hash_ids"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{name}:{number}: not a Mooncake request: {error!r}") from error


def _azure(lines: Iterable[str], name: str) -> Iterator[TraceRequest]:
    rows = csv.DictReader(lines)
    if tuple(rows.fieldnames or ()) != AZURE_COLUMNS:
        raise TraceError(f"{name}:1: the columns are {rows.fieldnames}, an Azure trace has {list(AZURE_COLUMNS)}")
    for number, row in enumerate(rows, start=2):
        try:
            moment = datetime.strptime(row["TIMESTAMP"][:AZURE_TIME_CHARS], AZURE_TIME_FORMAT)
            yield TraceRequest(
                time_s=(moment - datetime(2000, 1, 1)).total_seconds(),
                input_tokens=int(row["ContextTokens"]),
                output_tokens=int(row["GeneratedTokens"]),
            )
        except (TypeError, ValueError) as error:
            raise TraceError(f"{name}:{number}: not an Azure request: {error!r}") from error
