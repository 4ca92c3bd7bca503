"""What one measurement of a server holds: its shape, its figures with their spread, and what could not be measured.

`measurement_stages` fills it; `first_measurement` and `peers` write it down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.machine import Machine
from benchmarks.statistics import Interval, median_interval


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is asked for. The defaults take about two minutes on two cores."""

    runs: int = 5
    prompt_tokens: int = 128
    single_output_tokens: int = 128
    batch_streams: int = 16
    batch_output_tokens: int = 64
    prefill_tokens: int = 2048
    interference_streams: int = 8
    interference_interval_s: float = 2.0
    # Streams get the lead to start in before the first long prompt; the prompts come, and are measured, for the window.
    interference_lead_s: float = 4.0
    interference_window_s: float = 20.0


DEFAULT_SHAPE = Shape()


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity: the median of the runs between their least and their greatest."""

    name: str
    unit: str
    value: Interval
    runs: tuple[float, ...]


@dataclass(slots=True)
class Measurement:
    """All figures with what they were measured on, and what could not be measured with its reason."""

    machine: Machine
    model: str
    shape: Shape
    flags: tuple[str, ...] = ()
    figures: list[Figure] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    worker_details: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, name: str, unit: str, runs: Sequence[float]) -> None:
        self.figures.append(Figure(name, unit, median_interval(runs), tuple(runs)))


class RunFailed(RuntimeError):
    """A request of a measurement failed, so there is no figure."""
