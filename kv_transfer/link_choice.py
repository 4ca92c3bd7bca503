"""A prefill worker's choice among the transports that a decode worker offers.

What is offered must be known here and, where it shares memory, come from this host. Named transports are tried in the
receiver's order, and the first that works is taken. `auto` measures all of them and takes the first in its own order
that is about as fast as the best. Either way what is slower than `min_bandwidth`, or spoils what it moves, is passed
over, and the reason stands in the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tandem.v1 import handoff_pb2

from cluster.errors import KvTransferFailed
from kv_transfer.hello import usable_offers
from kv_transfer.host import read_host_id
from kv_transfer.layer_groups import LinkCosts
from kv_transfer.link_probe import check_bandwidth, measure_link
from kv_transfer.transport import Sender
from kv_transfer.transports.nixl import PoolMemory
from kv_transfer.transports.registry import AUTO, AUTO_ORDER, LOCAL_TRANSPORTS, connect, resolve

# A transport further down the order must be faster than that much more to be preferred: measurements are noisy.
AUTO_TOLERANCE = 0.8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkWishes:
    """What the prefill worker wants of its links."""

    transports: tuple[str, ...]  # what it can use, or `auto`
    min_bytes_per_s: float = 0.0
    throttle_bytes_per_s: int = 0  # an artificially slow link, for tests
    memory: PoolMemory | None = None  # the pool that frames will come from

    @property
    def is_auto(self) -> bool:
        return self.transports == (AUTO,)


class Measured(NamedTuple):
    """One transport that works."""

    name: str
    sender: Sender
    costs: LinkCosts


@dataclass(frozen=True, slots=True)
class ChosenLink:
    """A connected sender, what it costs, and why it was chosen."""

    sender: Sender
    costs: LinkCosts
    reason: str


def connect_best(hello: handoff_pb2.Hello, wishes: LinkWishes) -> ChosenLink:
    """Connects and measures. Blocks for as long as the probes take, some 20 ms for each transport.

    Raises `KvTransferFailed` with what was wrong with each offer.
    """
    offers = usable_offers(
        hello.transports, resolve(wishes.transports), read_host_id(), lambda name: name in LOCAL_TRANSPORTS
    )
    working: list[Measured] = []
    passed_over = []
    for offer in offers:
        try:
            working.append(_connect_and_measure(offer, hello.session_nonce, wishes))
        except KvTransferFailed as error:
            passed_over.append(f"{offer.name}: {error.message}")
            _log.warning("transport %s to %s passed over: %s", offer.name, hello.identity.worker_id, error.message)
            continue
        if not wishes.is_auto:
            break
    if not working:
        tried = "; ".join(passed_over) or "none of the offers is usable here"
        raise KvTransferFailed(f"no transport to {hello.identity.worker_id}: {tried}", stage="transfer")
    chosen = choose(working)
    for other in working:
        if other is not chosen:
            other.sender.close()
    reason = (
        _why(chosen, working) if wishes.is_auto else _place(chosen.name, "first of the receiver's choice that works")
    )
    return ChosenLink(chosen.sender, chosen.costs, "; ".join([reason, *passed_over]))


def choose(working: Sequence[Measured]) -> Measured:
    """The first in `AUTO_ORDER` (then in the receiver's) that is about as fast as the fastest."""
    best = max(one.costs.bytes_per_s for one in working)
    order = {name: index for index, name in enumerate(AUTO_ORDER)}
    fast = [one for one in working if one.costs.bytes_per_s >= AUTO_TOLERANCE * best]
    return min(fast, key=lambda one: order.get(one.name, len(order)))


def _connect_and_measure(offer: handoff_pb2.TransportOffer, nonce: bytes, wishes: LinkWishes) -> Measured:
    """Raises `KvTransferFailed`."""
    sender = connect(offer.name, offer.address, nonce, 0, wishes.memory)
    try:
        costs = measure_link(sender)
        check_bandwidth(costs, wishes.min_bytes_per_s, offer.name)
    except KvTransferFailed:
        sender.close()
        raise
    if wishes.throttle_bytes_per_s:
        sender.close()
        sender = connect(offer.name, offer.address, nonce, wishes.throttle_bytes_per_s, wishes.memory)
        costs = replace(costs, bytes_per_s=float(wishes.throttle_bytes_per_s))
    return Measured(offer.name, sender, costs)


def _why(chosen: Measured, working: Sequence[Measured]) -> str:
    speeds = ", ".join(f"{one.name} {one.costs.bytes_per_s / 1e9:.2f}" for one in working)
    return _place(chosen.name, f"auto among {speeds} GB/s")


def _place(name: str, why: str) -> str:
    return f"{why} ({'same host' if name in LOCAL_TRANSPORTS else 'any host'})"
