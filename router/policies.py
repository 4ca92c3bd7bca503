"""Placement policies by name, each with what it learns from."""

from __future__ import annotations

import random
from dataclasses import dataclass

from cluster.router_settings import DEFAULT_DECODE_PRIOR_MS, DEFAULT_PREFILL_PRIOR_MS
from router.cache_aware import CacheAware
from router.load_policies import LeastLoaded, RoundRobin
from router.placement import PlacementPolicy
from router.power_of_two import PowerOfTwo
from router.sticky_sessions import StickySessions
from router.timing_model import TimingModel, TimingPrior
from router.worker_scores import CacheAwareSettings

DEFAULT_PRIOR = TimingPrior(DEFAULT_PREFILL_PRIOR_MS, DEFAULT_DECODE_PRIOR_MS)


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy and what it needs to be fed."""

    policy: PlacementPolicy
    timing: TimingModel
    uses_cache: bool = False
    may_choose_local: bool = False  # a decode worker's own prefill, though prefill workers are there


def choose_policy(name: str, seed: int, prior: TimingPrior = DEFAULT_PRIOR, turn: int = 0) -> PolicyChoice:
    """A new policy with its own state, of the router whose turn this is among others. Raises ValueError for a name that
    is none."""
    timing = TimingModel(prior)
    match name:
        case "cache_aware":
            policy = CacheAware(timing, CacheAwareSettings())
            return PolicyChoice(policy, timing, uses_cache=True, may_choose_local=True)
        case "least_loaded":
            return PolicyChoice(LeastLoaded(timing), timing)
        case "round_robin":
            return PolicyChoice(RoundRobin(turn), timing)
        case "power_of_two":
            chance = random.Random(f"{seed} {turn}")  # noqa: S311  a sample, no secret
            return PolicyChoice(PowerOfTwo(timing, chance), timing)
        case "session":
            return PolicyChoice(StickySessions(timing), timing)
        case _:
            raise ValueError(f"no placement policy is called {name}")
