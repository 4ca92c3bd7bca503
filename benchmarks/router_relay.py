"""What the router costs: tokens a second that one process relays, and the time it adds to a first token.

    client (this process) ──HTTP, SSE──> router (child) ──Session──> step source (child): no model

The step source answers every request with one token a step, all requests of a step in one message, as a decode worker
does, a step each `--step-ms`. At 0 it goes as fast as the router reads: that is the relay's limit.
`python -m benchmarks.router_relay` prints tokens/s, the router's CPU share and CPU microseconds for each token, and the
time to first token of a request alone. By profile about a third of the router's time is the kernel's `send`: one for
each stream and step, which is the floor of this design. `--words 200` asks for one token behind so many words instead,
as chats with the default model's tokenizer, template and block hashes: CPU microseconds of a whole request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tandem.v1 import common_pb2, handoff_pb2, membership_pb2, worker_pb2, worker_pb2_grpc
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from benchmarks.routing_workloads import single_token_words
from cluster.chat_template import ChatTemplate
from cluster.ended_tasks import end_tasks
from cluster.garbage import settle_objects
from cluster.membership_state import ChangeKind, MembershipChange
from cluster.model_files import DEFAULT_MODEL, resolve_model
from cluster.router_settings import RouterSettings
from cluster.rpc import bind, build_server
from cluster.rpc_security import RpcSecurity
from cluster.token_bytes import BYTE_SPELLING
from cluster.tokenizer import Tokenizer, load_tokenizer
from cluster.vocabulary import Vocabulary
from router.http_server import HttpServer, bind_socket
from router.limits import ServingLimits
from router.router_core import build_core

SECURITY = RpcSecurity("benchmark")
LETTER = 97
MODEL = "relay"
IN_FLIGHT = 64
BLOCK_TOKENS = 16
# A step source computes nothing: on a busy machine too nobody waits for room or is refused for a predicted wait.
NO_TIME = (0.001, 0.0, 0.0)


class StepSource(worker_pb2_grpc.DecodeWorkerServicer):
    """One token a step for every live request."""

    def __init__(self, identity: common_pb2.WorkerIdentity, step_s: float) -> None:
        self._identity = identity
        self._step_s = step_s
        self._known: set[int] = set()  # prefixes of whole blocks: who says otherwise than expected is asked why

    async def Session(self, messages: AsyncIterator[worker_pb2.RouterMessage], context: Any) -> None:  # type: ignore[override]
        await anext(messages)
        hello = worker_pb2.DecodeHello(identity=self._identity, protocol_version=1)
        await context.write(worker_pb2.DecodeMessage(hello=hello))
        live: dict[str, _Live] = {}
        arrived = asyncio.Event()
        reader = asyncio.create_task(self._read(messages, live, arrived))
        try:
            while True:
                if not live:
                    arrived.clear()
                    await arrived.wait()
                await context.write(worker_pb2.DecodeMessage(step=_step(live)))
                await asyncio.sleep(self._step_s)
        finally:
            await end_tasks(reader)

    async def _read(
        self, messages: AsyncIterator[worker_pb2.RouterMessage], live: dict[str, _Live], arrived: asyncio.Event
    ) -> None:
        async for message in messages:
            if message.WhichOneof("message") == "submit":
                submit = message.submit
                live[submit.request_id] = _Live(submit, self._cached_tokens(submit.token_ids))
                arrived.set()
            else:
                live.pop(message.cancel.request_id, None)

    def _cached_tokens(self, token_ids: Sequence[int]) -> int:
        prefixes = {end: hash(tuple(token_ids[:end])) for end in range(BLOCK_TOKENS, len(token_ids), BLOCK_TOKENS)}
        cached = max((end for end, prefix in prefixes.items() if prefix in self._known), default=0)
        self._known.update(prefixes.values())
        return cached


class StepStatus(worker_pb2_grpc.WorkerAdminServicer):
    """Says that it is there to a router that has heard nothing for long, as on a busy machine."""

    async def GetStatus(self, request: Any, context: Any) -> worker_pb2.WorkerStatus:
        return worker_pb2.WorkerStatus()


@dataclass(slots=True)
class _Live:
    """A request that is being answered."""

    submit: worker_pb2.SubmitRequest
    cached_tokens: int
    num_tokens: int = 0


def _step(live: dict[str, _Live]) -> worker_pb2.StepTokens:
    step = worker_pb2.StepTokens(token_counts=[1] * len(live), token_ids=[LETTER] * len(live))
    for request_id, request in list(live.items()):
        step.request_ids.append(request_id)
        request.num_tokens += 1
        is_last = request.num_tokens >= request.submit.sampling.max_tokens
        if request.num_tokens == 1 or is_last:
            step.events.add(
                request_id=request_id,
                fence=request.submit.fence,
                finish_reason=common_pb2.FINISH_REASON_LENGTH if is_last else common_pb2.FINISH_REASON_UNSPECIFIED,
                prompt_tokens=len(request.submit.token_ids),
                cached_tokens=request.cached_tokens,
            )
        if is_last:
            del live[request_id]
    return step


def identities(count: int) -> list[common_pb2.WorkerIdentity]:
    """Of the workers that the step source plays; each has an address of its own: `address_of`."""
    role = common_pb2.WORKER_ROLE_AGGREGATED
    return [common_pb2.WorkerIdentity(worker_id=f"steps-{n}", incarnation=f"one-{n}", role=role) for n in range(count)]


def address_of(worker: common_pb2.WorkerIdentity, address: str) -> str:
    return f"{address}-{worker.worker_id}"


async def serve_steps(address: str, step_s: float, num_workers: int) -> None:
    servers = []  # one that nobody refers to ends
    for worker in identities(num_workers):
        server = build_server(SECURITY)
        servers.append(server)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(StepSource(worker, step_s), server)
        worker_pb2_grpc.add_WorkerAdminServicer_to_server(
            StepStatus(),  # type: ignore[abstract]  # routers ask it nothing else
            server,
        )
        bind(server, address_of(worker, address), SECURITY)
        await server.start()
    await asyncio.Event().wait()


def byte_tokenizer() -> Tokenizer:
    """Its vocabulary is bytes."""
    backend = Backend(models.BPE(vocab={BYTE_SPELLING[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    table = tuple(bytes([byte]) for byte in range(256))
    return Tokenizer(backend, Vocabulary(table, frozenset(), frozenset(), {}, None, False, None, 8192))


async def serve_router(address: str, port: int, num_workers: int, *, reads_words: bool) -> None:
    """Its workers are the step source; `reads_words`: with the default model's tokenizer and template."""
    tokenizer = load_tokenizer(resolve_model(DEFAULT_MODEL)) if reads_words else byte_tokenizer()
    source = tokenizer.vocabulary.chat_template
    template = None if source is None else ChatTemplate(source, tokenizer.vocabulary.special_tokens)
    settings = RouterSettings(
        model="", runtime_dir=Path(), max_concurrent_requests=4096, ttft_slo_ms=0, prefill_prior_ms=NO_TIME
    )
    limits = ServingLimits(MODEL, tokenizer.vocab_size, 8192)
    core = build_core(settings, tokenizer, template, limits, SECURITY, None)
    layout = handoff_pb2.KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_tokens=BLOCK_TOKENS)
    for worker in identities(num_workers):
        record = membership_pb2.WorkerRecord(
            identity=worker, control_address=address_of(worker, address), ready=True, layout=layout
        )
        core.registry.on_membership_change(MembershipChange(ChangeKind.JOINED, record))
    HttpServer(core.http_app, bind_socket("127.0.0.1", port, "--port"), 1.0).start()
    settle_objects()
    core.encoder.learn_words()
    await asyncio.Event().wait()


async def stream(port: int, max_tokens: int) -> float:
    """Seconds to the first event; reads the answer to its end. Raises RuntimeError when it does not end well."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": max_tokens, "stream": True}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    started = time.perf_counter()
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    first_s, tail = 0.0, b""
    while data := await reader.read(65536):
        if not first_s and b"data:" in data:
            first_s = time.perf_counter() - started
        tail = (tail + data)[-64:]
    writer.close()
    if b"[DONE]" not in tail:
        raise RuntimeError(f"the stream ended with {tail!r}")
    return first_s


async def measure(port: int, router_pid: int, streams: int, tokens: int) -> None:
    for _ in range(200):
        try:
            await stream(port, 2)
            break
        except (OSError, RuntimeError):  # not up yet, or its worker is not
            await asyncio.sleep(0.05)
    single_ms = [await stream(port, 1) * 1000 for _ in range(100)]
    process = psutil.Process(router_pid)
    before = process.cpu_times()
    started = time.perf_counter()
    await asyncio.gather(*(stream(port, tokens) for _ in range(streams)))
    wall_s = time.perf_counter() - started
    after = process.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    total = streams * tokens
    print(
        f"{streams} streams x {tokens} tokens: {total / wall_s:,.0f} tokens/s, router CPU {cpu_s / wall_s:.0%}, "
        f"{cpu_s / total * 1e6:.1f} us CPU a token; one request alone: first token p50 "
        f"{statistics.median(single_ms):.2f} ms, p99 {statistics.quantiles(single_ms, n=100)[98]:.2f} ms"
    )


async def measure_requests(port: int, router_pid: int, words: int, count: int) -> None:
    """Chats of one token each on kept connections, `IN_FLIGHT` at a time, with nothing but a template alike."""
    vocabulary = single_token_words(load_tokenizer(resolve_model(DEFAULT_MODEL)))
    chance = random.Random(1)

    def body() -> bytes:
        messages = [{"role": "user", "content": " ".join(chance.choices(vocabulary, k=words))}]
        return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1, "stream": True}).encode()

    bodies = [body() for _ in range(count)]
    for _ in range(200):
        try:
            await _ask_all(port, bodies[:1])
            break
        except (OSError, RuntimeError):
            await asyncio.sleep(0.05)
    await asyncio.gather(*(_ask_all(port, bodies[:20]) for _ in range(IN_FLIGHT)))
    process = psutil.Process(router_pid)
    before = process.cpu_times()
    started = time.perf_counter()
    await asyncio.gather(*(_ask_all(port, bodies[number::IN_FLIGHT]) for number in range(IN_FLIGHT)))
    wall_s = time.perf_counter() - started
    after = process.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    print(
        f"{count} requests of {words} words: {count / wall_s:,.0f}/s, router CPU {cpu_s / wall_s:.0%}, "
        f"{cpu_s / count * 1e6:.0f} us CPU a request ({count / cpu_s:,.0f}/s of CPU time)"
    )


async def _ask_all(port: int, bodies: Sequence[bytes]) -> None:
    """One after the other on one connection. Raises RuntimeError for an answer that does not end well."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    try:
        for body in bodies:
            writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            try:
                answer = await reader.readuntil(b"0\r\n\r\n")  # the last chunk
            except asyncio.IncompleteReadError as error:
                raise RuntimeError(f"the answer ended with {error.partial[-64:]!r}") from None
            if b"[DONE]" not in answer:
                raise RuntimeError(f"the answer ended with {answer[-64:]!r}")
    finally:
        writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", default="measure", choices=("measure", "router", "steps"))
    parser.add_argument("--address", default="")
    parser.add_argument("--port", type=int, default=18_500)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--words", type=int, default=0, help="of a request that is answered with one token")
    parser.add_argument("--requests", type=int, default=4000, help="with --words")
    parser.add_argument("--workers", type=int, default=8, help="that the step source plays, each with its own link")
    arguments = parser.parse_args()
    if arguments.role == "steps":
        asyncio.run(serve_steps(arguments.address, arguments.step_ms / 1000, arguments.workers))
    elif arguments.role == "router":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(
                serve_router(arguments.address, arguments.port, arguments.workers, reads_words=arguments.words > 0)
            )
    else:
        with tempfile.TemporaryDirectory(prefix="tdm-") as directory:
            _measure_with_children(arguments, f"unix:{directory}/steps")


def _measure_with_children(arguments: argparse.Namespace, address: str) -> None:
    command = [sys.executable, "-m", "benchmarks.router_relay"]
    flags = [f"--address={address}", f"--port={arguments.port}", f"--step-ms={arguments.step_ms}"]
    flags += [f"--words={arguments.words}", f"--workers={arguments.workers}"]
    children = [subprocess.Popen([*command, role, *flags], env=dict(os.environ)) for role in ("steps", "router")]
    try:
        router_pid = children[1].pid
        if arguments.words:
            asyncio.run(measure_requests(arguments.port, router_pid, arguments.words, arguments.requests))
        else:
            asyncio.run(measure(arguments.port, router_pid, arguments.streams, arguments.tokens))
    finally:
        for child in children:
            child.kill()
            child.wait()


if __name__ == "__main__":
    main()
