"""The `tandem` command, put together from `deploy/commands/`, and how it ends.

Each command imports what it needs when it runs, so that `tandem --help` answers at once.
Exit status: 0 done, 1 it ran and failed, 2 it could not start (one line says why and what to do), 130 interrupted.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated, NoReturn

import typer

from deploy.commands.checking import check
from deploy.commands.environment import SETTINGS, EnvironmentCommand
from deploy.commands.inspection import drain, explain, status
from deploy.commands.keys import key_app
from deploy.commands.models import model_app
from deploy.commands.on_ray import down, up
from deploy.commands.options import EXIT_CANNOT_START, EXIT_FAILED, EXIT_INTERRUPTED
from deploy.commands.scaling import policy_app, scaler_app
from deploy.commands.serving import generate, serve
from deploy.commands.shared_secrets import secrets_app

app = typer.Typer(
    name="tandem",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve a language model from two pools that work in tandem: prefill workers read prompts, decode workers "
    "write answers, a router in front places each request.",
    epilog="First steps:  [bold]tandem model fetch[/bold]  ·  [bold]tandem serve[/bold]  ·  "
    '[bold]tandem generate "Why is the sky blue?" --timeline[/bold]  ·  [bold]tandem status[/bold]',
)
app.command(cls=EnvironmentCommand, context_settings=SETTINGS)(serve)
for command in (check, up, down, generate, status, explain, drain):
    app.command()(command)
for name, group in (
    ("model", model_app),
    ("key", key_app),
    ("secrets", secrets_app),
    ("scaler", scaler_app),
    ("policy", policy_app),
):
    app.add_typer(group, name=name)


def main() -> NoReturn:
    """Entry of the `tandem` command."""
    _add_installed_commands()
    try:
        app(prog_name="tandem")
    except KeyboardInterrupt:
        _end("interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        status = _exit_status(error)
        if status is None:
            raise  # our own bug: the traceback is what helps
        _end(str(error), status)
    sys.exit(0)


def _add_installed_commands() -> None:
    """Commands of packages above this one (`tandem bench`, `tandem plan`), by entry point: nothing imports upward."""
    for entry in importlib.metadata.entry_points(group="tandem.commands"):
        command = entry.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=entry.name)
        else:
            app.command(entry.name)(command)


def _exit_status(error: Exception) -> int | None:
    """2 for what could not start, 1 for what failed afterwards, None for what nobody expected."""
    from cluster.errors import StartupError
    from deploy.autoscaler.journal import JournalError
    from deploy.client import AnswerFailed, ClusterUnreachable
    from deploy.local_cluster import ClusterFailed
    from deploy.yaml_settings import YamlSettingsError

    if isinstance(error, StartupError | ClusterUnreachable | JournalError | YamlSettingsError):
        return EXIT_CANNOT_START
    return EXIT_FAILED if isinstance(error, AnswerFailed | ClusterFailed) else None


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from cluster.version import tandem_version

        typer.echo(f"tandem {tandem_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print Tandem's version and exit.")
    ] = False,
) -> None:
    """What stands before a command."""


@app.command()
def version() -> None:
    """Print the versions of Tandem and of what it runs on."""
    from deploy.versions import version_lines

    for line in version_lines():
        typer.echo(line)


def _end(message: str, status: int) -> NoReturn:
    sys.stderr.write(f"tandem: {message}\n")
    sys.exit(status)
