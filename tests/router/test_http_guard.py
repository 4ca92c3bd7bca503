"""Who may ask: Host and Origin on loopback, keys elsewhere, on every route there is."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from pathlib import Path

import httpx
import pytest

from cluster.errors import StartupError
from cluster.identity import Tenant
from cluster.router_settings import RouterSettings
from router import prompt_encoder
from router.allowed_origins import AllowedOrigins
from router.router_process import _refuse_open_address
from router.tenants import ApiKeys, InvalidApiKey, read_api_keys, scope_key
from tests.router.conftest import MODEL, RunningRouter, StartRouter

KEY = "tdm-secret"
BODY = {"model": MODEL, "prompt": "x", "max_tokens": 1}


def _keys() -> ApiKeys:
    return ApiKeys(
        {
            hashlib.sha256(KEY.encode()).digest(): Tenant("alice"),
            hashlib.sha256(b"tdm-other").digest(): Tenant("bob"),
        },
        operators=(Tenant("bob"),),
    )


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"])
async def test_loopback_names_are_answered(host: str, http: httpx.AsyncClient) -> None:
    assert (await http.get("/livez", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "10.0.0.1", "localhost:x"]
)
async def test_s_b31_other_hosts_are_refused_so_that_no_rebound_name_reaches_us(
    host: str, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/v1/completions", json=BODY, headers={"host": host})
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "Host")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example", "file://"])
async def test_other_sites_may_not_use_the_server(origin: str, router: RunningRouter, http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json=BODY, headers={"origin": origin})
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "Origin")
    assert not router.workers[-1].submits
    assert (await http.get("/livez", headers={"origin": "http://localhost:3000"})).status_code == 200


async def test_every_response_carries_security_headers(http: httpx.AsyncClient) -> None:
    for answer in (
        await http.get("/livez"),
        await http.get("/nothing"),
        await http.post("/v1/completions", json=BODY),
        await http.post("/v1/completions", json={}),
        await http.get("/livez", headers={"host": "evil.example"}),
    ):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "server" not in answer.headers


PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/models", f"/v1/models/{MODEL}", "/tokenize", "/detokenize",
    "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/metrics", "/version", "/statusz", "/explain/x", "/workers/x/drain", "/openapi.json", "/nothing",
)  # fmt: skip
DISGUISES = ("{}", "{}/", "/{}", "/x/..{}", "/livez/..{}", "/livez%2f..{}", "{}?key=x", "/LIVEZ{}")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


@pytest.mark.fronts("http")
async def test_s_b38_s_b6_every_route_and_method_needs_a_key_but_the_probes(start_router: StartRouter) -> None:
    router = await start_router(keys=_keys())
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        for path in PATHS:
            for disguise in DISGUISES:
                for method in METHODS if disguise == "{}" else ("GET", "POST"):
                    request = http.build_request(method, router.url + "/x", content=b"{}")
                    request.url = httpx.URL(router.url).copy_with(raw_path=disguise.format(path).encode())
                    answer = await http.send(request)
                    assert answer.status_code == 401, (method, disguise, path)
        assert (await http.get("/livez")).status_code == 200
        for probe in ("/readyz", "/health"):  # nobody could serve
            assert (await http.get(probe)).status_code == 503
        await router.add_worker(router.new_worker("a", "aggregated"))
        for probe in ("/readyz", "/health"):
            answer = await http.get(probe)
            assert (answer.status_code, answer.json()) == (200, {"status": "ready", "pools": {"aggregated": 1}})


@pytest.mark.fronts("http")
async def test_nobody_is_sent_here_while_the_words_are_learned(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests would share the interpreter with that, and the first ones of a cluster would be its slowest."""
    router = await start_router()
    await router.add_worker(router.new_worker("a", "aggregated"))
    is_told = threading.Event()
    monkeypatch.setattr(prompt_encoder, "build_word_table", lambda _: is_told.wait() and None)
    learning = router.core.encoder.learn_words()
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        try:
            answer = await http.get("/readyz")
        finally:
            is_told.set()  # a thread that waits for ever would be waited for at the end
        assert answer.status_code == 503
        await asyncio.wrap_future(learning)
        assert (await http.get("/readyz")).status_code == 200
        assert router.core.is_ready()


async def test_s_b37_right_keys_name_their_tenant_and_wrong_ones_are_401(start_router: StartRouter) -> None:
    router = await start_router(keys=_keys())
    worker = await router.add_worker(router.new_worker("decode-a"))
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        for key in ("tdm-secre", "tdm-secret2", "Tdm-secret", "bob", "alice"):
            answer = await http.post("/v1/completions", json=BODY, headers={"authorization": f"Bearer {key}"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        basic = await http.post("/v1/completions", json=BODY, headers={"authorization": f"Basic {KEY}"})
        assert basic.status_code == 401
        for key in (KEY, "tdm-other"):
            answer = await http.post("/v1/completions", json=BODY, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
    alice, bob = worker.submits
    assert (alice.tenant, bob.tenant) == ("alice", "bob")
    assert alice.scope.scope_key != bob.scope.scope_key


def test_s_b41_rt22_scopes_differ_by_tenant_and_salt_and_parts_do_not_run_together() -> None:
    keys = {
        scope_key(b"secret", Tenant(tenant), salt)
        for tenant, salt in (("a", ""), ("b", ""), ("a", "x"), ("b", "x"), ("ab", ""), ("a", "b"), ("", "ab"))
    }
    assert len(keys) == 7
    assert all(len(key) == 16 for key in keys)
    assert scope_key(b"secret", Tenant("a"), "x") == scope_key(b"secret", Tenant("a"), "x")
    assert scope_key(b"other", Tenant("a"), "x") not in keys


async def test_the_same_tenant_and_salt_share_a_scope(router: RunningRouter, http: httpx.AsyncClient) -> None:
    for salt in (None, None, "x", "x", "y"):
        await http.post("/v1/completions", json={**BODY, "cache_salt": salt})
    scopes = [submit.scope.scope_key for submit in router.workers[-1].submits]
    assert scopes[0] == scopes[1]
    assert scopes[2] == scopes[3]
    assert len(set(scopes)) == 3


def _write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_key_file_is_read_and_its_faults_are_one_line(tmp_path: Path) -> None:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys = read_api_keys(_write(tmp_path / "good", f"# a comment\n\nalice {digest}\n"))
    assert keys.tenant_of(f"Bearer {KEY}") == "alice"
    with pytest.raises(InvalidApiKey):
        keys.tenant_of("Bearer x")
    for name, text, mode, what in (
        ("open", f"alice {digest}\n", 0o644, "chmod 600"),
        ("empty", "", 0o600, "tandem key create"),
        ("plain", f"alice {KEY}\n", 0o600, "line 1"),
    ):
        with pytest.raises(StartupError, match=what):
            read_api_keys(_write(tmp_path / name, text, mode))
    with pytest.raises(StartupError, match="cannot read"):
        read_api_keys(tmp_path / "missing")


async def test_only_an_admin_key_opens_the_admin_routes(start_router: StartRouter) -> None:
    router = await start_router(keys=_keys())
    await router.add_worker(router.new_worker("decode-a"))
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        for method, path in (("GET", "/statusz"), ("GET", "/explain/x"), ("POST", "/workers/decode-a/drain")):
            plain = await http.request(method, path, headers={"authorization": f"Bearer {KEY}"})
            assert (plain.status_code, plain.json()["error"]["code"]) == (403, "forbidden")
            admin = await http.request(method, path, headers={"authorization": "Bearer tdm-other"})
            assert admin.status_code in (200, 202, 404), admin.text


async def test_a_worker_is_drained_by_name(router: RunningRouter, http: httpx.AsyncClient) -> None:
    answer = await http.post("/workers/decode-0/drain")
    assert (answer.status_code, answer.json()) == (202, {"worker_id": "decode-0", "in_flight": 0})
    unknown = await http.post("/workers/nobody/drain")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "worker_not_found")
    await router.workers[-1].stop()
    silent = await http.post("/workers/decode-0/drain")
    assert (silent.status_code, silent.json()["error"]["code"]) == (503, "worker_unavailable")


def test_the_word_admin_in_a_key_file_makes_an_operator(tmp_path: Path) -> None:
    digests = [hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b", "c")]
    text = f"a {digests[0]} admin\nb {digests[1]} weight=2 admin critical\nc {digests[2]} critical\n"
    keys = read_api_keys(_write(tmp_path / "keys", text))
    assert keys.operators == {"a", "b"}
    assert set(keys.limits) == {"b", "c"}


# --- pages of other sites (CORS) --------------------------------------------------------------------------------------

PAGE = "https://chat.example"


async def test_a_page_that_is_allowed_may_ask_beforehand_and_read_the_answer(start_router: StartRouter) -> None:
    router = await start_router(keys=_keys(), allowed_origins=(PAGE + "/",))
    await router.add_worker(router.new_worker("decode-a"))
    asks = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        before = await http.options("/v1/completions", headers=asks)  # browsers send no key with it
        assert (before.status_code, before.content) == (204, b"")
        assert before.headers["access-control-allow-origin"] == PAGE
        assert before.headers["access-control-allow-headers"] == asks["access-control-request-headers"]
        assert "POST" in before.headers["access-control-allow-methods"]
        key = {"authorization": f"Bearer {KEY}"}
        for body, status in ((BODY, 200), ({**BODY, "stream": True}, 200), ({**BODY, "n": -1}, 400)):
            answer = await http.post("/v1/completions", json=body, headers={"origin": PAGE, **key})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert answer.headers["vary"] == "origin"
        without_key = await http.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        assert (without_key.status_code, without_key.headers["access-control-allow-origin"]) == (401, PAGE)
        other = {"origin": "https://chat.example.evil", **key}
        for answer in (
            await http.options("/v1/completions", headers={**asks, **other}),
            await http.post("/v1/completions", json=BODY, headers=other),
        ):
            assert "access-control-allow-origin" not in answer.headers
            assert answer.headers["vary"] == "origin"


async def test_without_keys_an_allowed_page_passes_the_look_at_origin_but_not_the_one_at_host(
    start_router: StartRouter,
) -> None:
    router = await start_router(allowed_origins=(PAGE,))
    await router.add_worker(router.new_worker("decode-a"))
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        assert (await http.post("/v1/completions", json=BODY, headers={"origin": PAGE})).status_code == 200
        rebound = {"origin": PAGE, "host": "chat.example"}
        assert (await http.post("/v1/completions", json=BODY, headers=rebound)).status_code == 403


async def test_without_a_list_nothing_is_said_of_other_sites(http: httpx.AsyncClient) -> None:
    asks = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
    for answer in (await http.get("/livez", headers=asks), await http.options("/v1/completions", headers=asks)):
        assert not [name for name in answer.headers if name.startswith("access-control") or name == "vary"]


def test_every_page_may_not_use_a_server_without_keys(tmp_path: Path) -> None:
    settings = RouterSettings(model="m", runtime_dir=tmp_path, allowed_origins=("*",))
    with pytest.raises(StartupError, match="allowed_origins"):
        _refuse_open_address(settings)
    _refuse_open_address(settings.model_copy(update={"api_keys_file": tmp_path / "keys.txt"}))
    assert AllowedOrigins(("*",)).has("https://any.example")
