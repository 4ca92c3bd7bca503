"""`tandem drafter train`: what the `tandem` command loads through the entry points `tandem.commands`.

Importing this is cheap: the command imports what it needs when it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

EXIT_CANNOT_RUN = 2

drafter = typer.Typer(no_args_is_help=True, help="Train small models that guess what a large one will say.")


@drafter.callback()
def _drafter() -> None:
    """Keeps `train` a subcommand while it is the only one."""


@drafter.command("train")
def train(
    kind: Annotated[Literal["eagle", "medusa"], typer.Option(help="one layer on hidden states, or a block per guess")],
    out: Annotated[Path | None, typer.Option(help="directory of the drafter; default: where serving looks")] = None,
    model: Annotated[str | None, typer.Option(help="the target: name, GGUF file or safetensors directory")] = None,
    tokens: Annotated[int, typer.Option(help="of conversation that the target writes", min=100)] = 300_000,
    steps: Annotated[int, typer.Option(help="of training; 0: a few passes", min=0)] = 0,
    work_dir: Annotated[Path | None, typer.Option(help="what both kinds share, 3.4 KB a token; kept")] = None,
    resume: Annotated[bool, typer.Option("--resume/--restart", help="go on with what lies in the work dir")] = True,
    seed: Annotated[int, typer.Option(help="of conversations, order and weights")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads", min=1)] = 1,
) -> None:
    """Let the target hold conversations, and train a drafter on its hidden states.

    Nothing is downloaded. On one core, 300,000 tokens take about 15 minutes to write and as long again to train on.

    Examples: `tandem drafter train --kind eagle`, `tandem drafter train --kind medusa --tokens 50000 --out heads`
    """
    from cluster.errors import StartupError
    from cluster.model_files import DEFAULT_MODEL, resolve_model, tandem_home
    from drafter_training.display import TrainingDisplay
    from drafter_training.pipeline import TrainingOptions, discard_work, train_drafter

    try:
        path = resolve_model(model or DEFAULT_MODEL)
        options = TrainingOptions(
            kind=kind,
            model=path,
            work_dir=work_dir or tandem_home() / "drafter_training" / path.stem,
            out=out or tandem_home() / "drafters",
            num_tokens=tokens,
            num_steps=steps,
            seed=seed,
            num_threads=threads,
        )
        if not resume:
            discard_work(options)
        with TrainingDisplay() as display:
            file = train_drafter(options, display.progress)
    except StartupError as error:
        typer.echo(error.message, err=True)
        sys.exit(EXIT_CANNOT_RUN)
    typer.echo(f"{file}\n{file.with_suffix('.json').read_text()}")
