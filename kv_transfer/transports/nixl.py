"""Frames as one-sided NIXL writes into the receiver's registered pool, each with a notification.

Each connection has an agent on both sides, so that its end is the end of what it could write. No order is relied on: a
notification carries the number of its grant. A handle is released only once its write is done. NIXL's own progress
thread would keep a core busy: both sides poll, and only while something is outstanding.

What an agent has registered never overlaps: NIXL looks up the last region that begins before an address and no other,
so that one within the pool would hide the rest of it (`NIXL_ERR_NOT_FOUND`).

Needs `pip install --no-deps nixl-cu12` (with its dependencies it would replace torch by a CUDA build); no GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import logging
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cluster.byte_runs import address_of, addresses_of, sizes_of
from cluster.errors import KvTransferFailed
from kv_transfer.transport import FrameSink
from kv_transfer.transports.connection_gate import ConnectionGate
from kv_transfer.transports.granted import GrantedReceiver, GrantedSender, Place
from kv_transfer.transports.probing_sink import PROBE_BYTES

NAME = "nixl"
INSTALL = "pip install --no-deps 'nixl-cu12>=1.0'"
MODULES = ("nixl", "nixl_cu12", "nixl_cu13")
BACKEND = "UCX"
# What is not in the pool goes through buffers of at least this size: that of the largest usual frame.
STAGING_BYTES = PROBE_BYTES
_NUMBER = struct.Struct("<I")
_FAILED, _DONE = "ERR", "DONE"

Descriptors: TypeAlias = npt.NDArray[np.uint64]


class PoolMemory(Protocol):
    """A pool's bytes, to be registered once."""

    size_bytes: int

    @property
    def address(self) -> int: ...


def is_installed() -> bool:
    return _module_name() is not None


def load() -> None:
    """Imports the library and lets it find its plugins, by way of an agent that is not used."""
    _open_agent("127.0.0.1")


def nixl_receiver(host: str, gate: ConnectionGate, sink: FrameSink, memory: PoolMemory) -> GrantedReceiver:
    """A decode worker's listening end; frames land in `memory`. Raises OSError when that address is not ours."""
    return GrantedReceiver(NAME, host, gate, sink, lambda scratch: NixlLanding(host, memory, scratch))


def nixl_sender(
    address: str, nonce: bytes, throttle_bytes_per_s: int = 0, memory: PoolMemory | None = None
) -> GrantedSender:
    """A prefill worker's connection. What is sent from outside `memory` is copied into registered memory first.

    Raises `KvTransferFailed`.
    """
    if not is_installed():
        raise KvTransferFailed(f"nixl is not installed here: {INSTALL}", stage="transfer")
    host = address.rpartition(":")[0]
    return GrantedSender(
        NAME, address, nonce, throttle_bytes_per_s, lambda introduction: NixlWriting(introduction, host, memory)
    )


class NixlLanding:
    """Implements `LandingEndpoint`. Not a fence: on one host the sender's process writes into ours by itself."""

    is_fence = False

    def __init__(self, host: str, memory: PoolMemory, scratch: memoryview) -> None:
        regions = [(memory.address, memory.size_bytes, 0, ""), (address_of(scratch), scratch.nbytes, 0, "")]
        with _errors():
            self._agent = _open_agent(host)
            self._registered = self._agent.register_memory(regions, "DRAM")

    def introduction(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def expect(self, number: int, runs: Sequence[memoryview]) -> None:
        """The pool is registered: nothing to do."""

    def landed(self) -> list[int]:
        with _errors():
            arrived = self._agent.get_new_notifs()
        return [
            _NUMBER.unpack(message)[0]
            for messages in arrived.values()
            for message in messages
            if len(message) == _NUMBER.size
        ]

    def close(self) -> None:
        if self._agent is not None:
            with suppress(OSError), _errors():
                self._agent.deregister_memory(self._registered)
        self._agent = self._registered = None


class NixlWriting:
    """Implements `WritingEndpoint`."""

    def __init__(self, introduction: bytes, host: str, memory: PoolMemory | None) -> None:
        with _errors():
            self._agent = _open_agent(host)
            self._remote = self._agent.add_remote_agent(introduction)
            self._staging = _Staging(self._agent)
            self._pool = (memory.address, memory.address + memory.size_bytes) if memory is not None else (0, 0)
            if memory is not None:
                self._agent.register_memory([(memory.address, memory.size_bytes, 0, "")], "DRAM")
        self._writes: dict[int, tuple[Any, memoryview | None]] = {}  # handle; what was staged for it

    def write(self, number: int, sources: Sequence[memoryview], places: Sequence[Place]) -> None:
        with _errors():
            here, staged = self._descriptors(sources)
            there = np.array([(place.address, place.num_bytes, 0) for place in places], np.uint64)
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(here, "DRAM"),
                self._agent.get_xfer_descs(there, "DRAM"),
                self._remote,
                _NUMBER.pack(number),
            )
            self._writes[number] = handle, staged
            if self._agent.transfer(handle) == _FAILED:
                raise ConnectionError("a write was not taken")

    def written(self) -> list[int]:
        done = []
        with _errors():
            for number, (handle, staged) in list(self._writes.items()):
                state = self._agent.check_xfer_state(handle)
                if state == _FAILED:
                    raise ConnectionError("a write failed")
                if state == _DONE:
                    handle.release()
                    if staged is not None:
                        self._staging.give_back(staged)
                    del self._writes[number]
                    done.append(number)
        return done

    def close(self) -> None:
        """Destroys the agent, and with it whatever it has not finished."""
        if self._agent is not None:
            with suppress(OSError), _errors():
                self._agent.remove_remote_agent(self._remote)
            self._staging.close()
        self._writes.clear()
        self._agent = None

    def _descriptors(self, sources: Sequence[memoryview]) -> tuple[Descriptors, memoryview | None]:
        """Address, bytes and device of each run, and the buffer that now holds those from outside the pool."""
        starts, sizes = addresses_of(sources), sizes_of(sources)
        outside = np.flatnonzero((starts < self._pool[0]) | (starts + sizes > self._pool[1])).tolist()
        staged = None
        if outside:
            staged = self._staging.take(int(sizes[outside].sum()))
            ends = np.cumsum(sizes[outside]).tolist()
            for index, start, end in zip(outside, (0, *ends[:-1]), ends, strict=True):
                staged[start:end] = sources[index].cast("B")
            starts[outside] = address_of(staged) + np.array([0, *ends[:-1]])
        return np.stack((starts, sizes, np.zeros_like(starts)), axis=1).astype(np.uint64), staged


class _Staging:
    """Registered memory for what is sent from outside the pool: one buffer for each write, as many as are outstanding
    at once. They stay registered, for a registration costs more than a copy."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._free: list[memoryview] = []

    def take(self, num_bytes: int) -> memoryview:
        """A buffer of at least so many bytes; give it back once the write is done. Sizes double: frames that grow
        bit by bit do not leave a buffer each."""
        for index, buffer in enumerate(self._free):
            if buffer.nbytes >= num_bytes:
                return self._free.pop(index)
        buffer = memoryview(bytearray(max(STAGING_BYTES, 1 << (num_bytes - 1).bit_length())))
        self._agent.register_memory([(address_of(buffer), buffer.nbytes, 0, "")], "DRAM")
        return buffer

    def give_back(self, buffer: memoryview) -> None:
        self._free.append(buffer)

    def close(self) -> None:
        self._free.clear()
        self._agent = None


def _module_name() -> str | None:
    return next((name for name in MODULES if importlib.util.find_spec(name) is not None), None)


def _open_agent(host: str) -> Any:
    """An agent with the UCX backend, used by one thread."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    name = _module_name()
    if name is None:
        raise ConnectionError(f"nixl is not installed here: {INSTALL}")
    module = importlib.import_module(name)
    logging.getLogger("nixl").setLevel(logging.WARNING)
    config = module.nixl_agent_config(enable_prog_thread=False, backends=[])
    agent = module.nixl_agent(f"tandem-{secrets.token_hex(8)}", config)
    is_private = ipaddress.ip_address(host).is_loopback and "UCX_NET_DEVICES" not in os.environ
    agent.create_backend(BACKEND, {"ucx_devices": "lo"} if is_private else {})
    return agent


@contextmanager
def _errors() -> Iterator[None]:
    """Turns the library's errors into OSError, as all ends of a connection have them."""
    try:
        yield
    except Exception as error:
        if not type(error).__name__.startswith("nixl"):  # they have no base of their own
            raise
        raise ConnectionError(f"{type(error).__name__} {error}") from error
