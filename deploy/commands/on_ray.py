"""`tandem up` and `tandem down`: a cluster on Ray that outlives the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.commands.options import Address, OnRay


def up(
    config: Annotated[
        Path | None, typer.Argument(help="YAML that describes the cluster; default: deploy/clusters/ray-laptop.yaml")
    ] = None,
    on: OnRay = "ray",
    address: Address = "",
) -> None:
    """Bring a cluster up on Ray, return when it is ready, and print its URL. It runs until `tandem down`.

    Needs `pip install 'tandem-serve\\[ray]'`. On one machine without Ray: `tandem serve`. How it goes stands on stderr.

    [dim]tandem up[/dim]  two workers of each kind, the default model, on a Ray of its own on this machine

    [dim]tandem up cluster.yaml --on ray[/dim]  what the file says

    [dim]tandem up cluster.yaml --on ray --address 10.0.0.1:6379[/dim]  on a Ray that runs: its nodes may be machines
    (docs/several_hosts.md)
    """
    from deploy.config import RAY_CLUSTER_FILE, load_cluster_config
    from deploy.ray_cluster import up as up_on_ray

    loaded = load_cluster_config(config or RAY_CLUSTER_FILE)
    ready = up_on_ray(loaded, address, lambda step: typer.echo(step, err=True))
    grpc = f" · {ready['grpc_address']} (gRPC)" if ready["grpc_address"] else ""
    typer.echo(f"Tandem serves {ready['model']} at {ready['url']} (OpenAI API){grpc} · {ready['summary']} · on Ray")


def down(
    name: Annotated[str, typer.Option(help="ray.name of the cluster")] = "tandem",
    address: Address = "",
) -> None:
    """Stop a cluster that `tandem up` started, and wait until nothing of it is left.

    [dim]tandem down[/dim]
    """
    from deploy.ray_cluster import down as down_on_ray

    failure = down_on_ray(name, address)
    typer.echo(f"stopped; it had failed before: {failure}" if failure else "stopped")
