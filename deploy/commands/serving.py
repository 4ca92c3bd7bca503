"""`tandem serve` and `tandem generate`: a cluster of this machine, and one question to it or to another one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import typer

from deploy.commands.environment import variables_in_use
from deploy.commands.options import DEFAULT_URL, EXIT_INTERRUPTED, ApiKey, CaFile, CertFile, Config, KeyFile, Url

if TYPE_CHECKING:
    from deploy.client import ClusterClient, Question
    from deploy.cluster_plan import ClusterPlan
    from deploy.config import ClusterConfig

_MODEL_HELP = "known name, GGUF file, directory with safetensors, or owner/name on the Hugging Face hub"
Model = Annotated[str | None, typer.Option(help=_MODEL_HELP)]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None, typer.Option(help="type of weights and KV in memory")
]
Backend = Annotated[Literal["auto", "torch", "native", "triton"] | None, typer.Option(help="who computes")]
Quantization = Annotated[
    Literal["none", "int8", "int4", "fp8", "file"] | None,
    typer.Option(help="weights; file keeps the file's own blocks"),
]
KvDtype = Annotated[
    Literal["auto", "fp8"] | None, typer.Option(help="KV as the model computes, or e4m3 with scales (torch and triton)")
]
WeightCompression = Annotated[
    Literal["auto", "off"] | None,
    typer.Option(help="off: bfloat16 weights as they are, not in 12 bits without loss"),
]
Transport = Annotated[str | None, typer.Option(help="how KV travels, in order of preference: shm,tcp; or auto")]
Count = Annotated[int | None, typer.Option(help="worker processes of this role", min=0)]


# Keys of a cluster's file that are called otherwise than their flag.
_FLAG_OF_KEY = {
    "prefill.workers": "prefill", "decode.workers": "decode", "aggregated.workers": "aggregated",
    "transports": "transport", "router.allowed_origins": "allowed_origin", "router.model_aliases": "served_model_name",
}  # fmt: skip


def serve(
    context: typer.Context,
    model_argument: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="the same as --model")] = None,
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    engine: Annotated[
        Literal["real", "mock"] | None, typer.Option(help="mock: no model runs, workers keep time by a timing model")
    ] = None,
    backend: Backend = None,
    quantization: Quantization = None,
    kv_dtype: KvDtype = None,
    weight_compression: WeightCompression = None,
    speculation: Annotated[
        str | None, typer.Option(help="off, auto, ngram, suffix, draft, eagle, medusa or mtp: guess and verify tokens")
    ] = None,
    num_drafts: Annotated[int | None, typer.Option(help="guesses in one step of one sequence, at most", min=1)] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="for speculation draft: a smaller model of the same vocabulary")
    ] = None,
    verification: Annotated[
        str | None, typer.Option(help="match: tokens as without speculation; rejection: equal in law (draft only)")
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
    prefill_fallback: Annotated[
        Literal["allow", "deny"] | None, typer.Option(help="whether decode workers may prefill as well")
    ] = None,
    itl_slo_ms: Annotated[
        float | None,
        typer.Option(help="prompts computed where streams run leave these this time a token; 0: any", min=0),
    ] = None,
    host: Annotated[str | None, typer.Option(help="address of the HTTP and gRPC fronts")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; 0: any free one", min=0, max=65535)] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; 0: any free one", min=0, max=65535)] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="tokens of prompt and answer together; 0: the model's own", min=0)
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="what requests call the model; repeated: other names for it")
    ] = None,
    chat_template_file: Annotated[
        Path | None, typer.Option(help="jinja file to use instead of the model's own template")
    ] = None,
    sampling_defaults: Annotated[
        Literal["openai", "model"] | None,
        typer.Option(help="of requests that leave them out; model: those of its generation_config.json"),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="web site whose pages may ask (CORS); repeatable")
    ] = None,
    log_requests: Annotated[
        bool | None, typer.Option("--log-requests", help="a line of the router's log for each request")
    ] = None,
    api_keys_file: Annotated[
        Path | None, typer.Option(help="keys of `tandem key create`: needed on an address that others can reach")
    ] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option(help="TLS of HTTP and gRPC: PEM with the certificate and what leads to its authority")
    ] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="PEM: the certificate's key, without a password")] = None,
    ssl_ca_certs: Annotated[
        Path | None, typer.Option(help="PEM: clients need a certificate that one of these authorities signed")
    ] = None,
    logs: Annotated[
        Literal["files", "stderr", "json"],
        typer.Option(help="of all processes: files only, or on stderr too, as text or JSON, with their names"),
    ] = "files",
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

    One line with the URL is printed when it is ready. Flags override the environment (each flag's variable stands
    beside it), that the file; whatever is started is stopped again.

    [dim]tandem serve[/dim]  one prefill and one decode worker, the default model

    [dim]tandem serve ./Llama-3.2-1B-Instruct-Q8_0.gguf --decode 2 --port 9000[/dim]

    [dim]tandem serve Qwen/Qwen3-0.6B[/dim]  from the Hugging Face hub, when it is not here yet

    [dim]tandem serve --prefill 0 --decode 0 --aggregated 2[/dim]  no pools, for comparison

    [dim]tandem serve --engine mock --prefill 4 --decode 4[/dim]  eight workers that keep time and compute nothing

    [dim]tandem serve --autoscale deploy/policies/latency-first.yaml[/dim]  the pools follow the traffic

    [dim]tandem serve --host 0.0.0.0 --api-keys-file keys.txt[/dim]  for others too; `tandem key create` makes a key

    [dim]tandem serve --ssl-certfile cert.pem --ssl-keyfile key.pem[/dim]  https, and TLS for gRPC

    [dim]tandem serve --config cluster.yaml --transport tcp[/dim]
    """
    from deploy.config import DEFAULT_CLUSTER_FILE, load_cluster_config, override

    variables = variables_in_use(context)
    if model_argument and "model" in variables:
        model = None
    if model_argument and model and model_argument != model:
        raise typer.BadParameter(f"{model_argument} and --model {model}: give one of them", param_hint="MODEL")
    flags = {
        "model": model or model_argument, "engine": engine, "dtype": dtype, "backend": backend,
        "quantization": quantization, "kv_dtype": kv_dtype,
        "weight_compression": weight_compression,
        "speculation": speculation, "num_drafts": num_drafts, "draft_model": draft_model,
        "verification": verification,
        "prefill.workers": prefill, "decode.workers": decode, "aggregated.workers": aggregated,
        "prefill.num_threads": num_threads, "decode.num_threads": num_threads, "aggregated.num_threads": num_threads,
        "transports": tuple(transport.split(",")) if transport else None, "min_bandwidth": min_bandwidth,
        "block_tokens": block_tokens,
        "router.policy": policy, "router.prefill_fallback": prefill_fallback,
        "decode.itl_slo_ms": itl_slo_ms, "aggregated.itl_slo_ms": itl_slo_ms,
        "router.host": host, "router.port": port, "router.grpc_port": grpc_port,
        "router.ssl_certfile": ssl_certfile, "router.ssl_keyfile": ssl_keyfile, "router.ssl_ca_certs": ssl_ca_certs,
        "router.api_keys_file": api_keys_file, "redis.url": redis_url,
        "max_model_len": max_model_len, "router.chat_template_file": chat_template_file,
        "router.sampling_defaults": sampling_defaults,
        "router.allowed_origins": tuple(allowed_origin) if allowed_origin else None,
        "router.log_requests": log_requests,
        **_names(served_model_name),
        "seed": seed, "autoscale": autoscale, "drain_timeout_s": drain_timeout_s, "link_bytes_per_s": link_bytes_per_s,
    }  # fmt: skip
    loaded = load_cluster_config(config or DEFAULT_CLUSTER_FILE)
    given = {key: value for key, value in flags.items() if value is not None}
    origins = {key: variables.get(_FLAG_OF_KEY.get(key, key.rpartition(".")[2]), "") for key in given}
    cluster = override(loaded, given, {key: variable for key, variable in origins.items() if variable})
    asyncio.run(_serve(cluster, ask, logs))


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
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
) -> None:
    """Ask once and stream the answer.

    [dim]tandem generate "Why is the sky blue?" --timeline[/dim]  ask the cluster that runs

    [dim]tandem generate --start "Why is the sky blue?"[/dim]  start one, ask, stop it
    """
    from deploy.client import ClientTls, ClusterClient, Question
    from deploy.config import DEFAULT_CLUSTER_FILE, load_cluster_config, override

    question = Question(prompt, "" if start else model, max_tokens, temperature, seed)
    if not start:
        client = ClusterClient(url, api_key, ClientTls(ca_file, cert_file, key_file))
        asyncio.run(_ask(client, question, timeline))
        return
    flags = {"router.port": 0, **({"model": model} if model else {})}
    cluster = override(load_cluster_config(config or DEFAULT_CLUSTER_FILE), flags)
    asyncio.run(_ask_own_cluster(cluster, api_key, question, timeline))


def _names(served: list[str] | None) -> dict[str, object]:
    if not served:
        return {}
    return {"router.served_model_name": served[0], "router.model_aliases": tuple(served[1:])}


async def _serve(config: ClusterConfig, ask: str, logs: Literal["files", "stderr", "json"]) -> None:
    from cluster.logs import configure_logs
    from deploy.client import Question
    from deploy.display import TerminalDisplay
    from deploy.launcher import LocalLauncher
    from deploy.local_cluster import run_cluster
    from deploy.log_stream import LogStream

    _fetch_absent(config)
    stream = LogStream(sys.stderr, "json" if logs == "json" else "text")
    own_lines = sys.stderr if logs == "files" else stream.of("tandem")

    async def while_serving(plan: ClusterPlan) -> None:
        async with _client_of(plan, config) as client:
            await _tell_second_choices(client, own_lines)
            if ask:
                await _stream(client, Question(ask), show_timeline=False)
        await asyncio.Event().wait()

    if logs == "files":
        await run_cluster(config, TerminalDisplay(), while_serving)
        return
    configure_logs("supervisor", stream=own_lines)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each look whether a router is ready
    display = TerminalDisplay(own_lines)
    await run_cluster(config, display, while_serving, lambda directory, _: LocalLauncher(directory, stream))


async def _ask_own_cluster(config: ClusterConfig, api_key: str, question: Question, show_timeline: bool) -> None:
    from deploy.display import TerminalDisplay
    from deploy.local_cluster import run_cluster

    _fetch_absent(config)
    answered = False

    async def while_serving(plan: ClusterPlan) -> None:
        nonlocal answered
        await _ask(_client_of(plan, config, api_key), question, show_timeline)
        answered = True

    await run_cluster(config, TerminalDisplay(), while_serving)
    if not answered:
        typer.echo("tandem: interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)


def _fetch_absent(config: ClusterConfig) -> None:
    """Models of the hub that are named and not here."""
    from deploy.fetch_display import TerminalFetchDisplay
    from deploy.model_fetch import fetch_from_hub_if_absent

    with TerminalFetchDisplay() as display:
        for name in (config.model, config.draft_model):
            fetch_from_hub_if_absent(name, display)


async def _tell_second_choices(client: ClusterClient, out: TextIO) -> None:
    """What runs otherwise than wanted, slower above all: a line each, where no key keeps us from asking."""
    from deploy.client import AnswerFailed, ClusterUnreachable
    from deploy.status_table import fallback_lines

    with contextlib.suppress(AnswerFailed, ClusterUnreachable):
        for line in fallback_lines(await client.status()):
            typer.echo(line, file=out)


def _client_of(plan: ClusterPlan, config: ClusterConfig, api_key: str = "") -> ClusterClient:
    """Of a cluster of our own, whose certificate we know as a file."""
    from deploy.client import ClientTls, ClusterClient

    return ClusterClient(plan.url, api_key, ClientTls(config.router.ssl_certfile, names_host=False))


async def _ask(client: ClusterClient, question: Question, show_timeline: bool) -> None:
    async with client:
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
