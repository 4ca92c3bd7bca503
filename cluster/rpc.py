"""gRPC servers and channels as every process of a cluster makes them: addresses, limits, keepalive, security.

server = build_server(security); add_..._to_server(servicer, server)
target = bind(server, "unix:/run/x/decode-0.sock", security); await server.start()
channel = open_channel(target, security)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from cluster.errors import StartupError
from cluster.rpc_errors import ErrorInterceptor
from cluster.rpc_security import TOKEN_METADATA_KEY, RpcSecurity, TokenInterceptor, require_private_target

# 128k token ids take 0.5 MiB; 20 log-probabilities for each of 8k prompt positions take about 3 MiB.
MAX_MESSAGE_BYTES = 16 * 2**20
# sockaddr_un.sun_path holds 108 bytes with the final zero.
MAX_UNIX_PATH_BYTES = 107

KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

_SHARED_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: an idle stream is normal here
]
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_SHARED_OPTIONS,
    # Our own clients ping twice as rarely, and a client that pings more is not cut off (ENHANCE_YOUR_CALM).
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers on one port would share its connections; a busy port must be an error.
    ("grpc.so_reuseport", 0),
]
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_SHARED_OPTIONS,
    ("grpc.enable_http_proxy", 0),  # a proxy in the environment is not for our own peers
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Each channel has its own connection: a dead one never spoils a later channel to the same address.
    ("grpc.use_local_subchannel_pool", 1),
]


def build_server(security: RpcSecurity) -> grpc.aio.Server:
    """A server on which every method needs the cluster token and every `TandemError` becomes its status."""
    return grpc.aio.server(interceptors=[TokenInterceptor(security.token), ErrorInterceptor()], options=_SERVER_OPTIONS)


def bind(server: grpc.aio.Server, target: str, security: RpcSecurity) -> str:
    """Listens on `unix:/path` or `host:port` and gives the target for clients (port 0 becomes the real one).

    Raises `StartupError` for a busy port, a path that is too long, and an address open to others without TLS.
    """
    require_private_target(target, security.tls)
    if target.startswith("unix:"):
        _check_unix_path(target.removeprefix("unix:"))
    try:
        if security.tls is None:
            port = server.add_insecure_port(target)
        else:
            port = server.add_secure_port(target, security.tls.server_credentials())
    except RuntimeError:
        raise StartupError(f"cannot listen on {target}: in use or not allowed; choose another address") from None
    return target if target.startswith("unix:") else f"{target.rpartition(':')[0]}:{port}"


def open_channel(target: str, security: RpcSecurity) -> grpc.aio.Channel:
    """A lazily connected channel whose every call carries the cluster token. The caller closes it."""
    require_private_target(target, security.tls)
    if security.tls is None:
        channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
    else:
        name = security.tls.server_name
        options = [*_CHANNEL_OPTIONS, *([("grpc.ssl_target_name_override", name)] if name else [])]
        channel = grpc.aio.secure_channel(target, security.tls.channel_credentials(), options=options)
    return _TokenChannel(channel, security.token)


def _check_unix_path(path: str) -> None:
    size = len(path.encode())
    if size > MAX_UNIX_PATH_BYTES:
        raise StartupError(
            f"socket path {path} has {size} bytes, at most {MAX_UNIX_PATH_BYTES}: choose a shorter runtime directory"
        )


class _TokenChannel(grpc.aio.Channel):
    """A channel that adds the token to the metadata of each call.

    grpc.aio's client interceptors would do the same but put a queue and a task in front of every message of a stream.
    """

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._token = (TOKEN_METADATA_KEY, token)

    def _with_token(self, call: Callable[..., Any]) -> Any:
        def start(*arguments: Any, metadata: Any = None, **options: Any) -> Any:
            return call(*arguments, metadata=(*(metadata or ()), self._token), **options)

        return start

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._with_token(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._with_token(self._channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._with_token(self._channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._with_token(self._channel.stream_stream(*arguments, **options))

    async def __aenter__(self) -> _TokenChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()
