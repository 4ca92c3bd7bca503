"""TLS of the public fronts, HTTP and gRPC: the files an operator gives, checked before anything listens.

    FrontTls.of(settings)      None where no certificate is given
    tls.context()              for HTTP; clients need not show a certificate in the handshake, the guard asks for it
                               (gRPC's own kind of it is `served_certificate`'s)
    client_context(...)        for who asks such a front: `tandem status` and the like

What is checked is a handshake that the files make with themselves, in memory: the key belongs to the certificate, and
the certificate serves a server today. Processes of a cluster talk under other certificates: `rpc_security`.
"""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from cluster.errors import StartupError

# Of OpenSSL's X509_V_ERR_*, which Python's module does not name.
NOT_YET_VALID, HAS_EXPIRED = 9, 10
# The second flight of a handshake ends it; more would be a loop.
MAX_FLIGHTS = 8


class TlsSettings(Protocol):
    """The part of the router's settings, and of a cluster's file, that says how the fronts are secured."""

    @property
    def ssl_certfile(self) -> Path | None: ...
    @property
    def ssl_keyfile(self) -> Path | None: ...
    @property
    def ssl_ca_certs(self) -> Path | None: ...


@dataclass(frozen=True, slots=True)
class FrontTls:
    """PEM files: the server's certificate (with what leads to its authority) and key, and whose clients may ask."""

    certificate: Path
    key: Path
    client_authority: Path | None = None

    @classmethod
    def of(cls, settings: TlsSettings) -> FrontTls | None:
        """Raises `StartupError` for TLS by halves; the files themselves are `check`'s."""
        certificate, key, authority = settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs
        if certificate is None and key is None:
            if authority is not None:
                raise StartupError("ssl_ca_certs asks clients for certificates: give ssl_certfile and ssl_keyfile too")
            return None
        if certificate is None or key is None:
            missing = "ssl_certfile" if certificate is None else "ssl_keyfile"
            raise StartupError(f"TLS needs ssl_certfile and ssl_keyfile together: {missing} is missing")
        return cls(certificate, key, authority)

    def check(self) -> None:
        """Raises `StartupError` naming the file that is missing, broken, of another key, or out of its time."""
        for file in (self.certificate, self.key, self.client_authority):
            if file is not None:
                self.read(file)
        context = self.context()
        try:
            _shake_hands(context, client_context(self.certificate, names_host=False))
        except ssl.SSLCertVerificationError as error:
            self._refuse_certificate(error)
        except ssl.SSLError as error:
            raise StartupError(f"the certificate {self.certificate} serves no TLS: {_reason(error)}") from None

    def context(self) -> ssl.SSLContext:
        """What the HTTP front listens with. Raises `StartupError`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self.load_pair(context)
        if self.client_authority is not None:
            context.verify_mode = ssl.CERT_OPTIONAL  # probes of supervisors show none; `http_guard` asks for it
            try:
                context.load_verify_locations(self.client_authority)
            except ssl.SSLError as error:
                raise StartupError(
                    f"ssl_ca_certs {self.client_authority} holds no certificate: {_reason(error)}"
                ) from None
        return context

    def load_pair(self, context: ssl.SSLContext) -> None:
        """Certificate and key for handshakes from now on. Raises `StartupError`."""
        try:
            # OpenSSL would ask for a password on the terminal, where nobody may sit.
            context.load_cert_chain(self.certificate, self.key, password=self._refuse_password)
        except ssl.SSLError as error:
            self._refuse_pair(error)
        except OSError as error:
            raise StartupError(
                f"cannot read ssl_certfile {self.certificate} or ssl_keyfile {self.key}: {error.strerror}"
            ) from None

    def read(self, file: Path) -> bytes:
        """One of its files. Raises `StartupError` that calls it as the settings do."""
        names = {self.certificate: "ssl_certfile", self.key: "ssl_keyfile"}
        return _read(file, names.get(file, "ssl_ca_certs"))

    def _refuse_password(self) -> NoReturn:
        raise StartupError(f"ssl_keyfile {self.key} is encrypted: give the key without a password, with mode 0600")

    def _refuse_pair(self, error: ssl.SSLError) -> NoReturn:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise StartupError(f"ssl_keyfile {self.key} is not the key of the certificate {self.certificate}") from None
        raise StartupError(
            f"ssl_certfile {self.certificate} and ssl_keyfile {self.key} cannot be used: {_reason(error)}; both are "
            "PEM files"
        ) from None

    def _refuse_certificate(self, error: ssl.SSLCertVerificationError) -> NoReturn:
        if error.verify_code == HAS_EXPIRED:
            raise StartupError(f"the certificate {self.certificate} has expired: renew it") from None
        if error.verify_code == NOT_YET_VALID:
            raise StartupError(
                f"the certificate {self.certificate} is not valid yet: look at this machine's clock "
                f"({datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC)"
            ) from None
        raise StartupError(f"the certificate {self.certificate} serves no server: {error.verify_message}") from None


def client_context(
    authority: Path | None, certificate: Path | None = None, key: Path | None = None, *, names_host: bool = True
) -> ssl.SSLContext:
    """What a client of a front connects with. Raises `StartupError` for files that cannot be used.

    `authority`: who signed the server's certificate, or that very certificate; None: whom this machine trusts.
    `certificate`, `key`: the client's own, where the front asks for one. `names_host` False: whatever the certificate
    calls itself, for who knows it as a file.
    """
    if authority is None:
        context = ssl.create_default_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a certificate that signed itself is its own authority
        _read(authority, "the authority's file")
        try:
            context.load_verify_locations(authority)
        except ssl.SSLError as error:
            raise StartupError(f"{authority} holds no certificate: {_reason(error)}") from None
    context.check_hostname = names_host
    if (certificate is None) is not (key is None):
        raise StartupError("a client's certificate and its key are given together")
    if certificate is not None and key is not None:
        for file in (certificate, key):
            _read(file, "the client's file")
        FrontTls(certificate, key).load_pair(context)
    return context


def _shake_hands(server_side: ssl.SSLContext, client_side: ssl.SSLContext) -> None:
    """One handshake in memory. Raises `ssl.SSLError`."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client_side.wrap_bio(to_client, to_server),
        server_side.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(MAX_FLIGHTS):
        is_done = True
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                is_done = False
        if is_done:
            return


def _read(file: Path, name: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise StartupError(f"cannot read {name} {file}: {error.strerror}") from None


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
