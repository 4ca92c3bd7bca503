"""A sweep's directory: one file for each finished point, so that an interrupted sweep goes on where it stopped.

DIR/sweep.json             settings, machine, what was measured
DIR/points/KEY.json        one point
DIR/records/KEY.jsonl      its raw records
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import Machine
from benchmarks.request_record import RequestRecord, write_records
from benchmarks.sweep_settings import SweepSettings

SCHEMA_VERSION = 2


class SweepDirectoryError(RuntimeError):
    """The directory holds something else. One line that says what and what to do."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measured point. `summary` is a run's (`run_summary.to_json`), `measured` what its stage is about."""

    stage: str
    deployment: str
    params: dict[str, float]
    summary: dict[str, Any]
    measured: dict[str, float] = field(default_factory=dict)
    stages_ms: dict[str, float] = field(default_factory=dict)  # medians of the TTFT's stages

    @property
    def key(self) -> str:
        return point_key(self.stage, self.deployment, self.params)


def point_key(stage: str, deployment: str, params: dict[str, float]) -> str:
    """A file name that says what the point is."""
    text = "-".join((stage, deployment, *(f"{name}{value:.6g}" for name, value in params.items())))
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", text)


class SweepStore:
    """Reads and writes one sweep's directory."""

    def __init__(
        self,
        directory: Path,
        settings: SweepSettings,
        machine: Machine,
        model: str,
        content_seed: int | None = None,
        serve_flags: Sequence[str] = (),
    ) -> None:
        """`serve_flags`: what the deployments were started with beside their own, for the reader of the report."""
        self.directory = directory
        self.model = model
        # Of the prompts' tokens, new for each sweep: a server that still has another sweep's prompts in its cache must
        # not find these there.
        self.content_seed = secrets.randbits(31) if content_seed is None else content_seed
        self._points: dict[str, Point] = {}
        (directory / "points").mkdir(parents=True, exist_ok=True)
        (directory / "records").mkdir(exist_ok=True)
        self._manifest = {
            "schema": "tandem.bench.sweep",
            "version": SCHEMA_VERSION,
            "model": model,
            "serve_flags": list(serve_flags),
            "settings": settings.to_json(),
            "content_seed": self.content_seed,
            "machine": asdict(machine),
        }
        self._claim()
        for point in read_points(directory):
            self._points[point.key] = point

    def get(self, key: str) -> Point | None:
        return self._points.get(key)

    def put(self, point: Point, records: Sequence[RequestRecord]) -> None:
        """Records first: a point that is there is complete."""
        header = {"stage": point.stage, "deployment": point.deployment, "params": point.params}
        write_records(self.directory / "records" / f"{point.key}.jsonl", header, records)
        path = self.directory / "points" / f"{point.key}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(point), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
        self._points[point.key] = point

    def points(self, stage: str, deployment: str | None = None) -> list[Point]:
        return [
            point
            for point in self._points.values()
            if point.stage == stage and (deployment is None or point.deployment == deployment)
        ]

    def _claim(self) -> None:
        """Takes the directory, or goes on in it when it holds the same sweep."""
        path = self.directory / "sweep.json"
        if path.is_file():
            held = json.loads(path.read_text(encoding="utf-8"))
            same = ("version", "model", "settings")
            # JSON has no tuples: compare what was written.
            wanted = json.loads(json.dumps(self._manifest))
            differing = [name for name in same if held.get(name) != wanted[name]]
            if differing:
                raise SweepDirectoryError(
                    f"{self.directory} holds a sweep with other {' and '.join(differing)}: "
                    "choose another --out, or remove it"
                )
            self.content_seed = int(held["content_seed"])
            return
        path.write_text(json.dumps(self._manifest, indent=1) + "\n", encoding="utf-8")


def read_points(directory: Path) -> list[Point]:
    """All points of a sweep's directory, in order of their file names."""
    return [
        Point(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted((directory / "points").glob("*.json"))
    ]


def read_manifest(directory: Path) -> dict[str, Any]:
    """The settings and the machine of a sweep. Raises `SweepDirectoryError` when there is none."""
    path = directory / "sweep.json"
    if not path.is_file():
        raise SweepDirectoryError(f"{directory} holds no sweep: `tandem bench sweep --out {directory}` makes one")
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if manifest.get("version") != SCHEMA_VERSION:
        raise SweepDirectoryError(
            f"{directory} was written with schema version {manifest.get('version')!r}, this tool reads {SCHEMA_VERSION}"
        )
    return manifest
