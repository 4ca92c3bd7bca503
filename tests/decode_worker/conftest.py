"""A decode worker's gRPC service around a deterministic engine, and a router's end of its stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest
from tandem.v1 import common_pb2, worker_pb2, worker_pb2_grpc

from cluster.rpc_errors import ErrorInterceptor
from cluster.sampling_params import SamplingParams
from tests.decode_worker.counting_engine import CountingEngine
from tests.decode_worker.session_node import SessionNode

ANSWER_TIMEOUT_S = 60.0


class RouterClient:
    """The router's end of one Session stream."""

    def __init__(self, target: str, name: str) -> None:
        self.channel = grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stream = worker_pb2_grpc.DecodeWorkerStub(self.channel).Session()  # type: ignore[call-arg]
        self.name = name

    async def hello(self) -> worker_pb2.DecodeHello:
        hello = worker_pb2.RouterHello(router_id=self.name, incarnation="1", protocol_version=1)
        await self.stream.write(worker_pb2.RouterMessage(hello=hello))
        return (await self.read()).hello

    async def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        fence: int = 1,
        deadline_ms: int = 0,
        sampling: common_pb2.SamplingParams | None = None,
    ) -> None:
        submit = worker_pb2.SubmitRequest(
            request_id=request_id,
            token_ids=prompt,
            sampling=sampling or SamplingParams(max_tokens=max_tokens, temperature=0.0).to_proto(),
            fence=fence,
            deadline_ms=deadline_ms,
        )
        await self.stream.write(worker_pb2.RouterMessage(submit=submit))

    async def cancel(self, request_id: str, fence: int = 1) -> None:
        cancel = worker_pb2.CancelRequest(request_id=request_id, fence=fence)
        await self.stream.write(worker_pb2.RouterMessage(cancel=cancel))

    async def read(self) -> worker_pb2.DecodeMessage:
        message = await asyncio.wait_for(self.stream.read(), ANSWER_TIMEOUT_S)
        assert isinstance(message, worker_pb2.DecodeMessage), "the stream ended"
        return message

    async def read_until_end(self, *request_ids: str) -> dict[str, list[int]]:
        """The tokens of each request, once all have a finish reason."""
        tokens: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
        open_ids = set(request_ids)
        while open_ids:
            step = (await self.read()).step
            position = 0
            for request_id, count in zip(step.request_ids, step.token_counts, strict=True):
                tokens[request_id] += step.token_ids[position : position + count]
                position += count
            for event in step.events:
                if event.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED:
                    open_ids.discard(event.request_id)
        return tokens

    async def read_until_broken(self) -> None:
        while True:
            await self.read()

    async def close(self) -> None:
        self.stream.cancel()
        await self.channel.close(None)


@pytest.fixture
async def node() -> AsyncIterator[SessionNode]:
    node = SessionNode(CountingEngine())
    yield node
    await node.close()


@pytest.fixture
async def target(node: SessionNode, tmp_path: Path) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    worker_pb2_grpc.add_DecodeWorkerServicer_to_server(node.service, server)
    address = f"unix:{tmp_path}/decode.sock"
    server.add_insecure_port(address)
    await server.start()
    yield address
    await server.stop(0)


@pytest.fixture
async def router(target: str) -> AsyncIterator[RouterClient]:
    client = RouterClient(target, "router-0")
    await client.hello()
    yield client
    await client.close()
