"""`tandem eval`: the accuracy gate as a command. Importing this is cheap: the engine is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

EXIT_BROKEN, EXIT_CANNOT_RUN = 1, 2

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def evaluate(
    model: Annotated[str, typer.Option(help="GGUF file, safetensors directory or known name")] = "",
    quantization: Annotated[
        Literal["none", "int8", "int4", "fp8", "file"], typer.Option(help="weights of the candidate")
    ] = "file",
    kv_dtype: Annotated[Literal["auto", "fp8"], typer.Option(help="keys and values of the candidate")] = "auto",
    dtype: Annotated[Dtype, typer.Option(help="in which the candidate computes")] = "auto",
    against: Annotated[Dtype, typer.Option(help="in which the reference computes, weights as they are")] = "auto",
    backend: Annotated[Literal["auto", "torch", "native", "triton"], typer.Option(help="of both")] = "auto",
    lengths: Annotated[str, typer.Option(help="contexts in tokens")] = "128,512,2048",
    pieces: Annotated[int, typer.Option(help="pieces of text for each context", min=1)] = 4,
    answer_tokens: Annotated[int, typer.Option(help="longest greedy answer", min=1)] = 64,
    text: Annotated[
        Path | None, typer.Option(help="held-out text; default: Python's own manual", exists=True, dir_okay=False)
    ] = None,
    max_perplexity_ratio: Annotated[float, typer.Option(help="limit", min=1.0)] = 1.03,
    min_top1_agreement: Annotated[float, typer.Option(help="limit", min=0.0, max=1.0)] = 0.85,
    num_threads: Annotated[int, typer.Option(help="compute threads", min=1)] = 1,
    out: Annotated[Path | None, typer.Option(help="file for the report as JSON")] = None,
) -> None:
    """Whether a quantised model may replace the one it was made from. Exit status 1 when a limit is broken.

    [dim]tandem eval --quantization int8[/dim]

    [dim]tandem eval --quantization none --kv-dtype fp8 --backend torch[/dim]

    [dim]tandem eval --model ./Llama-3.2-1B-Q8_0.gguf --quantization int4 --text held-out.txt --lengths 512,4096[/dim]
    """
    from benchmarks.accuracy_gate import GateLimits, GateOptions, markdown, run_gate, total_tokens, write_report
    from cluster.errors import StartupError
    from cluster.model_files import DEFAULT_MODEL

    try:
        options = GateOptions(
            model=model or DEFAULT_MODEL, quantization=quantization, kv_dtype=kv_dtype, backend=backend, dtype=dtype,
            against=against, lengths=_lengths(lengths), pieces=pieces, answer_tokens=answer_tokens, text=text,
            num_threads=num_threads,
        )  # fmt: skip
        limits = GateLimits(max_perplexity_ratio, min_top1_agreement)
        with typer.progressbar(length=total_tokens(options), label="reading", file=sys.stderr) as bar:
            report = run_gate(options, limits, bar.update)
    except (StartupError, ValueError) as error:
        sys.stderr.write(f"tandem eval: {error}\n")
        raise typer.Exit(EXIT_CANNOT_RUN) from None
    typer.echo(markdown(report), nl=False)
    if out is not None:
        write_report(out, report)
    if report.reasons:
        raise typer.Exit(EXIT_BROKEN)


def _lengths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 1 for part in parts):
        raise ValueError(f"--lengths {text!r}: give numbers above 1 with commas between them")
    return tuple(int(part) for part in parts)
