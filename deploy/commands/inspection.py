"""`tandem status`, `explain` and `drain`: what a running cluster says of itself, of a request, and of a worker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands.options import DEFAULT_URL, EXIT_FAILED, Address, ApiKey, CaFile, CertFile, KeyFile, OnRay, Url

if TYPE_CHECKING:
    from deploy.client import ClusterClient


def status(
    url: Url = DEFAULT_URL,
    json_output: Annotated[bool, typer.Option("--json", help="everything, for programs")] = False,
    api_key: ApiKey = "",
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
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
    asyncio.run(_status(_client(url, api_key, ca_file, cert_file, key_file), json_output))


def explain(
    request_id: Annotated[str, typer.Argument(help="the answer's id, or its x-request-id header")],
    url: Url = DEFAULT_URL,
    json_output: Annotated[bool, typer.Option("--json", help="everything, for programs")] = False,
    api_key: ApiKey = "",
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
) -> None:
    """Say why a request was placed where it was: candidates, each term in ms, the choice, and what then happened.

    [dim]tandem explain chatcmpl-2f6c…[/dim]
    """
    asyncio.run(_explain(_client(url, api_key, ca_file, cert_file, key_file), request_id, json_output))


def drain(
    worker_id: Annotated[str, typer.Argument(help="as `tandem status` lists it")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
) -> None:
    """Let a worker finish what it has and end; nothing new goes to it.

    What does not end within its drain timeout goes on at another worker. `tandem serve` and `tandem up` then start it
    anew, so that draining one worker after the other restarts a cluster without a lost request.

    [dim]tandem drain decode-0[/dim]
    """
    asyncio.run(_drain(_client(url, api_key, ca_file, cert_file, key_file), worker_id))


def _client(
    url: str, api_key: str, ca_file: Path | None, cert_file: Path | None, key_file: Path | None
) -> ClusterClient:
    from deploy.client import ClientTls, ClusterClient

    return ClusterClient(url, api_key, ClientTls(ca_file, cert_file, key_file))


async def _status(client: ClusterClient, json_output: bool) -> None:
    import json

    from rich.console import Console

    from deploy.client import AnswerFailed
    from deploy.status_table import conservation_errors, status_tables

    async with client:
        answer = await client.status()
    if json_output:
        typer.echo(json.dumps(answer, indent=2))
    else:
        Console().print(status_tables(answer))
    if errors := conservation_errors(answer):
        raise AnswerFailed("; ".join(errors))


async def _drain(client: ClusterClient, worker_id: str) -> None:
    async with client:
        in_flight = await client.drain(worker_id)
    typer.echo(f"{worker_id} drains: {in_flight} request{'' if in_flight == 1 else 's'} in flight")


async def _explain(client: ClusterClient, request_id: str, json_output: bool) -> None:
    import json

    from rich.console import Console

    from deploy.explanation import explanation_tables

    async with client:
        answer = await client.explain(request_id)
    if json_output:
        typer.echo(json.dumps(answer, indent=2))
    else:
        Console().print(explanation_tables(answer))
