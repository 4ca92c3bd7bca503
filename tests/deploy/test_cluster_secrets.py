"""Secrets of a cluster on several machines: made once, for this user alone, checked before anything starts."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import grpc.aio
import pytest
from tandem.v1 import worker_pb2

from cluster.errors import StartupError
from cluster.rpc_security import RpcSecurity, TlsFiles
from deploy.cluster_secrets import ClusterSecrets, create_secrets
from deploy.node_addresses import ADDRESS, HOST, MODEL, RUNTIME_DIR, NodeAddresses, command_on_node, free_target
from tests.cluster.test_rpc import CALL_TIMEOUT_S, SECURITY, admin_stub, serving

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> ClusterSecrets:
    return create_secrets(tmp_path_factory.mktemp("secrets") / "made")


def test_every_file_is_of_this_user_alone_and_the_authoritys_key_is_gone(secrets: ClusterSecrets) -> None:
    names = {"cluster.token", "redis.password", "authority.pem", "node.pem", "node.key"}
    assert {path.name for path in secrets.directory.iterdir()} == names
    for path in (secrets.directory, *secrets.directory.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_secrets_are_never_overwritten(secrets: ClusterSecrets) -> None:
    before = secrets.token_file.read_text()
    with pytest.raises(StartupError, match="never overwritten"):
        create_secrets(secrets.directory)
    assert secrets.token_file.read_text() == before


async def test_one_certificate_serves_any_address_for_those_who_ask_for_its_name(secrets: ClusterSecrets) -> None:
    security = RpcSecurity(SECURITY.token, secrets.tls)
    by_address = RpcSecurity(SECURITY.token, TlsFiles(secrets.tls.authority, secrets.tls.certificate, secrets.tls.key))
    async with serving("127.0.0.1:0", security) as target:
        async with admin_stub(target, security) as admin:
            assert (await admin.GetStatus(worker_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)).model == "m"
        async with admin_stub(target, by_address) as admin:
            with pytest.raises(grpc.aio.AioRpcError, match=r"(?i)verif|peer|handshake|connect"):
                await admin.GetStatus(worker_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)


@pytest.mark.parametrize("name", ["cluster.token", "node.key"])
def test_a_missing_or_open_file_is_named(secrets: ClusterSecrets, tmp_path: Path, name: str) -> None:
    copied = ClusterSecrets(Path(shutil.copytree(secrets.directory, tmp_path / "copy")))
    copied.check()
    (copied.directory / name).chmod(0o644)
    with pytest.raises(StartupError, match=f"{name} is open to other users"):
        copied.check()
    (copied.directory / name).unlink()
    with pytest.raises(StartupError, match=f"no .*{name}: `tandem secrets create"):
        copied.check()


def test_a_node_fills_in_its_own_address_directory_and_model() -> None:
    command = ["python", f"--listen={ADDRESS}", f"--kv-host={HOST}", f"--runtime-dir={RUNTIME_DIR}", f"--model={MODEL}"]
    filled = command_on_node(command, "127.0.0.2:7001", Path("/run/c-1"), Path("/models/m.gguf"))
    assert filled == [
        "python", "--listen=127.0.0.2:7001", "--kv-host=127.0.0.2", "--runtime-dir=/run/c-1", "--model=/models/m.gguf",
    ]  # fmt: skip


def test_a_workers_target_is_the_one_of_its_last_start() -> None:
    nodes = NodeAddresses()
    assert nodes.target("decode-0") is None
    nodes.assign("decode-0", "127.0.0.2:1")
    nodes.assign("decode-0", "127.0.0.3:2")
    assert nodes.target("decode-0") == "127.0.0.3:2"
    assert free_target("127.0.0.2").startswith("127.0.0.2:")
