"""What one drafter hit lately for each tenant and temperature: where the next request of that kind starts.

What is sampled broadly is guessed less often than the likeliest token.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from decode_worker.speculation.gate import INITIAL_ACCEPTANCE, after_trials
from decode_worker.speculation.match_acceptance import MatchAcceptance

SMOOTHING = 0.02  # of all requests of a tenant: slower than one request's
MAX_ROUTES = 1024


@dataclass(slots=True)
class Route:
    acceptance: float = INITIAL_ACCEPTANCE
    matches: MatchAcceptance = field(default_factory=MatchAcceptance)  # of a drafter that looks up


def route_key(scope_key: bytes, temperature: float) -> bytes:
    """Temperatures are told apart by tenths."""
    return scope_key + bytes([min(255, round(10 * temperature))])


class Routes:
    """Holds the `MAX_ROUTES` latest."""

    def __init__(self) -> None:
        self._routes: OrderedDict[bytes, Route] = OrderedDict()

    def of(self, key: bytes) -> Route:
        """To be read. `key`: see `route_key`."""
        return self._routes.get(key) or Route()

    def saw(self, key: bytes, num_proposed: int, num_accepted: int, match_length: int = 0) -> None:
        """A verified step of one of its requests."""
        route = self._routes.pop(key, None) or Route()
        self._routes[key] = route
        route.acceptance = after_trials(route.acceptance, num_proposed, num_accepted, SMOOTHING)
        if match_length:
            route.matches.saw(match_length, num_proposed, num_accepted, SMOOTHING)
        if len(self._routes) > MAX_ROUTES:
            self._routes.popitem(last=False)
