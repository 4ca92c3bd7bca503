"""The actors of a cluster by name: detached, so that they outlive their controller, and found again by the next one.

    <ray.name>                              the controller
    <ray.name>/<run>:<process>:<launch>     a host; `run` is one `tandem up`, `launch` one incarnation of the process
    <ray.name>/<run>                        the run's placement group

Whoever makes a detached actor must end it: `end` for one, `end_all` for what a dead controller left.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

# A host kills its child at once; what it waits for is the kernel.
CLOSE_TIMEOUT_S = 20.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostName:
    """`run` is `<ray.name>/<run>`."""

    run: str
    process: str
    launch: str

    @classmethod
    def new(cls, run: str, process: str) -> HostName:
        return cls(run, process, secrets.token_hex(4))

    def __str__(self) -> str:
        return f"{self.run}:{self.process}:{self.launch}"


def find_hosts(prefix: str) -> Iterator[tuple[HostName, Any]]:
    """Name and handle of every host whose run begins so; those that end just now are left out."""
    for name in list_named_actors():
        parts = name.split(":")
        if name.startswith(prefix) and len(parts) == 3:
            with contextlib.suppress(ValueError):
                yield HostName(*parts), ray.get_actor(name)


def end(host: Any) -> None:
    """Kills the actor, and with it its child. Nothing happens when it has ended."""
    with contextlib.suppress(RayError):
        ray.kill(host, no_restart=True)


def end_all(prefix: str) -> int:
    """Ends every host whose run begins so, with its child, and gives its places back; how many hosts there were.

    Router first, as nobody is left to tell workers that they shall drain: streams are cut.
    """
    found = sorted(find_hosts(prefix), key=lambda one: not one[0].process.startswith("router"))
    hosts = [host for _, host in found]
    if hosts:
        closing = [host.close.remote() for host in hosts]
        _, late = ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        if late:
            _log.warning("%d of %d hosts did not answer: they are killed", len(late), len(hosts))
    for host in hosts:
        end(host)
    for places in placement_group_table().values():
        if str(places["name"]).startswith(prefix) and places["state"] != "REMOVED":
            give_back(find_places(str(places["name"])))
    return len(hosts)


def find_places(run: str) -> PlacementGroup | None:
    try:
        places: PlacementGroup = get_placement_group(run)
    except ValueError:
        return None
    return places


def reserve_places(run: str, bundles: list[dict[str, float]], strategy: str) -> PlacementGroup:
    """Those of an earlier controller of this run, or new ones, which outlive us as well."""
    return find_places(run) or placement_group(bundles, strategy=strategy, name=run, lifetime="detached")


def give_back(places: PlacementGroup | None) -> None:
    if places is not None:
        with contextlib.suppress(RayError):
            remove_placement_group(places)
