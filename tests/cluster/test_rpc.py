"""Channels and servers of a cluster: the token, addresses, sizes, and errors that arrive as they were raised."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from tandem.v1 import worker_pb2, worker_pb2_grpc

from cluster.errors import (
    EngineFailure,
    KvCapacityExhausted,
    RequestTooLarge,
    ServerOverloaded,
    StartupError,
    WorkerUnavailable,
)
from cluster.free_port import free_port
from cluster.rpc import MAX_MESSAGE_BYTES, bind, build_server, open_channel
from cluster.rpc_errors import from_rpc_error
from cluster.rpc_security import RpcSecurity, TlsFiles, new_secret, write_secret
from cluster.worker_settings import WorkerSettings

SECURITY = RpcSecurity(new_secret())
CALL_TIMEOUT_S = 60.0


class Admin(worker_pb2_grpc.WorkerAdminServicer):
    async def GetStatus(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        return worker_pb2.WorkerStatus(model="m")

    async def Drain(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        raise KvCapacityExhausted("pool is full", param="max_tokens", retry_after_s=1.5, stage="reserve")

    async def ResetPrefixCache(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        raise ZeroDivisionError("a secret of the server")


class Decode(worker_pb2_grpc.DecodeWorkerServicer):
    """Echoes request ids of cancels; fails on the id `fail`."""

    async def Session(self, request_iterator, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        async for message in request_iterator:
            if message.cancel.request_id == "fail":
                raise ServerOverloaded("too much", retry_after_s=2)
            failed = worker_pb2.RequestFailed(request_id=message.cancel.request_id)
            yield worker_pb2.DecodeMessage(failed=failed)


@asynccontextmanager
async def serving(target: str, security: RpcSecurity = SECURITY) -> AsyncIterator[str]:
    server = build_server(SECURITY)
    worker_pb2_grpc.add_WorkerAdminServicer_to_server(Admin(), server)
    worker_pb2_grpc.add_DecodeWorkerServicer_to_server(Decode(), server)
    bound = bind(server, target, security)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


@asynccontextmanager
async def admin_stub(
    target: str, security: RpcSecurity = SECURITY
) -> AsyncIterator[worker_pb2_grpc.WorkerAdminAsyncStub]:
    async with open_channel(target, security) as channel:
        yield worker_pb2_grpc.WorkerAdminStub(channel)


@pytest.mark.parametrize("make_target", [lambda path: f"unix:{path}/a.sock", lambda path: "127.0.0.1:0"])
async def test_call_with_the_token_answers(make_target: Callable[[Path], str], runtime_dir: Path) -> None:
    async with serving(make_target(runtime_dir)) as target, admin_stub(target) as admin:
        assert not target.endswith(":0")
        status = await admin.GetStatus(worker_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
        assert status.model == "m"


async def test_wrong_token_is_refused_on_every_kind_of_call(runtime_dir: Path) -> None:
    async with serving(f"unix:{runtime_dir}/a.sock") as target, open_channel(target, RpcSecurity("x")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await worker_pb2_grpc.WorkerAdminStub(channel).GetStatus(
                worker_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S
            )
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            await echoed_ids(channel, [], "a")
    assert unary.value.code() == stream.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_missing_token_is_refused_even_for_an_unknown_method(runtime_dir: Path) -> None:
    async with serving(f"unix:{runtime_dir}/a.sock") as target, grpc.aio.insecure_channel(target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/tandem.v1.Nothing/AtAll", None, None)(b"", timeout=CALL_TIMEOUT_S)
    assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_tandem_error_crosses_a_unary_call_whole(runtime_dir: Path) -> None:
    async with serving(f"unix:{runtime_dir}/a.sock") as target, admin_stub(target) as admin:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await admin.Drain(worker_pb2.DrainRequest(), timeout=CALL_TIMEOUT_S)
    error = from_rpc_error(raised.value)
    assert isinstance(error, KvCapacityExhausted)
    assert (error.message, error.param, error.retry_after_s, error.stage) == (
        "pool is full",
        "max_tokens",
        1.5,
        "reserve",
    )
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_tandem_error_crosses_a_stream_after_its_first_messages(runtime_dir: Path) -> None:
    async with serving(f"unix:{runtime_dir}/a.sock") as target, open_channel(target, SECURITY) as channel:
        answered: list[str] = []
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await echoed_ids(channel, answered, "a", "fail")
    assert answered == ["a"]
    error = from_rpc_error(raised.value)
    assert isinstance(error, ServerOverloaded)
    assert error.retry_after_s == 2


async def test_unexpected_exception_shows_an_id_and_no_detail(
    runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(f"unix:{runtime_dir}/a.sock") as target, admin_stub(target) as admin:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await admin.ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest(), timeout=CALL_TIMEOUT_S)
    error = from_rpc_error(raised.value)
    assert isinstance(error, EngineFailure)
    assert "secret" not in str(raised.value)
    assert any(getattr(record, "error_id", "-") in error.message for record in caplog.records)


async def test_f38_message_above_the_limit_is_too_large(runtime_dir: Path) -> None:
    async with serving(f"unix:{runtime_dir}/a.sock") as target, open_channel(target, SECURITY) as channel:
        too_large = channel.unary_unary("/tandem.v1.WorkerAdmin/GetStatus", None, None)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await too_large(bytes(MAX_MESSAGE_BYTES + 1), timeout=CALL_TIMEOUT_S)
    assert isinstance(from_rpc_error(raised.value), RequestTooLarge)


async def test_s_b30_random_bytes_do_not_end_a_server(runtime_dir: Path) -> None:
    async with serving("127.0.0.1:0") as target:
        host, _, port = target.rpartition(":")
        for payload in (b"\x80\x04cposix\nsystem\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(range(256))):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(payload)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), CALL_TIMEOUT_S)
            writer.close()
            await writer.wait_closed()
        async with admin_stub(target) as admin:
            assert (await admin.GetStatus(worker_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)).model == "m"


async def test_dead_peer_is_worker_unavailable(runtime_dir: Path) -> None:
    async with admin_stub(f"unix:{runtime_dir}/nobody.sock") as admin:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await admin.GetStatus(worker_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
    assert isinstance(from_rpc_error(raised.value), WorkerUnavailable)


@pytest.mark.parametrize("target", ["0.0.0.0:0", "[::]:0", "10.0.0.1:80", "example.org:80", "unix-abstract:x"])
async def test_s_b1_open_address_without_tls_is_refused(target: str) -> None:
    with pytest.raises(StartupError, match="TLS"):
        bind(build_server(SECURITY), target, SECURITY)
    with pytest.raises(StartupError, match="TLS"):
        open_channel(target, SECURITY)


async def test_busy_port_is_a_startup_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(StartupError, match="in use"):
        bind(build_server(SECURITY), f"127.0.0.1:{taken.getsockname()[1]}", SECURITY)


async def test_socket_path_too_long_for_the_kernel_is_a_startup_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="at most 107"):
        bind(build_server(SECURITY), f"unix:{tmp_path}/{'x' * 108}", SECURITY)


def worker_settings(token_file: Path | None, tls_key_file: Path | None = None) -> WorkerSettings:
    return WorkerSettings(
        worker_id="a",
        model="m",
        listen="unix:/x",
        runtime_dir=Path("/x"),
        cluster_token_file=token_file,
        tls_key_file=tls_key_file,
    )


def test_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_secret(path, "s")
    assert RpcSecurity.from_settings(worker_settings(path)).token == "s"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(StartupError, match="chmod 600"):
        RpcSecurity.from_settings(worker_settings(path))
    with pytest.raises(StartupError, match="--cluster-token-file"):
        RpcSecurity.from_settings(worker_settings(None))


def test_tls_by_halves_is_refused(tmp_path: Path) -> None:
    write_secret(tmp_path / "token", "s")
    with pytest.raises(StartupError, match="together"):
        RpcSecurity.from_settings(worker_settings(tmp_path / "token", tls_key_file=tmp_path / "key"))


async def test_mutual_tls_lets_in_who_has_a_certificate_and_nobody_else(tmp_path: Path) -> None:
    ours = make_certificates(tmp_path / "ours")
    security = RpcSecurity(SECURITY.token, ours)
    async with serving("127.0.0.1:0", security) as target:
        async with admin_stub(target, security) as admin:
            assert (await admin.GetStatus(worker_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)).model == "m"
        stranger = RpcSecurity(SECURITY.token, make_certificates(tmp_path / "theirs"))
        for refused in (stranger, SECURITY):
            async with admin_stub(target, refused) as admin:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await admin.GetStatus(worker_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE


def make_certificates(directory: Path, *addresses: str) -> TlsFiles:
    """An authority of its own and one certificate that it signed, for 127.0.0.1 and `addresses`."""
    directory.mkdir()
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificates of this test and is not installed")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=directory, check=True, capture_output=True, timeout=60)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")
    run("req", *new_key, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=decode")
    (directory / "san").write_text(
        "subjectAltName=" + ",".join(f"IP:{address}" for address in ("127.0.0.1", *addresses))
    )
    run("x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
        "-extfile", "san", "-out", "node.pem")  # fmt: skip
    return TlsFiles(directory / "ca.pem", directory / "node.pem", directory / "node.key")


def test_free_port_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", free_port())):
        pass


async def echoed_ids(channel: grpc.aio.Channel, into: list[str], *request_ids: str) -> None:
    session = worker_pb2_grpc.DecodeWorkerStub(channel).Session(cancels(*request_ids), timeout=CALL_TIMEOUT_S)
    async for message in session:
        into.append(message.failed.request_id)  # noqa: PERF401  what came before a failure counts


async def cancels(*request_ids: str) -> AsyncIterator[worker_pb2.RouterMessage]:
    for request_id in request_ids:
        yield worker_pb2.RouterMessage(cancel=worker_pb2.CancelRequest(request_id=request_id))
