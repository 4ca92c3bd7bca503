"""Transfers over shared links against what can be worked out by hand. Times in milliseconds, rates in bytes of them."""

from __future__ import annotations

import pytest

from benchmarks.simulator.event_queue import EventQueue
from benchmarks.simulator.shared_links import Flow, LinkPort
from router.timing_model import exposed_transfer_ms


class _Transfers:
    """Flows on a clock of their own, and when each landed."""

    def __init__(self) -> None:
        self.events = EventQueue()
        self.landed_ms: dict[str, float] = {}

    def start(
        self, name: str, ports: tuple[LinkPort, ...], num_bytes: float, layers: int = 1, compute_ms: float = 0.0
    ) -> Flow:
        """Computed from now on for that long."""
        flow = Flow(self.events, ports, num_bytes, layers, lambda: self._landed(name))
        flow.compute_started(compute_ms)
        self.events.after(compute_ms / 1e3, flow.compute_ended)
        return flow

    def at_ms(self, time_ms: float) -> None:
        self.events.run(time_ms / 1e3)

    def _landed(self, name: str) -> None:
        self.landed_ms[name] = self.events.now_s * 1e3


@pytest.mark.parametrize("num_bytes", [0, 100, 10_000, 50_000, 1_000_000])
@pytest.mark.parametrize("layers", [1, 2, 32])
def test_a_transfer_alone_takes_what_the_router_predicts(num_bytes: int, layers: int) -> None:
    transfers = _Transfers()
    transfers.start("one", (LinkPort(100.0), LinkPort(100.0)), num_bytes, layers, compute_ms=200.0)
    transfers.at_ms(1e6)
    exposed_ms = transfers.landed_ms["one"] - 200.0
    assert exposed_ms == pytest.approx(exposed_transfer_ms(num_bytes, 100.0, 200.0, layers, 0.0), abs=0.01)


def test_two_transfers_to_one_worker_take_twice_as_long_and_the_rest_is_the_last_ones() -> None:
    transfers, target = _Transfers(), LinkPort(100.0)
    transfers.start("short", (LinkPort(100.0), target), 1_000)
    transfers.start("long", (LinkPort(100.0), target), 3_000)
    transfers.at_ms(1e6)
    # 50 a millisecond each until the short one has its 1,000; then the long one has all for its last 2,000.
    assert transfers.landed_ms == pytest.approx({"short": 20.0, "long": 40.0}, abs=0.01)


def test_transfers_between_other_workers_share_only_the_fabric() -> None:
    for fabric, expected_ms in ((None, 10.0), (LinkPort(100.0), 20.0), (LinkPort(1_000.0), 10.0)):
        transfers = _Transfers()
        for name in ("a", "b"):
            shared = () if fabric is None else (fabric,)
            transfers.start(name, (LinkPort(100.0), LinkPort(100.0), *shared), 1_000)
        transfers.at_ms(1e6)
        assert transfers.landed_ms == pytest.approx({"a": expected_ms, "b": expected_ms}, abs=0.01)


def test_what_a_prompt_in_computation_cannot_use_goes_to_the_others() -> None:
    transfers, target = _Transfers(), LinkPort(100.0)
    # 1,000 layers: it comes at 10 bytes a millisecond for 1,000 ms, from the first layer's end on.
    transfers.start("computing", (LinkPort(100.0), target), 10_000, layers=1_000, compute_ms=1_000.0)
    transfers.at_ms(100.0)
    transfers.start("waiting", (LinkPort(100.0), target), 9_000)
    transfers.at_ms(1e6)
    assert transfers.landed_ms["waiting"] == pytest.approx(200.0, abs=0.1)  # at 90, not at 50
    assert transfers.landed_ms["computing"] == pytest.approx(1_000.1, abs=0.05)  # one layer is left at the end


def test_a_cancelled_transfer_never_lands_and_gives_its_share_back() -> None:
    transfers, target = _Transfers(), LinkPort(100.0)
    lost = transfers.start("lost", (LinkPort(100.0), target), 10_000)
    transfers.start("kept", (LinkPort(100.0), target), 3_000)
    transfers.at_ms(20.0)
    lost.cancel()
    transfers.at_ms(1e6)
    assert transfers.landed_ms == pytest.approx({"kept": 40.0}, abs=0.01)  # 1,000 at 50, 2,000 at 100
    assert not target.flows


def test_a_link_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        LinkPort(0.0)
