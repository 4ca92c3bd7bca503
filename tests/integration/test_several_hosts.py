"""Two loopback addresses stand for two hosts: mutual TLS on every call, KV over tcp, tokens as on one machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.embedded_redis import EmbeddedRedis, prepare_embedded_redis
from cluster.free_port import free_port
from cluster.router_settings import RouterSettings
from cluster.rpc_security import TlsFiles, new_secret, write_secret
from cluster.settings_flags import settings_to_arguments
from cluster.worker_settings import WorkerSettings
from tests.cluster.test_rpc import make_certificates
from tests.integration.conftest import REPOSITORY, tandem_environment
from tests.integration.grpc_client import generate_tokens
from tests.integration.mock_tokens import VOCAB_SIZE, expected_tokens

pytestmark = [pytest.mark.model, pytest.mark.cluster]

PREFILL_HOST, DECODE_HOST = "127.0.0.1", "127.0.0.2"
PROMPT = [(7 * index) % VOCAB_SIZE for index in range(500)]
TIMEOUT_S = 60.0


class Hosts:
    """The processes of both hosts, started by hand as docs/several_hosts.md says."""

    def __init__(self, folder: Path, model: Path, tls: TlsFiles) -> None:
        self.folder = folder
        self._model = model
        self._tls = tls
        self._token_file = folder / "cluster.token"
        self._processes: list[subprocess.Popen[bytes]] = []
        write_secret(self._token_file, new_secret())
        self._redis: EmbeddedRedis = prepare_embedded_redis(folder)
        self._start("redis", *self._redis.command)

    def start_worker(self, role: str, host: str) -> None:
        settings = WorkerSettings(
            worker_id=f"{role}-0",
            role=role,  # type: ignore[arg-type]
            engine="mock",
            model=str(self._model),
            listen=f"{host}:0",
            kv_host=host,
            runtime_dir=self.folder,
            redis_url=self._redis.url,
            redis_password_file=self._redis.password_file,
            cluster_token_file=self._token_file,
            transports=("tcp",),
            tls_authority_file=self._tls.authority,
            tls_certificate_file=self._tls.certificate,
            tls_key_file=self._tls.key,
        )
        self._start(f"{role}-0", sys.executable, "-m", f"{role}_worker", *settings_to_arguments(settings))

    def start_router(self) -> tuple[str, str]:
        """Its URL and its gRPC address."""
        settings = RouterSettings(
            model=str(self._model),
            http_port=free_port(),
            grpc_port=free_port(),
            runtime_dir=self.folder,
            redis_url=self._redis.url,
            redis_password_file=self._redis.password_file,
            cluster_token_file=self._token_file,
            prefill_fallback="deny",
            tls_authority_file=self._tls.authority,
            tls_certificate_file=self._tls.certificate,
            tls_key_file=self._tls.key,
        )
        self._start("router-0", sys.executable, "-m", "router", *settings_to_arguments(settings))
        return f"http://127.0.0.1:{settings.http_port}", f"127.0.0.1:{settings.grpc_port}"

    def logs(self) -> str:
        return "\n".join(path.read_text()[-1500:] for path in self.folder.glob("*.log"))

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.wait(TIMEOUT_S)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=REPOSITORY, env=tandem_environment())
        self._processes.append(process)


@pytest.fixture
def hosts(default_model_path: Path) -> Iterator[Hosts]:
    folder = Path(tempfile.mkdtemp(prefix="tandem-hosts-"))
    hosts = Hosts(folder, default_model_path, make_certificates(folder / "tls", DECODE_HOST))
    yield hosts
    hosts.stop()
    shutil.rmtree(folder)


def test_prefill_and_decode_on_two_addresses_hand_kv_over_under_tls(hosts: Hosts) -> None:
    hosts.start_worker("prefill", PREFILL_HOST)
    hosts.start_worker("decode", DECODE_HOST)
    url, grpc_address = hosts.start_router()
    _until_both_are_routable(url, hosts)
    tokens, last = generate_tokens(grpc_address, PROMPT, 20)
    assert tokens == expected_tokens(PROMPT, 20)
    assert (last.timeline.prefill_worker_id, last.timeline.transport) == ("prefill-0", "tcp")
    assert last.timeline.kv_bytes > 0
    with urllib.request.urlopen(f"{url}/statusz", timeout=30) as answer:  # noqa: S310  our own URL
        status = json.load(answer)
    assert status["block_conservation_error"] == 0


def _until_both_are_routable(url: str, hosts: Hosts) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=30) as answer:  # noqa: S310  our own URL
                if json.load(answer)["pools"] == {"decode": 1, "prefill": 1}:
                    return
        except OSError:
            pass
        time.sleep(0.1)
    pytest.fail(hosts.logs())
