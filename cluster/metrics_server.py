"""`GET /metrics` of a process that has no HTTP front of its own, on loopback and on its own thread."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server

from cluster.errors import StartupError


class MetricsServer:
    """Owned by the process; `close` ends the thread."""

    def __init__(self, registry: CollectorRegistry, port: int) -> None:
        """Raises `StartupError` when the port is taken."""
        try:
            self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        except OSError as error:
            raise StartupError(
                f"cannot serve metrics on 127.0.0.1:{port} ({error.strerror}): choose another --metrics-port"
            ) from None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
