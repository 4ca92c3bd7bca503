"""The certificate that both fronts show: a renewed one is taken while they serve, when its files can be used.

    certificate = ServedCertificate(tls)     the HTTP front listens with `context`, gRPC's with `grpc_credentials()`
    certificate.look()                       every so often: files that changed are checked, and shown from then on

Connections that are open keep what they began with. Which authorities clients' certificates come from is read once.
"""

from __future__ import annotations

import asyncio
import logging
import ssl

import grpc

from cluster.errors import StartupError
from cluster.front_tls import FrontTls

# Certificates are renewed weeks before they expire.
LOOK_INTERVAL_S = 10.0

_log = logging.getLogger(__name__)


class ServedCertificate:
    """Owned by the router process. Raises `StartupError` for files that cannot be used at first."""

    def __init__(self, tls: FrontTls) -> None:
        tls.check()
        self._tls = tls
        self._seen = self._stamps()
        self.context: ssl.SSLContext = tls.context()
        authority = tls.client_authority
        self._authority = None if authority is None else tls.read(authority)
        self._shown = self._given = self._configuration()

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Asks for the certificate at each handshake. Clients' are asked for there too: health checks need one."""
        return grpc.dynamic_ssl_server_credentials(
            self._shown,
            self._renewed_configuration,  # type: ignore[arg-type]  # the stubs know no None
            require_client_authentication=self._authority is not None,
        )

    def look(self) -> None:
        """Takes files that changed. What cannot be used is logged once, and the earlier ones serve on."""
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self._tls.check()
            renewed = self._configuration()
            self._tls.load_pair(self.context)
        except StartupError as error:
            # Certificate and key are two files: between the two writes they do not belong together.
            _log.warning("renewed TLS files are not used", extra={"reason": error.message})
            return
        self._shown = renewed
        _log.info("certificate renewed", extra={"file": str(self._tls.certificate)})

    async def watch(self) -> None:
        """Looks for ever."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await asyncio.to_thread(self.look)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = (self._tls.read(self._tls.key), self._tls.read(self._tls.certificate))
        return grpc.ssl_server_certificate_configuration([pair], self._authority)

    def _renewed_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """None where nothing has changed since the last handshake. Called by gRPC's threads."""
        if self._given is self._shown:
            return None
        self._given = self._shown
        return self._given

    def _stamps(self) -> tuple[tuple[int, int, int], ...]:
        """Which files these are; nothing of one that is not there just now."""
        stamps = []
        for file in (self._tls.certificate, self._tls.key):
            try:
                status = file.stat()
            except OSError:
                stamps.append((0, 0, 0))
            else:
                stamps.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(stamps)
