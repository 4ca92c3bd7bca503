"""`tandem status`, `explain` and `drain`: what a running cluster says of itself, of a request, and of a worker."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from deploy.commands.options import DEFAULT_URL, EXIT_FAILED, Address, ApiKey, OnRay, Url


def status(
    url: Url = DEFAULT_URL,
    json_output: Annotated[bool, typer.Option("--json", help="everything, for programs")] = False,
    api_key: ApiKey = "",
    on: OnRay = None,
    name: Annotated[str, typer.Option(help="ray.name of the cluster")] = "tandem",
    address: Address = "",
) -> None:
    """Show pools, load, block conservation, fallbacks and KV links of a running cluster.

    Ends with status 1 when a worker has lost count of its blocks.

    [dim]tandem status[/dim]

    [dim]tandem status --json | jq '.workers[].load'[/dim]

    [dim]tandem status --on ray[/dim]  the cluster that `tandem up` started, its processes first
    """
    if on is not None:
        from deploy.ray_cluster import state

        on_ray = state(name, address)
        if not json_output:
            typer.echo("  ".join(f"{process}: {what}" for process, what in on_ray["processes"].items()))
        if not on_ray["url"]:
            typer.echo(on_ray["failure"] or "it is starting")
            raise typer.Exit(EXIT_FAILED if on_ray["failure"] else 0)
        url = on_ray["url"]
    asyncio.run(_status(url, api_key, json_output))


def explain(
    request_id: Annotated[str, typer.Argument(help="the answer's id, or its x-request-id header")],
    url: Url = DEFAULT_URL,
    json_output: Annotated[bool, typer.Option("--json", help="everything, for programs")] = False,
    api_key: ApiKey = "",
) -> None:
    """Say why a request was placed where it was: candidates, each term in ms, the choice, and what then happened.

    [dim]tandem explain chatcmpl-2f6c…[/dim]
    """
    asyncio.run(_explain(url, api_key, request_id, json_output))


def drain(
    worker_id: Annotated[str, typer.Argument(help="as `tandem status` lists it")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Let a worker finish what it has and end; nothing new goes to it.

    What does not end within its drain timeout goes on at another worker. `tandem serve` and `tandem up` then start it
    anew, so that draining one worker after the other restarts a cluster without a lost request.

    [dim]tandem drain decode-0[/dim]
    """
    asyncio.run(_drain(url, api_key, worker_id))


async def _status(url: str, api_key: str, json_output: bool) -> None:
    import json

    from rich.console import Console

    from deploy.client import AnswerFailed, ClusterClient
    from deploy.status_table import conservation_errors, status_tables

    async with ClusterClient(url, api_key) as client:
        answer = await client.status()
    if json_output:
        typer.echo(json.dumps(answer, indent=2))
    else:
        Console().print(status_tables(answer))
    if errors := conservation_errors(answer):
        raise AnswerFailed("; ".join(errors))


async def _drain(url: str, api_key: str, worker_id: str) -> None:
    from deploy.client import ClusterClient

    async with ClusterClient(url, api_key) as client:
        in_flight = await client.drain(worker_id)
    typer.echo(f"{worker_id} drains: {in_flight} request{'' if in_flight == 1 else 's'} in flight")


async def _explain(url: str, api_key: str, request_id: str, json_output: bool) -> None:
    import json

    from rich.console import Console

    from deploy.client import ClusterClient
    from deploy.explanation import explanation_tables

    async with ClusterClient(url, api_key) as client:
        answer = await client.explain(request_id)
    if json_output:
        typer.echo(json.dumps(answer, indent=2))
    else:
        Console().print(explanation_tables(answer))
