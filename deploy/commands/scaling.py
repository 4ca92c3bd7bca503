"""`tandem policy` and `tandem scaler`: what the autoscaler is told, what it decided, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.commands.options import EXIT_FAILED

scaler_app = typer.Typer(no_args_is_help=True, help="What the autoscaler decided, and why.")
policy_app = typer.Typer(no_args_is_help=True, help="Autoscaler policy files.")


@policy_app.command("check")
def policy_check(files: Annotated[list[Path], typer.Argument(help="policy files")]) -> None:
    """Say what is wrong with a policy file, by file, line, key and reason; ends with status 1 if anything is.

    [dim]tandem policy check deploy/policies/latency-first.yaml[/dim]
    """
    from deploy.autoscaler.policy_file import load_policy
    from deploy.yaml_settings import YamlSettingsError

    is_wrong = False
    for file in files:
        try:
            typer.echo(f"{file}: ok, policy {load_policy(file).name!r}")
        except YamlSettingsError as error:
            is_wrong = True
            typer.echo(str(error), err=True)
    if is_wrong:
        raise typer.Exit(EXIT_FAILED)


@scaler_app.command("explain")
def scaler_explain(
    journal: Annotated[Path | None, typer.Argument(help="a journal; default: the newest one")] = None,
    last: Annotated[int, typer.Option(help="lines at most", min=1)] = 60,
    shows_all: Annotated[bool, typer.Option("--all", help="every tick, not only those that brought news")] = False,
) -> None:
    """Say what the autoscaler saw, decided and did, tick by tick.

    [dim]tandem scaler explain[/dim]  the cluster that ran last
    """
    from deploy.autoscaler.journal import read_journal
    from deploy.scaler_view import explained

    for line in list(explained(read_journal(journal or _newest_journal()), shows_all=shows_all))[-last:]:
        typer.echo(line)


@scaler_app.command("replay")
def scaler_replay(
    journal: Annotated[Path | None, typer.Argument(help="a journal; default: the newest one")] = None,
    policy: Annotated[Path | None, typer.Option(help="decide by this policy instead of the recorded one")] = None,
) -> None:
    """Decide a recorded run again; ends with status 1 when a decision differs.

    [dim]tandem scaler replay --policy mine.yaml[/dim]  what would this policy have done at each tick?
    """
    from deploy.autoscaler.journal import read_journal
    from deploy.autoscaler.policy_file import load_policy
    from deploy.autoscaler.replay import replay
    from deploy.scaler_view import difference

    ticks = replay(read_journal(journal or _newest_journal()), None if policy is None else load_policy(policy))
    differing = [tick for tick in ticks if not tick.is_same]
    for tick in differing:
        typer.echo(difference(tick))
    typer.echo(f"{len(ticks)} ticks decided again, {len(differing)} differ")
    if differing:
        raise typer.Exit(EXIT_FAILED)


def _newest_journal() -> Path:
    from deploy.autoscaled_pools import journal_directory
    from deploy.autoscaler.journal import JournalError

    found = sorted(journal_directory().glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise JournalError(f"no journal in {journal_directory()}: `tandem serve --autoscale POLICY.yaml` writes one")
    return found[-1]
