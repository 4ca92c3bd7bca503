"""`tandem key`: API keys for an address that others can reach."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

key_app = typer.Typer(no_args_is_help=True, help="API keys, needed on an address that others can reach.")


@key_app.command("create")
def key_create(
    name: Annotated[str, typer.Argument(help="whose key it is; limits and caches are kept apart by it")],
    file: Annotated[Path, typer.Option(help="where its SHA-256 goes: router.api_keys_file")],
    admin: Annotated[bool, typer.Option(help="it may also look at the cluster and drain workers")] = False,
) -> None:
    """Make an API key: it is printed once, the file keeps its SHA-256 only.

    [dim]tandem key create alice --file keys.txt[/dim]
    """
    from deploy.api_keys import create_key

    typer.echo(create_key(name, file, is_admin=admin))
