"""TLS at both fronts: answers as without it, strangers refused, and a client's certificate where one is asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import inference_pb2, inference_pb2_grpc

from cluster.front_tls import client_context
from deploy.client import AnswerFailed, ClientTls, ClusterClient, ClusterUnreachable
from tests.certificates import Authority, Certificate, needs_openssl
from tests.router.conftest import RunningRouter, StartRouter

pytestmark = needs_openssl
TIMEOUT_S = 60.0
BODY = {"model": "test-model", "prompt": [1, 2], "max_tokens": 3}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.new(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module")
def served(authority: Authority) -> Certificate:
    return authority.sign("front")


@pytest_asyncio.fixture(loop_scope="session")
async def router(start_router: StartRouter, served: Certificate) -> RunningRouter:
    router = await start_router(ssl_certfile=served.certificate, ssl_keyfile=served.key)
    await router.add_worker(router.new_worker("decode-0"))
    return router


@pytest_asyncio.fixture(loop_scope="session")
async def strict_router(start_router: StartRouter, served: Certificate, authority: Authority) -> RunningRouter:
    """Asks clients for certificates."""
    router = await start_router(
        ssl_certfile=served.certificate, ssl_keyfile=served.key, ssl_ca_certs=authority.certificate
    )
    await router.add_worker(router.new_worker("decode-0"))
    return router


async def _generate(router: RunningRouter, credentials: grpc.ChannelCredentials | None) -> str:
    """The text of an answer over gRPC."""
    channel = (
        grpc.aio.insecure_channel(router.grpc_address)
        if credentials is None
        else grpc.aio.secure_channel(router.grpc_address, credentials)
    )
    async with channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 2]), max_tokens=3)
        text = ""
        async for response in stub.Generate(request, timeout=TIMEOUT_S):
            text += "".join(choice.text for choice in response.choices)
        return text


async def test_both_fronts_answer_who_trusts_the_authority(router: RunningRouter, authority: Authority) -> None:
    assert router.url.startswith("https://")
    async with httpx.AsyncClient(verify=client_context(authority.certificate), timeout=TIMEOUT_S) as client:
        answer = await client.post(f"{router.url}/v1/completions", json=BODY)
        assert answer.status_code == 200
        text = answer.json()["choices"][0]["text"]
        async with client.stream("POST", f"{router.url}/v1/completions", json={**BODY, "stream": True}) as stream:
            lines = [line async for line in stream.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(text) == 3
    assert len(await _generate(router, grpc.ssl_channel_credentials(authority.certificate.read_bytes()))) == 3


async def test_a_plain_client_is_not_answered_and_the_front_goes_on(
    router: RunningRouter, authority: Authority
) -> None:
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        with pytest.raises(httpx.TransportError):
            await client.get(router.url.replace("https", "http") + "/livez")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await _generate(router, None)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    async with httpx.AsyncClient(verify=client_context(authority.certificate), timeout=TIMEOUT_S) as client:
        assert (await client.get(f"{router.url}/livez")).status_code == 200


async def test_what_tandem_status_uses_trusts_an_authority_or_the_certificate_itself(
    router: RunningRouter, authority: Authority, served: Certificate
) -> None:
    for trusted in (authority.certificate, served.certificate):
        async with ClusterClient(router.url, tls=ClientTls(trusted)) as client:
            assert await client.served_model() == "test-model"
    async with ClusterClient(router.url) as client:
        with pytest.raises(ClusterUnreachable, match=r"not trusted .*--ca-file \(TANDEM_CA_FILE\)"):
            await client.served_model()


async def test_a_certificate_of_another_name_is_not_trusted_unless_it_is_known_as_a_file(
    start_router: StartRouter, authority: Authority
) -> None:
    other = authority.sign("elsewhere", names="DNS:elsewhere.example")
    router = await start_router(ssl_certfile=other.certificate, ssl_keyfile=other.key)
    async with ClusterClient(router.url, tls=ClientTls(authority.certificate)) as client:
        with pytest.raises(ClusterUnreachable, match="IP address mismatch"):
            await client.served_model()
    async with ClusterClient(router.url, tls=ClientTls(other.certificate, names_host=False)) as client:
        assert await client.served_model() == "test-model"


async def test_clients_need_a_certificate_of_the_authority_where_it_is_asked_for(
    strict_router: RunningRouter, authority: Authority, served: Certificate, tmp_path: Path
) -> None:
    stranger = Authority.new(tmp_path / "stranger").sign("stranger")
    own = authority.sign("client")
    trusted, url = authority.certificate, strict_router.url
    async with ClusterClient(url, tls=ClientTls(trusted, own.certificate, own.key)) as client:
        assert await client.served_model() == "test-model"
    async with ClusterClient(url, tls=ClientTls(trusted)) as client:
        with pytest.raises(AnswerFailed, match="client_certificate_required"):
            await client.served_model()
    async with ClusterClient(url, tls=ClientTls(trusted, stranger.certificate, stranger.key)) as client:
        with pytest.raises(ClusterUnreachable):
            await client.served_model()
    root = authority.certificate.read_bytes()
    shown = grpc.ssl_channel_credentials(root, own.key.read_bytes(), own.certificate.read_bytes())
    assert len(await _generate(strict_router, shown)) == 3
    for refused in (
        grpc.ssl_channel_credentials(root),
        grpc.ssl_channel_credentials(root, stranger.key.read_bytes(), stranger.certificate.read_bytes()),
    ):
        with pytest.raises(grpc.aio.AioRpcError):
            await _generate(strict_router, refused)


async def test_probes_need_no_certificate(strict_router: RunningRouter, authority: Authority) -> None:
    async with httpx.AsyncClient(verify=client_context(authority.certificate), timeout=TIMEOUT_S) as client:
        for path in ("/livez", "/readyz", "/health"):
            assert (await client.get(strict_router.url + path)).status_code == 200
        for path in ("/metrics", "/statusz", "/v1/models", "/nothing"):
            answer = await client.get(strict_router.url + path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "client_certificate_required")


async def test_health_over_grpc_comes_through_tls(router: RunningRouter, authority: Authority) -> None:
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    async with grpc.aio.secure_channel(router.grpc_address, credentials) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert answer.status in (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING)


async def test_who_says_nothing_after_connecting_holds_up_nobody(router: RunningRouter, authority: Authority) -> None:
    host, port = router.url.removeprefix("https://").split(":")
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
    async with httpx.AsyncClient(verify=client_context(authority.certificate), timeout=TIMEOUT_S) as client:
        assert (await client.get(f"{router.url}/livez")).status_code == 200
    for _, writer in silent:
        writer.close()
        await writer.wait_closed()


async def test_a_renewed_certificate_is_shown_by_both_fronts_and_files_that_cannot_be_used_change_nothing(
    start_router: StartRouter, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    renewing = Authority.new(tmp_path / "renewing")
    before, after, late = authority.sign("before"), renewing.sign("after"), renewing.sign("late", days=(-9, -1))
    certificate, key = tmp_path / "front.pem", tmp_path / "front.key"

    def write(to: Path, source: Path) -> None:
        """As a renewal does: a new file in the place of the old one."""
        new = to.with_suffix(".new")
        new.write_bytes(source.read_bytes())
        new.replace(to)

    write(certificate, before.certificate)
    write(key, before.key)
    router = await start_router(ssl_certfile=certificate, ssl_keyfile=key)
    await router.add_worker(router.new_worker("decode-0"))
    assert router.certificate is not None

    async def who_is_trusted() -> list[Authority]:
        trusted = []
        for candidate in (authority, renewing):
            credentials = grpc.ssl_channel_credentials(candidate.certificate.read_bytes())
            try:
                async with ClusterClient(router.url, tls=ClientTls(candidate.certificate)) as client:
                    await client.served_model()
            except ClusterUnreachable:
                with pytest.raises(grpc.aio.AioRpcError):
                    await _generate(router, credentials)
            else:
                assert len(await _generate(router, credentials)) == 3
                trusted.append(candidate)
        return trusted

    async with ClusterClient(router.url, tls=ClientTls(authority.certificate)) as client:
        assert await client.served_model() == "test-model"
        assert await who_is_trusted() == [authority]
        for wrong in (after.certificate, late.certificate):
            write(certificate, wrong)  # without its key, and then one that has expired
            write(key, late.key if wrong is late.certificate else before.key)
            router.certificate.look()
            assert await who_is_trusted() == [authority]
        write(certificate, after.certificate)
        write(key, after.key)
        router.certificate.look()
        assert await who_is_trusted() == [renewing]
        assert await client.served_model() == "test-model", "an open connection goes on"
        certificate.unlink()
        router.certificate.look()
        assert await who_is_trusted() == [renewing]
    said = [(record.message, getattr(record, "reason", "")) for record in caplog.records if "TLS" in record.message]
    assert len(said) == 3
    assert ["is not the key" in said[0][1], "has expired" in said[1][1], "No such file" in said[2][1]] == [True] * 3
