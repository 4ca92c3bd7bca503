"""What stands in front of every route: who may speak to this server, and what every response carries.

On loopback no key is needed, because a web page that the user visits must not be able to speak to the server either:
Host has to name this machine, Origin (which browsers send) too or be allowed, and bodies have to be JSON, which no HTML
form sends. With keys, every route but the probes needs one; where clients are asked for certificates, all but the
probes need such a one too.
"""

from __future__ import annotations

import re

from cluster.errors import ClientError, TandemError, shown
from router.allowed_origins import AllowedOrigins
from router.asgi_types import AsgiApp, Message, Receive, Scope, Send, header, send_response
from router.http_errors import error_body, error_headers
from router.tenants import DEFAULT_TENANT, ApiKeys

# What supervisors and load balancers ask, which hold no key: whether the process lives, which roles could serve now.
OPEN_PATHS = frozenset({"/livez", "/readyz", "/health"})
_SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_LOOPBACK_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_LOOPBACK_ORIGIN = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)


class Forbidden(ClientError):
    """The request comes from somewhere that may not speak to this server."""

    code = "forbidden"
    http_status = 403


class ClientCertificateRequired(ClientError):
    """The connection came without a certificate of the client's."""

    code = "client_certificate_required"
    http_status = 403


class HttpGuard:
    """Wraps the application. `keys` None: loopback only, checked by Host and Origin."""

    def __init__(
        self, app: AsgiApp, keys: ApiKeys | None, origins: AllowedOrigins, *, asks_certificate: bool = False
    ) -> None:
        """`asks_certificate`: the connection's own, which TLS has verified when there is one."""
        self._asks_certificate = asks_certificate
        self._app = app
        self._keys = keys
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = self._origins.headers(scope)
                message["headers"] = [*message.get("headers", ()), *_SECURITY_HEADERS, *told]
            await send(message)

        if self._origins.is_preflight(scope):
            headers = self._origins.preflight_headers(scope)
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        try:
            self._check(scope)
        except TandemError as error:
            body, headers = error_body(error), error_headers(error)
            await send_response(send_guarded, error.http_status, b"application/json", body, headers)
            return
        await self._app(scope, receive, send_guarded)

    def _check(self, scope: Scope) -> None:
        state = scope.setdefault("state", {})
        state["tenant"] = DEFAULT_TENANT
        state["is_operator"] = self._keys is None  # then only this machine is answered at all
        if self._asks_certificate and not state.get("has_certificate") and scope["path"] not in OPEN_PATHS:
            raise ClientCertificateRequired("this server asks for a client certificate (TLS), and none was shown")
        if self._keys is None:
            _check_loopback(scope, self._origins)
        elif scope["path"] not in OPEN_PATHS:
            tenant = self._keys.tenant_of(_authorization(scope))
            state.update(tenant=tenant, is_operator=tenant in self._keys.operators)


def _authorization(scope: Scope) -> str:
    """Anthropic's clients send the same keys in a header of their own."""
    value = header(scope, b"authorization").decode("latin-1")
    own_key = header(scope, b"x-api-key").decode("latin-1")
    return f"Bearer {own_key}" if own_key and not value else value


def _check_loopback(scope: Scope, origins: AllowedOrigins) -> None:
    host = header(scope, b"host").decode("latin-1")
    if host and not _LOOPBACK_HOST.fullmatch(host):
        raise Forbidden(f"Host is {shown(host)}: without API keys this server answers to localhost only", param="Host")
    origin = header(scope, b"origin").decode("latin-1")
    if origin and not _LOOPBACK_ORIGIN.fullmatch(origin) and not origins.has(origin):
        raise Forbidden(
            f"Origin is {shown(origin)}: other sites may not use this server but router.allowed_origins", param="Origin"
        )
