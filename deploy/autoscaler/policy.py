"""A policy: what the operator wants, with a unit and a default for every key.

`deploy/policies/reference.yaml` lists them all with comments; `schema.json` beside it is generated from here.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deploy.autoscaler.forecast import Method


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Slo(Section):
    """What a user is promised."""

    ttft_ms: float = Field(default=1000.0, gt=0, description="time to first token, 90th percentile")
    itl_ms: float = Field(default=100.0, gt=0, description="inter-token latency, 90th percentile")


class PoolBounds(Section):
    """How small and how large a pool may be."""

    min: int = Field(default=1, ge=1, description="replicas that always run")
    max: int = Field(default=8, ge=1, description="replicas at most")

    @model_validator(mode="after")
    def _ordered(self) -> PoolBounds:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, which is above max {self.max}")
        return self


class ScaleUp(Section):
    """When and how fast a pool grows."""

    ticks: int = Field(default=2, ge=1, description="ticks that must ask for more")
    of_ticks: int = Field(default=3, ge=1, description="among this many last ticks")
    max_step: float = Field(default=0.5, gt=0, description="share of the pool that one decision may add")

    @model_validator(mode="after")
    def _possible(self) -> ScaleUp:
        if self.ticks > self.of_ticks:
            raise ValueError(f"ticks is {self.ticks}, which is above of_ticks {self.of_ticks}")
        return self


class ScaleDown(Section):
    """When and how slowly a pool shrinks."""

    window_s: float = Field(default=300.0, ge=0, description="the largest wish of this time counts")
    cooldown_s: float = Field(default=60.0, ge=0, description="time between two removals")
    after_up_s: float = Field(default=120.0, ge=0, description="no removal this soon after an addition")
    margin: float = Field(default=0.1, ge=0, lt=1, description="share of the SLO that one fewer must leave unused")


class Budget(Section):
    """A fixed number of replicas for both pools together."""

    replicas: int = Field(default=0, ge=0, description="0: no budget, each pool grows by itself")
    flip_gain: float = Field(default=0.10, ge=0, description="gain in capacity that a role change must bring")
    flip_ticks: int = Field(default=3, ge=1, description="ticks in a row that must agree")
    residence_s: float = Field(default=180.0, ge=0, description="time between two role changes")


class Forecasting(Section):
    """Demand ahead of time: a pool grows before the load is there."""

    method: Method = Field(default="auto", description="off, last_value, holt, kalman, seasonal; auto: the best lately")
    horizon_s: float = Field(default=60.0, gt=0, le=3600, description="how far ahead: a replica's start-up time")
    season_s: float = Field(default=86_400.0, gt=0, description="what repeats: a day")


class Policy(Section):
    """One policy file."""

    version: Literal[1] = Field(default=1, description="format of this file")
    name: str = Field(default="default", min_length=1, max_length=64, description="shown in decisions")
    tick_s: float = Field(default=5.0, gt=0, description="time between two decisions")
    start_timeout_s: float = Field(default=120.0, gt=0, description="a starting replica counts until then")
    slo: Slo = Field(default_factory=Slo, description="what a user is promised")
    prefill: PoolBounds = Field(default_factory=PoolBounds, description="bounds of the prefill pool")
    decode: PoolBounds = Field(default_factory=PoolBounds, description="bounds of the decode pool")
    utilisation_min: float = Field(default=0.5, gt=0, le=1, description="lowest target utilisation of prefill")
    utilisation_max: float = Field(default=0.9, gt=0, le=1, description="highest target utilisation of prefill")
    kv_utilisation: float = Field(default=0.8, gt=0, le=1, description="share of decode KV that may be in use")
    scale_up: ScaleUp = Field(default_factory=ScaleUp, description="when a pool grows")
    scale_down: ScaleDown = Field(default_factory=ScaleDown, description="when a pool shrinks")
    budget: Budget = Field(default_factory=Budget, description="replicas shared by both pools")
    forecast: Forecasting = Field(default_factory=Forecasting, description="demand ahead of time")
    hot_worker_factor: float = Field(default=3.0, gt=1, description="queue over the median's that is a routing fault")
    hot_worker_s: float = Field(default=30.0, ge=0, description="for this long")
    dry_run: bool = Field(default=False, description="decide and log, change nothing")

    @model_validator(mode="after")
    def _consistent(self) -> Policy:
        if self.utilisation_min > self.utilisation_max:
            raise ValueError(f"utilisation_min {self.utilisation_min} is above utilisation_max {self.utilisation_max}")
        if 0 < self.budget.replicas < self.prefill.min + self.decode.min:
            raise ValueError(f"budget.replicas {self.budget.replicas} is below prefill.min + decode.min")
        return self
