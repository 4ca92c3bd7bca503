"""`cluster.free_port`: ports that nobody else takes before the server is up."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cluster import free_port as module
from cluster.free_port import FIRST_PORT, OUTGOING_RANGE, free_port, probe_port


def test_no_outgoing_connection_takes_the_port() -> None:
    first_outgoing = int(OUTGOING_RANGE.read_text().split()[0])
    assert all(FIRST_PORT <= free_port() < first_outgoing for _ in range(50))


def test_a_busy_port_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    other = free_port()
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        busy = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            probe_port("127.0.0.1", busy)
        draws = iter([busy, busy, other])
        monkeypatch.setattr(module._draws, "choice", lambda _: next(draws))
        assert free_port() == other


def test_where_outgoing_connections_take_all_the_kernel_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(module, "OUTGOING_RANGE", tmp_path / "range")
    assert free_port() >= 1024


def test_a_foreign_address_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")
