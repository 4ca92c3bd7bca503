"""Placement policies by name, each with what it learns from."""

from __future__ import annotations

import random
from dataclasses import dataclass

from router.cache_aware import CacheAware, CacheAwareSettings
from router.load_policies import LeastLoaded, RoundRobin
from router.placement import PlacementPolicy
from router.timing_model import TimingModel, TimingPrior

# SmolLM2-135M in bfloat16 on one AVX-512 core; a sweep's plan replaces it, and measurements refine it.
DEFAULT_PRIOR = TimingPrior(prefill=(5.0, 0.8, 5e-5), decode=(15.0, 2.0, 1e-3))


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy and what it needs to be fed."""

    policy: PlacementPolicy
    timing: TimingModel
    uses_cache: bool = False


def choose_policy(name: str, seed: int, prior: TimingPrior = DEFAULT_PRIOR) -> PolicyChoice:
    """A new policy with its own state. Raises ValueError for a name that is none."""
    timing = TimingModel(prior)
    match name:
        case "cache_aware":
            chance = random.Random(seed)  # noqa: S311  near ties, no secret
            return PolicyChoice(CacheAware(timing, CacheAwareSettings(), chance), timing, uses_cache=True)
        case "least_loaded":
            return PolicyChoice(LeastLoaded(timing), timing)
        case "round_robin":
            return PolicyChoice(RoundRobin(), timing)
        case _:
            raise ValueError(f"no placement policy is called {name}")
