"""A tenant's next request starts where its last ones were."""

from __future__ import annotations

from decode_worker.speculation.gate import INITIAL_ACCEPTANCE, GateState, StepCosts, num_drafts_now
from decode_worker.speculation.match_acceptance import PRIOR
from decode_worker.speculation.routes import MAX_ROUTES, Routes, route_key

FLAT = StepCosts((1, 16, 64), (17.0, 19.0, 60.0), draft_ms=0.01)


def test_a_new_request_starts_where_its_tenants_last_ones_were() -> None:
    routes = Routes()
    for _ in range(300):
        routes.saw(b"chat", 4, 0, match_length=2)
        routes.saw(b"edit", 4, 4)
    assert routes.of(b"chat").acceptance < 0.05
    assert routes.of(b"chat").matches.confidences(2, 1)[0] < 0.05
    assert routes.of(b"chat").matches.confidences(3, 1)[0] == PRIOR[2], "no match of three was seen"
    assert routes.of(b"edit").acceptance > 0.95
    assert routes.of(b"new").acceptance == INITIAL_ACCEPTANCE
    assert num_drafts_now(GateState(routes.of(b"chat").acceptance), 1, FLAT, 8)[0] == 0


def test_tenants_do_not_pile_up() -> None:
    routes = Routes()
    for index in range(2 * MAX_ROUTES):
        routes.saw(str(index).encode(), 4, 0)
        routes.saw(b"busy", 4, 0)
    assert routes.of(b"0").acceptance == INITIAL_ACCEPTANCE
    assert routes.of(b"busy").acceptance < INITIAL_ACCEPTANCE
    assert len(routes._routes) == MAX_ROUTES


def test_temperatures_of_one_tenant_are_told_apart() -> None:
    routes = Routes()
    for _ in range(100):
        routes.saw(route_key(b"tenant", 1.0), 4, 0)
    assert routes.of(route_key(b"tenant", 0.0)).acceptance == INITIAL_ACCEPTANCE
    assert routes.of(route_key(b"tenant", 1.01)).acceptance < 0.2
    assert len({route_key(b"tenant", temperature) for temperature in (0.0, 0.7, 1.0, 2.0, 1e9)}) == 5
