"""Certificates for tests, made on the fly by openssl: signed by an authority of its own, valid when a test says."""

from __future__ import annotations

import datetime
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")

_CONFIG = """\
[ca]
default_ca = here
[here]
database = index.txt
new_certs_dir = .
serial = serial
default_md = sha256
policy = any
x509_extensions = leaf
unique_subject = no
[any]
commonName = supplied
[leaf]
subjectAltName = {names}
extendedKeyUsage = {purpose}
"""
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
LOCALHOST = "DNS:localhost,IP:127.0.0.1"


@dataclass(frozen=True, slots=True)
class Certificate:
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs what it is asked for, in a directory of its own."""

    directory: Path

    @property
    def certificate(self) -> Path:
        return self.directory / "authority.pem"

    @classmethod
    def new(cls, directory: Path) -> Authority:
        directory.mkdir()
        made = cls(directory)
        made._openssl(
            "req", "-x509", *_NEW_KEY, "-keyout", "authority.key", "-out", "authority.pem", "-subj", "/CN=test"
        )
        (directory / "index.txt").touch()
        return made

    def sign(
        self,
        name: str,
        names: str = LOCALHOST,
        purpose: str = "serverAuth,clientAuth",
        days: tuple[int, int] = (-1, 30),
    ) -> Certificate:
        """A new key with its certificate, for `names`, valid from `days[0]` to `days[1]` from now."""
        self._openssl("req", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (self.directory / "sign.conf").write_text(_CONFIG.format(names=names, purpose=purpose))
        start, end = (_moment(day) for day in days)
        self._openssl(
            "ca", "-batch", "-notext", "-create_serial", "-config", "sign.conf", "-cert", "authority.pem", "-keyfile",
            "authority.key", "-startdate", start, "-enddate", end, "-in", f"{name}.csr", "-out", f"{name}.pem",
        )  # fmt: skip
        return Certificate(self.directory / f"{name}.pem", self.directory / f"{name}.key")

    def encrypt(self, key: Path) -> Path:
        """The key again, under a password."""
        self._openssl("ec", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", "encrypted.key")
        return self.directory / "encrypted.key"

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run(
            ["openssl", *arguments],  # noqa: S607  whichever one is installed
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def _moment(days: int) -> str:
    moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    return f"{moment:%Y%m%d%H%M%SZ}"
