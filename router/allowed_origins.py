"""Cross-origin requests (CORS): which other sites' pages may use this server, and what browsers are told about it.

Browsers ask beforehand, with OPTIONS and without any key; an answer that names the page's origin lets them go on. A
page of any other origin is told nothing, so its browser keeps the answer from it.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from router.asgi_types import Headers, Scope, header

ANY = "*"
_METHODS = b"GET, POST"
# What a page's script may read of an answer beside its body.
_EXPOSED = b"x-request-id, x-client-request-id, retry-after, x-should-retry"
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{0,1024}")
_KEPT_S = b"600"


class AllowedOrigins:
    """The operator's list; empty: no other site."""

    def __init__(self, origins: Collection[str]) -> None:
        """Each as browsers send it, `https://chat.example`, or `*`."""
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    def has(self, origin: str) -> bool:
        return bool(origin) and (ANY in self._origins or origin.lower() in self._origins)

    def is_preflight(self, scope: Scope) -> bool:
        """A browser's question, before the request itself, whether one of these pages may ask."""
        return bool(
            scope["method"] == "OPTIONS"
            and header(scope, b"access-control-request-method")
            and self.has(_origin(scope))
        )

    def preflight_headers(self, scope: Scope) -> Headers:
        """Clients' libraries have headers of their own: what is asked for is allowed."""
        asked = header(scope, b"access-control-request-headers")
        return [
            *self.headers(scope),
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", asked if _HEADER_NAMES.fullmatch(asked) else b""),
            (b"access-control-max-age", _KEPT_S),
        ]

    def headers(self, scope: Scope) -> Headers:
        """What an answer tells the browser; nothing where there is no list."""
        if not self._origins:
            return ()
        vary = (b"vary", b"origin")
        if not self.has(_origin(scope)):
            return (vary,)
        return (
            vary,
            (b"access-control-allow-origin", header(scope, b"origin")),
            (b"access-control-expose-headers", _EXPOSED),
        )


def _origin(scope: Scope) -> str:
    return header(scope, b"origin").decode("latin-1")
