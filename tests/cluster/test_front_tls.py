"""TLS files of the fronts: what is wrong with them is said before anything listens, in one line that names the file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.errors import StartupError
from cluster.front_tls import FrontTls, client_context
from cluster.router_settings import RouterLimits
from tests.certificates import Authority, needs_openssl

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.new(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module")
def tls(authority: Authority) -> FrontTls:
    made = authority.sign("front")
    return FrontTls(made.certificate, made.key)


def test_a_good_pair_is_accepted_with_and_without_an_authority_of_clients(authority: Authority, tls: FrontTls) -> None:
    tls.check()
    replace(tls, client_authority=authority.certificate).check()


def test_settings_without_tls_have_none_and_halves_are_refused() -> None:
    assert FrontTls.of(RouterLimits()) is None
    some = Path("some.pem")
    for settings, missing in (
        (RouterLimits(ssl_certfile=some), "ssl_keyfile is missing"),
        (RouterLimits(ssl_keyfile=some), "ssl_certfile is missing"),
        (RouterLimits(ssl_ca_certs=some), "give ssl_certfile and ssl_keyfile"),
    ):
        with pytest.raises(StartupError, match=missing):
            FrontTls.of(settings)


@pytest.mark.parametrize("field", ["certificate", "key", "client_authority"])
def test_a_file_that_is_missing_or_no_pem_is_named(tls: FrontTls, field: str, tmp_path: Path) -> None:
    file = tmp_path / "file.pem"
    with pytest.raises(StartupError, match=f"cannot read ssl_.*{re.escape(str(file))}: No such file"):
        replace(tls, **{field: file}).check()
    file.write_text("nothing of the kind")
    with pytest.raises(StartupError, match=re.escape(str(file))):
        replace(tls, **{field: file}).check()


def test_a_key_of_another_certificate_is_refused(authority: Authority, tls: FrontTls) -> None:
    other = authority.sign("other")
    with pytest.raises(StartupError, match=r"other\.key is not the key of the certificate .*front\.pem"):
        replace(tls, key=other.key).check()


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_a_password(authority: Authority, tls: FrontTls) -> None:
    with pytest.raises(StartupError, match=r"encrypted\.key is encrypted"):
        replace(tls, key=authority.encrypt(tls.key)).check()


@pytest.mark.parametrize(("days", "reason"), [((-30, -1), "has expired"), ((2, 30), "is not valid yet")])
def test_a_certificate_out_of_its_time_is_refused(authority: Authority, days: tuple[int, int], reason: str) -> None:
    made = authority.sign("late", days=days)
    with pytest.raises(StartupError, match=rf"late\.pem {reason}"):
        FrontTls(made.certificate, made.key).check()


def test_a_certificate_for_clients_serves_no_server(authority: Authority) -> None:
    made = authority.sign("client-only", purpose="clientAuth")
    with pytest.raises(StartupError, match=r"client-only\.pem serves no server: .*purpose"):
        FrontTls(made.certificate, made.key).check()


def test_a_clients_certificate_without_its_key_is_refused(tls: FrontTls) -> None:
    with pytest.raises(StartupError, match="together"):
        client_context(None, tls.certificate)
