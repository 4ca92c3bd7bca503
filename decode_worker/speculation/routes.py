"""What one drafter hit lately for each tenant: where the tenant's next request starts."""

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


class Routes:
    """Holds the `MAX_ROUTES` latest."""

    def __init__(self) -> None:
        self._routes: OrderedDict[bytes, Route] = OrderedDict()

    def of(self, scope_key: bytes) -> Route:
        """To be read."""
        return self._routes.get(scope_key) or Route()

    def saw(self, scope_key: bytes, num_proposed: int, num_accepted: int, match_length: int = 0) -> None:
        """A verified step of one of its requests."""
        route = self._routes.pop(scope_key, None) or Route()
        self._routes[scope_key] = route
        route.acceptance = after_trials(route.acceptance, num_proposed, num_accepted, SMOOTHING)
        if match_length:
            route.matches.saw(match_length, num_proposed, num_accepted, SMOOTHING)
        if len(self._routes) > MAX_ROUTES:
            self._routes.popitem(last=False)
