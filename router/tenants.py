"""Who asks: API keys, and the scope in which a tenant's KV blocks may be shared.

    key file      one line each: name and SHA-256 of the key (`tandem key create` writes them), then what it may take:
                  requests_per_s=5 tokens_per_s=20000 max_concurrent=8 weight=2 critical; `admin`: it may also look at
                  the cluster and drain workers; the keys themselves are nowhere
    scope         HMAC-SHA256(cluster secret; tenant, client salt), 16 bytes: seeds the first block hash

So another tenant's request cannot hit these blocks, and a client's salt can only narrow what is shared.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import grpc

from cluster.errors import ClientError, StartupError, shown
from cluster.identity import Tenant
from router.tenant_limits import TenantLimit

SCOPE_KEY_BYTES = 16
MAX_REMEMBERED_SCOPES = 4096  # tenants times the salts that they use
DEFAULT_TENANT = Tenant("default")
CRITICAL = "critical"
ADMIN = "admin"
_LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64})\s+(?P<digest>[0-9a-f]{64})(?P<limits>(\s+\S+)*)")
_LIMIT = re.compile(r"(?P<name>requests_per_s|tokens_per_s|max_concurrent|weight)=(?P<value>\d{1,9}(\.\d{1,6})?)")


class InvalidApiKey(ClientError):
    """No key, or one that is not known."""

    code = "invalid_api_key"
    http_status = 401
    grpc_status = grpc.StatusCode.UNAUTHENTICATED


class ApiKeys:
    """The digests of the keys that may use this server."""

    def __init__(
        self,
        tenant_by_digest: Mapping[bytes, Tenant],
        limits: Mapping[Tenant, TenantLimit] | None = None,
        operators: Collection[Tenant] = (),
    ) -> None:
        """`limits` of those tenants whose lines name some; `operators` may use the admin routes."""
        self._tenant_by_digest = dict(tenant_by_digest)
        self.limits = dict(limits or {})
        self.operators = frozenset(operators)

    @property
    def tenants(self) -> frozenset[Tenant]:
        return frozenset(self._tenant_by_digest.values())

    def tenant_of(self, authorization: str) -> Tenant:
        """The tenant of an `Authorization: Bearer <key>` value. Raises `InvalidApiKey`.

        Every digest is compared, each in constant time: how long it takes says nothing about which one came close.
        """
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: Tenant | None = None
        for known, tenant in self._tenant_by_digest.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None or scheme.lower() != "bearer":
            raise InvalidApiKey("missing or wrong API key: send it as `Authorization: Bearer <key>`")
        return found


def read_api_keys(path: Path) -> ApiKeys:
    """Raises `StartupError` when the file is missing, open to others, or has a line that is no key."""
    try:
        mode, text = path.stat().st_mode, path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the API key file {path}: {error}: make one with `tandem key create`") from None
    if mode & 0o077:
        raise StartupError(f"the API key file {path} is open to other users: run `chmod 600 {path}`")
    keys: dict[bytes, Tenant] = {}
    limits: dict[Tenant, TenantLimit] = {}
    operators: set[Tenant] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise StartupError(f"{path}, line {number}: not `name sha256`; make keys with `tandem key create`")
        tenant = Tenant(match["name"])
        keys[bytes.fromhex(match["digest"])] = tenant
        words = match["limits"].split()
        if ADMIN in words:
            operators.add(tenant)
        if words := [word for word in words if word != ADMIN]:
            limits[tenant] = _limit(words, f"{path}, line {number}")
    if not keys:
        raise StartupError(f"{path} holds no key: make one with `tandem key create NAME --file {path}`")
    return ApiKeys(keys, limits, operators)


def _limit(words: Sequence[str], where: str) -> TenantLimit:
    """What a line says after the digest; what it does not say is unlimited."""
    values: dict[str, float] = {}
    for word in words:
        match = _LIMIT.fullmatch(word)
        if match is None and word != CRITICAL:
            raise StartupError(
                f"{where}: {shown(word)} is none of requests_per_s=N, tokens_per_s=N, max_concurrent=N, weight=N, "
                f"{CRITICAL}, {ADMIN}"
            )
        if match is not None:
            values[match["name"]] = float(match["value"])
    if values.get("weight") == 0:
        raise StartupError(f"{where}: weight is 0, must be above it")
    return TenantLimit(
        requests_per_s=values.get("requests_per_s", 0.0),
        tokens_per_s=values.get("tokens_per_s", 0.0),
        max_concurrent=int(values.get("max_concurrent", 0)),
        weight=values.get("weight", 1.0),
        may_be_critical=CRITICAL in words,
    )


@functools.lru_cache(MAX_REMEMBERED_SCOPES)
def scope_key(secret: bytes, tenant: Tenant, salt: str) -> bytes:
    """What seeds the block hashes of this tenant and salt. Parts are length-prefixed, so none runs into the next."""
    parts = b"".join(len(part).to_bytes(4, "little") + part for part in (tenant.encode(), salt.encode()))
    return hmac.digest(secret, b"tandem-cache-scope" + parts, "sha256")[:SCOPE_KEY_BYTES]
