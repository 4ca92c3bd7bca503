"""A whole router in the test's own event loop, on real sockets, in front of scripted workers."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio

from cluster.front_tls import FrontTls
from cluster.membership_state import ChangeKind, MembershipChange
from cluster.router_settings import RouterSettings
from router.grpc_front import GrpcFront
from router.http_server import HttpServer, bind_socket
from router.limits import ServingLimits
from router.router_core import RouterCore, build_core
from router.served_certificate import ServedCertificate
from router.tenants import ApiKeys
from tests.router.byte_tokenizer import byte_tokenizer, chatml
from tests.router.fronts import Front, OverGrpc, OverHttp
from tests.router.scripted_worker import SECURITY, ScriptedWorker

MODEL = "test-model"


@dataclass
class RunningRouter:
    """A router that serves, and its workers."""

    core: RouterCore
    url: str
    grpc_address: str
    directory: Path
    http: HttpServer
    grpc_front: GrpcFront
    certificate: ServedCertificate | None
    workers: list[ScriptedWorker] = field(default_factory=list)

    async def add_worker(self, worker: ScriptedWorker, *, connects: bool = True) -> ScriptedWorker:
        """Starts it and lets it join; returns when the router can route to it."""
        await worker.start()
        self.workers.append(worker)
        self.announce(worker)
        if connects:
            await self.until(lambda: self.is_routable(worker))
        return worker

    def new_worker(self, worker_id: str, role: str = "decode", incarnation: str = "one") -> ScriptedWorker:
        return ScriptedWorker(f"unix:{self.directory}/{worker_id}", worker_id, f"{worker_id}-{incarnation}", role)

    def announce(self, worker: ScriptedWorker, kind: ChangeKind = ChangeKind.JOINED) -> None:
        self.core.registry.on_membership_change(MembershipChange(kind, worker.record()))

    def is_routable(self, worker: ScriptedWorker) -> bool:
        return any(
            state.incarnation == worker.incarnation and state.worker_id == worker.worker_id and state.is_routable
            for state, _ in self.core.registry.workers
        )

    async def until(self, is_reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Polls with a deadline: for states that nobody announces."""
        async with asyncio.timeout(timeout_s):
            while not is_reached():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def bookings(self) -> list[tuple[int, int, int]]:
        return [
            (state.booked_requests, state.booked_prefill_tokens, state.booked_kv_tokens)
            for state, _ in self.core.registry.workers
        ]

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    async def stop(self) -> None:
        for worker in self.workers:
            await worker.stop()
        await self.http.stop()
        await self.grpc_front.stop(0)
        await self.core.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One event loop for all of these tests: gRPC's poller of a loop that is closed disturbs the next one."""
    for item in items:
        if item.path.parent == Path(__file__).parent and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


StartRouter = Callable[..., Awaitable[RunningRouter]]


@pytest.fixture
def socket_directory() -> Iterator[Path]:
    """Short: a Unix socket's path has 107 bytes at most."""
    directory = Path(tempfile.mkdtemp(prefix="tdm-"))
    yield directory
    shutil.rmtree(directory)


@pytest_asyncio.fixture(loop_scope="session")
async def start_router(socket_directory: Path) -> AsyncIterator[StartRouter]:
    """`await start_router(max_concurrent_requests=1)`: a router without workers; stopped when the test ends."""
    running: list[RunningRouter] = []

    async def start(*, keys: ApiKeys | None = None, **settings: object) -> RunningRouter:
        router = await started(socket_directory, keys, **settings)
        running.append(router)
        return router

    yield start
    for router in running:
        await router.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def router(start_router: StartRouter) -> RunningRouter:
    """A router with one decode and one prefill worker."""
    router = await start_router()
    await router.add_worker(router.new_worker("prefill-0", "prefill"))
    await router.add_worker(router.new_worker("decode-0"))
    return router


@pytest_asyncio.fixture(loop_scope="session")
async def http(router: RunningRouter) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=60) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session", params=["http", "http-stream", "grpc"])
async def front(request: pytest.FixtureRequest) -> AsyncIterator[Front]:
    """`await front.ask(router, prompt=[1, 2], max_tokens=3)`: a test with it runs over each of the public fronts."""
    is_grpc = request.param == "grpc"
    front = OverGrpc() if is_grpc else OverHttp(MODEL, is_streamed=request.param == "http-stream")
    yield front
    await front.close()


async def started(directory: Path, keys: ApiKeys | None = None, **values: object) -> RunningRouter:
    """A router without workers, whose sockets are in this folder; the caller stops it."""
    tokenizer = byte_tokenizer()
    settings = RouterSettings.model_validate({"model": "unused", "runtime_dir": directory, **values})
    limits = ServingLimits(
        model_name=MODEL,
        vocab_size=tokenizer.vocab_size,
        max_model_len=tokenizer.vocabulary.max_model_len,
        max_choices=settings.max_choices,
        aliases=settings.model_aliases,
    )
    core = build_core(settings, tokenizer, chatml(), limits, SECURITY, keys)
    bound = bind_socket("127.0.0.1", 0, "--http-port")
    port = bound.getsockname()[1]
    tls = FrontTls.of(settings)
    certificate = None if tls is None else ServedCertificate(tls)
    context = None if certificate is None else certificate.context
    http = HttpServer(core.http_app, bound, drain_timeout_s=5, tls=context)
    http.start()
    front = GrpcFront(core.grpc_servicer, "127.0.0.1:0", settings.max_body_bytes, certificate=certificate)
    await front.start()
    scheme = "http" if tls is None else "https"
    return RunningRouter(
        core, f"{scheme}://127.0.0.1:{port}", f"127.0.0.1:{front.port}", directory, http, front, certificate
    )
