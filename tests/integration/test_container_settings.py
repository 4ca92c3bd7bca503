"""A cluster as a container runs it: set up by the environment, TLS at both fronts, all logs as JSON on stderr."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tandem.v1 import inference_pb2, inference_pb2_grpc

from cluster.front_tls import client_context
from tests.certificates import Authority, needs_openssl
from tests.integration.conftest import GRPC_LINE, REPOSITORY, STOP_TIMEOUT_S, tandem_command, tandem_environment

pytestmark = [pytest.mark.model, pytest.mark.cluster, needs_openssl]

TIMEOUT_S = 120.0
NUM_CONNECTIONS = 30


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str
    grpc_address: str
    authority: Path
    log: Path

    def tandem(self, *arguments: str) -> str:
        """What a command prints that asks this cluster."""
        environment = {**tandem_environment(), "TANDEM_URL": self.url, "TANDEM_CA_FILE": str(self.authority)}
        done = subprocess.run(
            tandem_command(*arguments),
            env=environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def incarnation(self, worker_id: str) -> str:
        """Of a worker that is ready; empty while it is not."""
        workers = json.loads(self.tandem("status", "--json"))["workers"]
        return next((w["incarnation"] for w in workers if w["worker_id"] == worker_id and w["state"] == "ready"), "")


@pytest.fixture
def served(tmp_path: Path, default_model_path: Path) -> Iterator[Served]:
    authority = Authority.new(tmp_path / "authority")
    front = authority.sign("front")
    config, log = tmp_path / "cluster.yaml", tmp_path / "stderr"
    config.write_text("engine: mock\nrouter: {processes: 2, port: 1}\n")
    settings = {
        "CONFIG": config, "MODEL": default_model_path, "PORT": 0, "GRPC_PORT": 0, "LOGS": "json",
        "SSL_CERTFILE": front.certificate, "SSL_KEYFILE": front.key,
    }  # fmt: skip
    environment = tandem_environment() | {f"TANDEM_{name}": str(value) for name, value in settings.items()}
    with log.open("w") as stderr:
        process = subprocess.Popen(
            tandem_command("serve"), stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, cwd=REPOSITORY
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        url, grpc_match = re.search(r"https://127\.0\.0\.1:\d+", line), GRPC_LINE.search(line)
        assert url is not None and grpc_match is not None, f"{line!r}: {log.read_text()}"  # noqa: PT018
        yield Served(process, url[0], grpc_match[1] or grpc_match[2], authority.certificate, log)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        finally:
            process.kill()
            process.stdout.close()


def test_two_routers_under_tls_answer_a_drain_is_no_crash_and_every_log_line_is_json(served: Served) -> None:
    assert served.tandem("generate", "hello", "--max-tokens", "3").strip()
    for _ in range(NUM_CONNECTIONS):  # the kernel gives each router its share
        answer = httpx.get(f"{served.url}/readyz", verify=client_context(served.authority), timeout=TIMEOUT_S)
        assert answer.status_code == 200
    with grpc.secure_channel(
        served.grpc_address, grpc.ssl_channel_credentials(served.authority.read_bytes())
    ) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text="hello", max_tokens=3)
        tokens = [
            token
            for response in stub.Generate(request, timeout=TIMEOUT_S)
            for choice in response.choices
            for token in choice.token_ids
        ]
    assert len(tokens) == 3
    before = served.incarnation("decode-0")
    served.tandem("drain", "decode-0")
    deadline_s = time.monotonic() + TIMEOUT_S
    while served.incarnation("decode-0") in ("", before):
        assert time.monotonic() < deadline_s, served.log.read_text()
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(STOP_TIMEOUT_S) == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in served.log.read_text().splitlines()]
    assert {"router-0", "router-1", "prefill-0", "decode-0", "redis", "tandem"} <= {line["process"] for line in lines}
    own = [line["message"] for line in lines if line["process"] == "tandem"]
    assert "decode-0 drained and ended, starting it again" in own
    assert not any("unasked" in message or "HTTP Request" in message for message in own)
