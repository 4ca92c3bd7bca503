"""The secrets of a cluster on several machines: a directory that is made once and copied to every node, as files.

    cluster.token     on every call
    redis.password    of the Redis that you run for it
    authority.pem     signed the one certificate that there is; its key is thrown away, so there will be no other
    node.pem, .key    every process's certificate: it names the cluster, not a machine, so nodes may come and go

Who has the directory belongs to the cluster. Nothing of it is ever handed to Ray.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import StartupError
from cluster.rpc_security import RpcSecurity, TlsFiles, new_secret, read_secret, write_secret

# What the certificate names and every process asks for.
SERVER_NAME = "tandem-cluster"
VALID_DAYS = "825"
OPENSSL_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class ClusterSecrets:
    """Where each of them lies: the same path on every node."""

    directory: Path

    @property
    def token_file(self) -> Path:
        return self.directory / "cluster.token"

    @property
    def redis_password_file(self) -> Path:
        return self.directory / "redis.password"

    @property
    def tls(self) -> TlsFiles:
        files = [self.directory / name for name in ("authority.pem", "node.pem", "node.key")]
        return TlsFiles(files[0], files[1], files[2], SERVER_NAME)

    def security(self) -> RpcSecurity:
        """Raises `StartupError` for a directory that is not complete or open to others."""
        self.check()
        return RpcSecurity(read_secret(self.token_file, "cluster token"), self.tls)

    def check(self) -> None:
        """Raises `StartupError` naming the file that is missing or open to others, and what to do."""
        secret = {self.token_file: "cluster token", self.redis_password_file: "Redis password", self.tls.key: "TLS key"}
        for path in (self.token_file, self.redis_password_file, self.tls.authority, self.tls.certificate, self.tls.key):
            if not path.is_file():
                raise StartupError(f"no {path}: `tandem secrets create DIR` makes it once, copy DIR to every node")
            if path in secret:
                read_secret(path, secret[path])


def create_secrets(directory: Path) -> ClusterSecrets:
    """A new directory, of this user alone. Raises `StartupError` when it is there already or openssl is not."""
    openssl = shutil.which("openssl")
    if openssl is None:
        raise StartupError("openssl is needed to make the certificate, and is not installed")
    try:
        directory.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise StartupError(f"cannot make {directory}: {error.strerror}; secrets are never overwritten") from None
    made = ClusterSecrets(directory)
    write_secret(made.token_file, new_secret())
    write_secret(made.redis_password_file, new_secret())
    with tempfile.TemporaryDirectory(dir=directory) as name:
        _make_certificate(openssl, Path(name), made.tls)
    return made


def _make_certificate(openssl: str, work: Path, tls: TlsFiles) -> None:
    """The authority's key and the request live in `work` and go with it."""
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    (work / "san").write_text(f"subjectAltName=DNS:{SERVER_NAME}")
    steps = (
        ("req", "-x509", *new_key, "-keyout", "authority.key", "-out", "authority.pem", "-subj", "/CN=tandem authority",
         "-days", VALID_DAYS),
        ("req", *new_key, "-keyout", "node.key", "-out", "node.csr", "-subj", f"/CN={SERVER_NAME}"),
        ("x509", "-req", "-in", "node.csr", "-CA", "authority.pem", "-CAkey", "authority.key", "-set_serial", "1",
         "-days", VALID_DAYS, "-extfile", "san", "-out", "node.pem"),
    )  # fmt: skip
    for step in steps:
        ended = subprocess.run(
            [openssl, *step], cwd=work, capture_output=True, text=True, timeout=OPENSSL_TIMEOUT_S, check=False
        )
        if ended.returncode:
            raise StartupError(f"openssl {step[0]} failed: {ended.stderr.strip().splitlines()[-1:]}")
    for path in (tls.authority, tls.certificate, tls.key):
        made = work / path.name
        made.chmod(0o600)
        made.replace(path)
