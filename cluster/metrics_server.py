"""`GET /metrics` of a process that has no HTTP front of its own, on a thread of its own. It asks for no key."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server

from cluster.errors import StartupError


class MetricsServer:
    """Owned by the process; `close` ends the thread."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Raises `StartupError` when the port is taken, or the address is none of this machine's."""
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise StartupError(
                f"cannot serve metrics on {host}:{port} ({error.strerror}): choose others with --metrics-host and "
                "--metrics-port"
            ) from None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
