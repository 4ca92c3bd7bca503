"""Who may talk to whom inside a cluster: one random token on every call, TLS where bytes leave the machine.

The token file is made by the launcher (mode 0600) and read by every process. Loopback and Unix sockets need no TLS;
anything else does, with certificates checked on both sides.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio

from cluster.errors import StartupError

TOKEN_METADATA_KEY = "tandem-cluster-token"  # noqa: S105  the header's name
TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for mutual TLS: the cluster's authority, and this process's certificate and key."""

    authority: Path
    certificate: Path
    key: Path
    # What peers' certificates must name instead of the address they are dialled at; empty: the address.
    server_name: str = ""

    def server_credentials(self) -> grpc.ServerCredentials:
        pair = (_read(self.key), _read(self.certificate))
        return grpc.ssl_server_credentials([pair], root_certificates=_read(self.authority), require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(_read(self.authority), _read(self.key), _read(self.certificate))


class SecuritySettings(Protocol):
    """The part of a process's settings that says how it is secured: WorkerSettings and RouterSettings have it."""

    @property
    def cluster_token_file(self) -> Path | None: ...
    @property
    def tls_authority_file(self) -> Path | None: ...
    @property
    def tls_certificate_file(self) -> Path | None: ...
    @property
    def tls_key_file(self) -> Path | None: ...
    @property
    def tls_server_name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class RpcSecurity:
    """What a process shows to its peers and asks of them."""

    token: str
    tls: TlsFiles | None = None

    @classmethod
    def from_settings(cls, settings: SecuritySettings) -> RpcSecurity:
        """Raises `StartupError` for a token file that is missing, empty or open to others, and for TLS by halves."""
        if settings.cluster_token_file is None:
            raise StartupError("no cluster token: give --cluster-token-file (`tandem serve` makes one)")
        files = (settings.tls_authority_file, settings.tls_certificate_file, settings.tls_key_file)
        given = [file for file in files if file is not None]
        if given and len(given) < len(files):
            raise StartupError("TLS needs --tls-authority-file, --tls-certificate-file and --tls-key-file together")
        token = read_secret(settings.cluster_token_file, "cluster token")
        if not given:
            return cls(token)
        authority, certificate, key = given
        return cls(token, TlsFiles(authority, certificate, key, settings.tls_server_name))


def write_secret(path: Path, secret: str) -> None:
    """A new file with mode 0600; an older one is replaced whole."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.touch(mode=0o600, exist_ok=False)
    temporary.write_text(secret + "\n")
    temporary.replace(path)


def read_secret(path: Path, what: str) -> str:
    """The secret in the file. Raises `StartupError` when it is missing, empty, or readable by others."""
    try:
        mode = path.stat().st_mode
        secret = path.read_text().strip()
    except OSError as error:
        raise StartupError(f"cannot read the {what} file {path}: {error.strerror}") from None
    if mode & 0o077:
        raise StartupError(f"the {what} file {path} is open to other users: run `chmod 600 {path}`")
    if not secret:
        raise StartupError(f"the {what} file {path} is empty")
    return secret


def kept_secret(path: Path, what: str) -> str:
    """The secret that the file has, or a new one that is written there. Raises `StartupError` as `read_secret` does."""
    if not path.exists():
        write_secret(path, new_secret())
    return read_secret(path, what)


def new_secret() -> str:
    return secrets.token_hex(TOKEN_BYTES)


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Refuses every call, of whatever method, whose metadata lacks the cluster token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        for key, value in handler_call_details.invocation_metadata or ():
            if key == TOKEN_METADATA_KEY and hmac.compare_digest(_as_bytes(value), self._token):
                return await continuation(handler_call_details)
        # On the wire all four kinds of call look alike; this kind answers without waiting for a message.
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "cluster token missing or wrong")


def require_private_target(target: str, tls: TlsFiles | None) -> None:
    """Raises `StartupError` for an address that others can reach, unless TLS protects it."""
    if target.startswith("unix:") or tls is not None or is_loopback(target.rpartition(":")[0].strip("[]")):
        return
    raise StartupError(
        f"{target} can be reached from other machines and has no TLS: "
        "listen on 127.0.0.1 or unix:/path, or give certificates"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
