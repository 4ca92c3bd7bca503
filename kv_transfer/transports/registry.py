"""The transports by name: how each is connected, what it needs, and which of them `auto` stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.errors import StartupError
from kv_transfer.transport import Sender
from kv_transfer.transports import nixl, ucx
from kv_transfer.transports.nixl import PoolMemory
from kv_transfer.transports.shm import ShmSender
from kv_transfer.transports.shm_direct import ShmDirectSender
from kv_transfer.transports.tcp import TcpSender

MakeSender = Callable[[str, bytes, int], Sender]

SENDERS: dict[str, MakeSender] = {
    "shm": ShmSender,
    "shm-direct": ShmDirectSender,
    "tcp": TcpSender,
    "ucx": ucx.ucx_sender,
    "nixl": nixl.nixl_sender,
}
# Libraries of their own.
OPTIONAL_TRANSPORTS = {"ucx": ucx, "nixl": nixl}
# These need both workers on one host.
LOCAL_TRANSPORTS = frozenset({"shm", "shm-direct"})
AUTO = "auto"
# What `auto` measures, in the order in which equals are preferred. Not shm-direct: who is granted one block there can
# write into all of them, which an operator has to want.
AUTO_ORDER = ("shm", "ucx", "nixl", "tcp")


def resolve(transports: Sequence[str], *, can_write_into_pool: bool = True) -> tuple[str, ...]:
    """The names that a setting stands for: `auto` is every transport of `AUTO_ORDER` that is installed here.

    Of ucx and nixl, which do not share a process, it is the first. A pool without an address (a GPU's) leaves out nixl.
    """
    if tuple(transports) != (AUTO,):
        return tuple(transports)
    names = [name for name in AUTO_ORDER if name not in OPTIONAL_TRANSPORTS or OPTIONAL_TRANSPORTS[name].is_installed()]
    has_nixl = can_write_into_pool and ucx.NAME not in names
    return tuple(name for name in names if name != nixl.NAME or has_nixl)


def connect(name: str, address: str, nonce: bytes, throttle_bytes_per_s: int, memory: PoolMemory | None) -> Sender:
    """A sender. `memory`: the pool that frames will come from, for a transport that registers it.

    Raises `KvTransferFailed`.
    """
    if name == nixl.NAME:
        return nixl.nixl_sender(address, nonce, throttle_bytes_per_s, memory)
    return SENDERS[name](address, nonce, throttle_bytes_per_s)


def load_transports(transports: Sequence[str]) -> None:
    """Loads the libraries that these need: it takes half a second, which no handshake shall wait for.

    Raises `StartupError` for a transport that is unknown, or whose library is not here, and for ucx beside nixl: each
    brings a UCX library of its own, and a process that used one was aborted by the other.
    """
    if {ucx.NAME, nixl.NAME} <= set(transports):
        raise StartupError("transports ucx and nixl cannot share a process: choose one of them", param="transports")
    for name in transports:
        if name not in SENDERS:
            known = ", ".join(SENDERS)
            raise StartupError(f"transport {name!r} is not known: choose auto, or among {known}", param="transports")
        if name not in OPTIONAL_TRANSPORTS:
            continue
        library = OPTIONAL_TRANSPORTS[name]
        if not library.is_installed():
            raise StartupError(f"transport {name} is not installed: {library.INSTALL}", param="transports")
        library.load()
