"""Frames as UCX tag messages, one for each run of bytes, received straight into their final blocks.

UCX chooses the way among what tells of a dead peer: RDMA where its build has it, else TCP. Large messages are fetched
by the receiver (`RNDV_SCHEME=get_zcopy`): every byte is written by the receiver's own endpoint or by its network card
for it, so that a closed endpoint is a fence.

What the operator sets (`UCX_TLS`, `UCX_NET_DEVICES`, ...) is not touched. PyPI's UCX has no RDMA: build UCX with verbs
and let `ucxx` load that one. Needs `pip install 'tandem-serve[ucx]'`; no GPU, and nothing of CUDA is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cluster.errors import KvTransferFailed
from kv_transfer.transport import FrameSink
from kv_transfer.transports.connection_gate import ConnectionGate
from kv_transfer.transports.granted import GrantedReceiver, GrantedSender, Place

NAME = "ucx"
INSTALL = "pip install 'tandem-serve[ucx]'"
_INTRODUCTION = struct.Struct("<I")  # the connection's part of every tag; the worker's address follows
_INDEX_BITS, _NUMBER_BITS = 16, 24


def is_installed() -> bool:
    return importlib.util.find_spec("ucxx") is not None


def load() -> None:
    """Imports the library."""
    _Library()


def ucx_receiver(host: str, gate: ConnectionGate, sink: FrameSink) -> GrantedReceiver:
    """A decode worker's listening end. Raises OSError when that address is not ours."""
    return GrantedReceiver(NAME, host, gate, sink, lambda _: UcxLanding(host))


def ucx_sender(address: str, nonce: bytes, throttle_bytes_per_s: int = 0) -> GrantedSender:
    """A prefill worker's connection. Raises `KvTransferFailed`."""
    if not is_installed():
        raise KvTransferFailed(f"ucx is not installed here: {INSTALL}", stage="transfer")
    host = address.rpartition(":")[0]
    return GrantedSender(
        NAME, address, nonce, throttle_bytes_per_s, lambda introduction: UcxWriting(introduction, host)
    )


class UcxLanding:
    """Implements `LandingEndpoint`: a UCX worker of its own, and a posted receive for each granted run."""

    is_fence = True

    def __init__(self, host: str) -> None:
        self._ucx = _Library()
        with self._ucx.errors():
            self._context, self._worker = self._ucx.open(host)
        self._key = secrets.randbits(64 - _INDEX_BITS - _NUMBER_BITS)
        self._expected: dict[int, list[Any]] = {}  # requests that are not complete

    def introduction(self) -> bytes:
        return _INTRODUCTION.pack(self._key) + bytes(self._worker.address.tobytes())

    def expect(self, number: int, runs: Sequence[memoryview]) -> None:
        with self._ucx.errors():
            self._expected[number] = [
                self._worker.tag_recv(self._ucx.array(run), self._ucx.tag(self._key, number, index))
                for index, run in enumerate(runs)
            ]

    def landed(self) -> list[int]:
        with self._ucx.errors():
            self._worker.progress()
            return _take_completed(self._expected)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel_inflight_requests()
        self._expected.clear()
        self._worker = self._context = None


class UcxWriting:
    """Implements `WritingEndpoint`: one tag message for each run."""

    def __init__(self, introduction: bytes, host: str) -> None:
        self._ucx = _Library()
        (self._key,) = _INTRODUCTION.unpack(introduction[: _INTRODUCTION.size])
        address = introduction[_INTRODUCTION.size :]
        with self._ucx.errors():
            self._context, self._worker = self._ucx.open(host)
            # With error handling, what was posted ends when the peer is dead. It rules out UCX's own shared memory,
            # which cannot tell, and whose requests would stay for ever.
            self._endpoint = self._ucx.api.UCXEndpoint.create_from_worker_address(
                self._worker, self._ucx.api.UCXAddress.create_from_buffer(address), True
            )
        self._sent: dict[int, list[Any]] = {}  # requests that are not complete

    def write(self, number: int, sources: Sequence[memoryview], places: Sequence[Place]) -> None:
        with self._ucx.errors():
            self._sent[number] = [
                self._endpoint.tag_send(self._ucx.array(run), self._ucx.tag(self._key, number, index))
                for index, run in enumerate(sources)
            ]

    def written(self) -> list[int]:
        with self._ucx.errors():
            self._worker.progress()
            return _take_completed(self._sent)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel_inflight_requests()
        self._sent.clear()
        self._endpoint = self._worker = self._context = None


class _Library:
    """What of ucxx is used here."""

    def __init__(self) -> None:
        # ucxx sets a variable that its own UCX does not know.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        self.api: Any = importlib.import_module("ucxx._lib.libucxx")
        self.array: Any = importlib.import_module("ucxx._lib.arr").Array

    def open(self, host: str) -> tuple[Any, Any]:
        """A context and a worker for one thread."""
        chosen = {"TLS": "^cuda", "RNDV_SCHEME": "get_zcopy"}
        if ipaddress.ip_address(host).is_loopback:
            chosen["NET_DEVICES"] = "lo"  # UCX would listen on every address of the host
        config = {key: value for key, value in chosen.items() if f"UCX_{key}" not in os.environ}
        context = self.api.UCXContext(config, (self.api.Feature.TAG,))
        return context, self.api.UCXWorker(context)

    def tag(self, key: int, number: int, index: int) -> Any:
        return self.api.UCXXTag((key << _NUMBER_BITS | number) << _INDEX_BITS | index)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns the library's errors into OSError, as all ends of a connection have them."""
        try:
            yield
        except self.api.UCXError as error:
            raise ConnectionError(f"{type(error).__name__} {error}") from error


def _take_completed(outstanding: dict[int, list[Any]]) -> list[int]:
    """The numbers whose requests are all complete; they are taken out. Raises the library's error of a failed one."""
    completed = []
    for number, requests in outstanding.items():
        while requests and requests[-1].completed:
            requests.pop().check_error()
        if not requests:
            completed.append(number)
    for number in completed:
        del outstanding[number]
    return completed
