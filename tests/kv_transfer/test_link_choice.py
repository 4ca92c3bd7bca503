"""Which transport a pair takes: named ones in order, `auto` by what was measured, none below the least bandwidth."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tandem.v1 import handoff_pb2

from cluster.errors import KvTransferFailed, StartupError
from kv_transfer.endpoints import ReceivingEnds
from kv_transfer.landing_table import LandingTable
from kv_transfer.layer_groups import LinkCosts
from kv_transfer.link_choice import LinkWishes, Measured, choose, connect_best
from kv_transfer.transports.registry import AUTO_ORDER, OPTIONAL_TRANSPORTS, load_transports, resolve
from tests.kv_transfer.direct_sender import DirectSender
from tests.kv_transfer.oracle import make_pools


@pytest.fixture
def offered(tmp_path: Path) -> Iterator[handoff_pb2.Hello]:
    """A Hello of a decode worker whose transports are `auto`."""
    _, memory = make_pools()
    ends = ReceivingEnds(["auto"], tmp_path, "d0", LandingTable(memory), "127.0.0.1", memory)
    yield handoff_pb2.Hello(transports=ends.offers(), session_nonce=ends.new_session("p0"))
    ends.close()
    memory.close()


def measured(**gb_per_s: float) -> list[Measured]:
    sink = LandingTable(make_pools(1)[0])
    return [Measured(name, DirectSender(sink), LinkCosts(speed * 1e9, 1e-5)) for name, speed in gb_per_s.items()]


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({"tcp": 1.0, "shm": 5.0}, "shm"),
        ({"tcp": 5.0, "shm": 4.5}, "shm"),  # about as fast: the order decides
        ({"tcp": 5.0, "shm": 0.01}, "tcp"),  # hundreds of times slower: never silently
        ({"nixl": 10.0, "ucx": 3.0, "tcp": 1.0}, "nixl"),
        ({"tcp": 1.0}, "tcp"),
    ],
)
def test_auto_takes_the_first_of_its_order_that_is_about_as_fast_as_the_best(
    speeds: dict[str, float], expected: str
) -> None:
    assert choose(measured(**speeds)).name == expected


def test_auto_stands_for_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in OPTIONAL_TRANSPORTS.values():
        monkeypatch.setattr(library, "is_installed", lambda: False)
    assert resolve(("auto",)) == ("shm", "tcp")
    for library in OPTIONAL_TRANSPORTS.values():
        monkeypatch.setattr(library, "is_installed", lambda: True)
    assert resolve(("auto",)) == tuple(name for name in AUTO_ORDER if name != "nixl")  # ucx is there
    monkeypatch.setattr(OPTIONAL_TRANSPORTS["ucx"], "is_installed", lambda: False)
    assert resolve(("auto",)) == ("shm", "nixl", "tcp")
    assert resolve(("tcp", "shm")) == ("tcp", "shm")


def test_kv40_auto_measures_every_offer_and_names_what_it_took(offered: handoff_pb2.Hello) -> None:
    link = connect_best(offered, LinkWishes(("auto",)))
    assert link.reason.startswith("auto among ")
    assert all(name in link.reason for name in resolve(("auto",)))
    assert link.costs.bytes_per_s > 0
    link.sender.close()


def test_shared_memory_is_not_tried_from_another_host(offered: handoff_pb2.Hello) -> None:
    for offer in offered.transports:
        offer.host_id = "another"
    link = connect_best(offered, LinkWishes(("auto",)))
    assert link.sender.name != "shm"
    assert "any host" in link.reason
    link.sender.close()


def test_kv40_nothing_below_the_least_bandwidth_is_taken_and_each_refusal_is_told(
    offered: handoff_pb2.Hello, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(KvTransferFailed, match="min_bandwidth is") as refused:
        connect_best(offered, LinkWishes(("auto",), min_bytes_per_s=1e15))
    assert all(f"{name}: " in refused.value.message for name in resolve(("auto",)))
    assert caplog.text.count("passed over") == len(resolve(("auto",)))


def test_a_transport_without_its_library_is_refused_at_start_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in OPTIONAL_TRANSPORTS.values():
        monkeypatch.setattr(library, "is_installed", lambda: False)
    with pytest.raises(StartupError, match=r"ucx is not installed: pip install 'tandem-serve\[ucx\]'"):
        load_transports(("shm", "ucx"))
    with pytest.raises(StartupError, match="nixl is not installed: pip install --no-deps"):
        load_transports(("nixl",))
    with pytest.raises(StartupError, match="ucx and nixl cannot share a process"):
        load_transports(("ucx", "nixl"))
    with pytest.raises(StartupError, match="'carrier-pigeon' is not known"):
        load_transports(("carrier-pigeon",))
