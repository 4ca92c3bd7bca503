"""What is sent to the gRPC port that no client would send: too much, too slowly, no gRPC, other services' methods."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import inference_pb2, inference_pb2_grpc, worker_pb2

from cluster.identity import Tenant
from router import grpc_front
from router.tenants import ApiKeys
from tests.router.conftest import RunningRouter, StartRouter

NOT_GRPC = {
    "pickle": b"\x80\x04cposix\nsystem\n(S'touch canary'\ntR.",
    "HTTP/1.1": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01" + bytes(range(256)),
    "preface and noise": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + random.Random(1).randbytes(4000),
    "frame of 16 MiB declared": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\x00\x00\x00\x00\x00\x01",
    "redis": b"*1\r\n$8\r\nFLUSHALL\r\n",
}


async def _generate(router: RunningRouter, metadata: Sequence[tuple[str, str]] = ()) -> str:
    """The text, or the name of the status."""
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text="abc", max_tokens=2)
        try:
            responses = [one async for one in stub.Generate(request, metadata=tuple(metadata), timeout=60)]
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "".join(choice.text for response in responses for choice in response.choices)


async def _connect(router: RunningRouter) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = router.grpc_address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.fronts("grpc")
@pytest.mark.parametrize(
    "metadata",
    [
        [("x-large", "a" * 17 * 1024)],
        [("x-large", "a" * 64 * 1024 * 1024)],
        [(f"x-{number}", "1") for number in range(101)],
        [("x-many", "1")] * 100_000,
    ],
    ids=["17 KiB", "64 MiB", "101", "100,000"],
)
async def test_s_b17_too_much_metadata_is_resource_exhausted_and_costs_nobody_else(
    metadata: list[tuple[str, str]], router: RunningRouter
) -> None:
    assert await _generate(router, metadata) == "RESOURCE_EXHAUSTED"
    assert not router.workers[-1].submits
    assert len(await _generate(router, [(f"x-{number}", "1") for number in range(90)])) == 2


@pytest.mark.fronts("grpc")
@pytest.mark.parametrize("name", NOT_GRPC)
async def test_s_b30_f35_what_is_no_grpc_is_closed_and_nothing_dies(name: str, router: RunningRouter) -> None:
    reader, writer = await _connect(router)
    writer.write(NOT_GRPC[name])
    if writer.can_write_eof():
        writer.write_eof()
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    assert b"Traceback" not in answer
    assert len(await _generate(router)) == 2


@pytest.mark.fronts("grpc")
async def test_s_b32_f19_connections_that_say_too_little_are_closed_and_disturb_nobody(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert grpc_front.HANDSHAKE_TIMEOUT_MS == 10_000, "as for headers over HTTP"
    monkeypatch.setattr(grpc_front, "HANDSHAKE_TIMEOUT_MS", 1500)
    router = await start_router()
    await router.add_worker(router.new_worker("both", "aggregated"))
    slow = [await _connect(router) for _ in range(100)]
    for number, (_, writer) in enumerate(slow):
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[: number % 24])
    assert len(await _generate(router)) == 2
    async with asyncio.timeout(40):  # gRPC by itself takes a minute
        for reader, writer in slow:
            await reader.read()
            writer.close()
    assert len(await _generate(router)) == 2


@pytest.mark.fronts("grpc")
async def test_s_b38_s_b6_every_method_needs_a_key_but_health(start_router: StartRouter) -> None:
    """Every service that any of our processes has, and names that nearly are one of them."""
    router = await start_router(keys=ApiKeys({hashlib.sha256(b"k").digest(): Tenant("a")}))
    await router.add_worker(router.new_worker("both", "aggregated"))
    files = [inference_pb2.DESCRIPTOR.name, worker_pb2.DESCRIPTOR.name, "tandem/v1/handoff.proto"]
    pool: Any = descriptor_pool.Default()
    services = [service for name in files for service in pool.FindFileByName(name).services_by_name.values()]
    methods = [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]
    assert len(methods) >= 5, methods
    generate = "/tandem.v1.Inference/Generate"
    methods += [f"/{generate}", f"{generate}/", generate.lower(), generate.replace("/G", "%2fG"), f"/x/..{generate}"]
    methods += ["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/", "/livez"]
    request = inference_pb2.GenerateRequest(text="abc", max_tokens=2).SerializeToString()
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        for method in methods:
            call: Any = channel.unary_stream(method, request_serializer=bytes, response_deserializer=bytes)
            for key in ("", "Bearer ", "Bearer wrong", "k"):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    _ = [one async for one in call(request, metadata=(("authorization", key),), timeout=60)]
                expected = ("UNAUTHENTICATED",) if method == generate else ("UNIMPLEMENTED", "UNAUTHENTICATED")
                assert refused.value.code().name in expected, (method, key)
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status in (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert not router.workers[0].submits
    assert len(await _generate(router, [("authorization", "Bearer k")])) == 2
