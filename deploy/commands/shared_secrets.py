"""`tandem secrets`: what the processes of a cluster on several machines know and nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

secrets_app = typer.Typer(no_args_is_help=True, help="Secrets of a cluster on several machines.")


@secrets_app.command("create")
def secrets_create(
    directory: Annotated[Path, typer.Argument(help="a new directory; copy it to the same path on every node")],
) -> None:
    """Make token, Redis password and certificate of a cluster: ray.secrets_dir.

    [dim]tandem secrets create /etc/tandem/secrets[/dim]
    """
    from deploy.cluster_secrets import create_secrets

    made = create_secrets(directory)
    typer.echo(
        f"{made.directory}: copy it to every node, same path, this user alone (mode 0700); "
        f"give your Redis the password in {made.redis_password_file.name}"
    )


@secrets_app.callback()
def _group() -> None:
    """A group, also while it has one command."""
