"""A prefill and a decode worker in the test's own process: all of both but processes and gRPC, and KV that is checked.

    ask ──> SessionService ──> RequestFlow ──LocalStream, KV link──> HandoffService ──> PrefillFlow

The engines are mock engines that write the oracle's KV. Thousands of handoffs take seconds, and a test may act at an
exact moment of one: `at` says which.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from tandem.v1 import common_pb2, worker_pb2

from cluster.errors import TandemError
from cluster.fallbacks import Fallbacks
from cluster.identity import new_incarnation
from cluster.sampling_params import SamplingParams
from cluster.worker_process import ROLES, WorkerContext
from cluster.worker_settings import WorkerSettings
from decode_worker.decode_node import DecodeNode
from decode_worker.prompt_landing import PromptLanding
from decode_worker.router_session import RouterSession
from engine.mock_worker import open_mock_engine
from engine.pages_ahead import PagesAhead
from engine.worker_engine import WorkerEngine
from kv_transfer.protocol_limits import ProtocolLimits
from prefill_worker import handoff_service
from prefill_worker.handoff_service import HandoffService
from prefill_worker.prefill_node import PrefillNode
from tests.integration.mock_tokens import VOCAB_SIZE
from tests.integration.oracle_worker import with_oracle, wrong_path
from tests.integration.worker_processes import SECURITY, Answer

BACK_TIMEOUT_S = 60.0
POLL_S = 0.002
# Next to nothing: what is counted here are handoffs.
PREFILL_MS, DECODE_MS = (0.1, 0.005, 0.0), (0.05, 0.001, 0.0)

_CONFIG = {
    "model_type": "llama", "hidden_act": "silu", "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024,
}  # fmt: skip

# A machine that others use stands still for seconds, and both workers with it.
PATIENT = ProtocolLimits(*[BACK_TIMEOUT_S] * 5)  # for progress a prefill worker needs no patience

# Of one handoff, in order: the prefill worker's engine begins a step; is done, and nobody has heard of it yet; its flow
# has; its commit is here, unread; it was read.
Moment = Literal["computing", "computed", "told", "committed", "landed"]
MOMENTS: tuple[Moment, ...] = ("computing", "computed", "told", "committed", "landed")


class RequestsHeard(PagesAhead):
    """Of no memory: keeps what it is told."""

    def __init__(self) -> None:
        self.told = [False]  # as it is at the start

    def requests_under_way(self, are_any: bool) -> None:
        self.told.append(are_any)

    def close(self) -> None:
        """There is nothing to end."""


class LocalChannel:
    """What a stub and its user need of `grpc.aio.Channel`, for the one method of one servicer in this process."""

    def __init__(self, service: HandoffService) -> None:
        self._service = service

    async def __aenter__(self) -> LocalChannel:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Its stream ends by itself."""

    def stream_stream(self, *_: Any, **__: Any) -> Callable[[], LocalStream]:
        return lambda: LocalStream(self._service)


class LocalStream:
    """Both ends of one call of `Handoff`: messages are passed on as they are."""

    def __init__(self, service: HandoffService) -> None:
        self._to_service: asyncio.Queue[Any] = asyncio.Queue()
        self._to_client: asyncio.Queue[Any] = asyncio.Queue()
        self._handler = asyncio.create_task(self._serve(service))

    async def write(self, message: Any) -> None:
        self._to_service.put_nowait(message)

    async def read(self) -> Any:
        return await self._to_client.get()

    def cancel(self) -> None:
        self._handler.cancel()

    async def _serve(self, service: HandoffService) -> None:
        class Context:
            write = self._to_client.put

        try:
            with suppress(TandemError):  # what gRPC's interceptor makes a status of
                await service.Handoff(self._sent(), Context)  # type: ignore[arg-type]
        finally:
            self._to_client.put_nowait(None)  # the end of the stream

    async def _sent(self) -> AsyncIterator[Any]:
        while True:
            yield await self._to_service.get()


class Pair:
    """Both nodes, and a router's session with the decode worker."""

    def __init__(self, folder: Path, transport: str, num_blocks: int) -> None:
        self.folder = folder
        self._model = folder / "model"
        self._model.mkdir()
        (self._model / "config.json").write_text(json.dumps(_CONFIG))
        self.prefill_parts, prefill_context = self._open("prefill", transport, num_blocks)
        self.decode_parts, decode_context = self._open("decode", transport, num_blocks)
        self.prefill = PrefillNode(prefill_context, self.prefill_parts, Fallbacks())
        self.decode = DecodeNode(decode_context, self.decode_parts, Fallbacks())
        self.session = RouterSession("router-0", self.decode.live, self.decode.load_report)
        self.at: dict[Moment, Callable[[], None]] = {}
        landings = self.decode._landings
        landings._resources = replace(landings._resources, limits=PATIENT)
        here: Any = LocalChannel(self.prefill._service)
        peers = self.decode._peers
        peers._resources = replace(peers._resources, open_channel=lambda _: here)
        self._answers: dict[str, Answer] = {}
        self._ended: dict[str, asyncio.Event] = {}

    async def start(self) -> None:
        self._watch_moments()
        self.prefill.start()
        self.decode.start()
        self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        self.session.outbox.close()
        await self._reading
        await self.decode.close()
        await self.prefill.close()

    async def ask(self, request_id: str, prompt: Sequence[int], num_tokens: int, deadline_ms: int = 0) -> Answer:
        """The whole answer, or how it ended."""
        answer, ended = self._answers[request_id], self._ended[request_id] = Answer(), asyncio.Event()
        submit = worker_pb2.SubmitRequest(
            request_id=request_id,
            token_ids=prompt,
            sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True).to_proto(),
            prefill=[worker_pb2.PrefillPlacement(worker_id="prefill", control_address="here")],
            fence=1,
            deadline_ms=deadline_ms,
        )
        self.decode._sessions._submit(submit, self.session)
        async with asyncio.timeout(BACK_TIMEOUT_S):
            await ended.wait()
        del self._answers[request_id], self._ended[request_id]
        return answer

    def cancel(self, request_id: str) -> None:
        cancel = worker_pb2.CancelRequest(request_id=request_id, fence=1)
        self.decode._sessions._cancel(cancel, self.session)

    def told_of_requests(self) -> tuple[list[bool], list[bool]]:
        """What the prefill and the decode worker have said to whoever shall make way while a prompt is under way."""
        in_prefill, in_decode = self.prefill_parts.pages_ahead, self.decode_parts.pages_ahead
        assert isinstance(in_prefill, RequestsHeard)
        assert isinstance(in_decode, RequestsHeard)
        return in_prefill.told, in_decode.told

    async def all_is_back(self) -> None:
        """Nothing is live on either side, every block is free or cached, and no landed block was wrong."""
        deadline_s = time.monotonic() + BACK_TIMEOUT_S
        while not self._is_idle():
            assert time.monotonic() < deadline_s, (self.prefill.status(), self.decode.status())
            await asyncio.sleep(POLL_S)
        for parts, name in ((self.prefill_parts, "prefill"), (self.decode_parts, "decode")):
            assert parts.pool.census().conservation_error == 0
            wrong = wrong_path(self.folder, name)
            assert not wrong.exists(), wrong.read_text()

    def _is_idle(self) -> bool:
        return all(
            node.status().active_transfers == 0 and census.owned == 0 and census.quarantined == 0
            for node, census in (
                (self.prefill, self.prefill_parts.pool.census()),
                (self.decode, self.decode_parts.pool.census()),
            )
        )

    def _open(
        self, role: Literal["prefill", "decode"], transport: str, num_blocks: int
    ) -> tuple[WorkerEngine, WorkerContext]:
        settings = WorkerSettings(
            worker_id=role, role=role, model=str(self._model), engine="mock", runtime_dir=self.folder,
            listen=f"unix:{self.folder}/{role}.sock", cluster_token_file=self.folder / "token",
            num_kv_blocks=num_blocks, transports=(transport,),
            mock_prefill_ms=PREFILL_MS, mock_decode_ms=DECODE_MS,
        )  # fmt: skip
        identity = common_pb2.WorkerIdentity(worker_id=role, incarnation=new_incarnation(), role=ROLES[role])
        context = WorkerContext(settings, identity, SECURITY, None, None)
        parts = replace(open_mock_engine(context), pages_ahead=RequestsHeard())
        with_oracle(context, parts)
        return parts, context

    # --- moments ------------------------------------------------------------------------------------------------------

    def _watch_moments(self) -> None:
        loop = asyncio.get_running_loop()
        executor, deliver = self.prefill_parts.engine._executor, self.prefill._deliver
        execute, open_landing = executor.execute, self.decode._landings.open

        def executed(chunks: Any, layer_done: Any) -> Any:
            loop.call_soon_threadsafe(self._reach, "computing")
            return execute(chunks, layer_done)

        def delivered(outputs: Any) -> None:
            self._reach("computed")
            deliver(outputs)
            self._reach("told")

        def opened(request: Any, timeline: Any) -> PromptLanding:
            landing = open_landing(request, timeline)
            on_message = landing.on_message

            def heard(message: Any) -> None:
                is_commit = message.WhichOneof("message") == "commit"
                if is_commit:
                    self._reach("committed")
                on_message(message)
                if is_commit:
                    self._reach("landed")

            landing.on_message = heard  # type: ignore[method-assign]
            return landing

        executor.execute = executed  # type: ignore[method-assign]
        self.prefill._deliver = delivered  # type: ignore[method-assign]
        self.decode._landings.open = opened  # type: ignore[method-assign]

    def _reach(self, moment: Moment) -> None:
        act = self.at.get(moment)
        if act is not None:
            act()

    # --- answers ------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while (message := await self.session.outbox.get()) is not None:
            if message.HasField("failed"):
                self._answers[message.failed.request_id].failure = message.failed.failure
                self._ended[message.failed.request_id].set()
            position = 0
            for request_id, count in zip(message.step.request_ids, message.step.token_counts, strict=True):
                self._answers[request_id].token_ids += message.step.token_ids[position : position + count]
                position += count
            for event in message.step.events:
                if event.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED:
                    self._answers[event.request_id].last = event
                    self._ended[event.request_id].set()


@asynccontextmanager
async def running_pair(folder: Path, transport: str, num_blocks: int) -> AsyncIterator[Pair]:
    with (
        patch.object(handoff_service, "MAX_SILENCE_S", BACK_TIMEOUT_S),
        patch.object(handoff_service, "MAX_IDLE_SILENCE_S", BACK_TIMEOUT_S),
    ):
        pair = Pair(folder, transport, num_blocks)
        await pair.start()
        try:
            yield pair
        finally:
            await pair.close()
