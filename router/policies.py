"""Placement policies by name."""

from __future__ import annotations

from collections.abc import Callable

from router.load_policies import LeastLoaded, RoundRobin
from router.placement import PlacementPolicy
from router.timing_model import TimingModel, TimingPrior

# SmolLM2-135M in bfloat16 on one AVX-512 core; a sweep's plan replaces it, and measurements refine it.
DEFAULT_PRIOR = TimingPrior(prefill=(5.0, 0.8, 5e-5), decode=(15.0, 2.0, 1e-3))


def make_policy(name: str) -> PlacementPolicy:
    """A new policy with its own state. Raises KeyError for a name that is none."""
    return POLICIES[name]()


POLICIES: dict[str, Callable[[], PlacementPolicy]] = {
    "least_loaded": lambda: LeastLoaded(TimingModel(DEFAULT_PRIOR)),
    "round_robin": RoundRobin,
}
