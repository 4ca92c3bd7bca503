"""What the router believes of caches: fed by events, repaired after gaps, weighed by how right it has been."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from tandem.v1 import membership_pb2

from cluster.block_hash import HashScope, hash_blocks
from cluster.identity import BlockHash, WorkerId
from router.cache_view import RESYNC_AFTER_REQUESTS, SILENT_AFTER_S, UNSEEN_HITS_ALERT, CacheView, prompt_hashes
from router.placement import ClusterSnapshot, Placement, RequestView
from router.policies import choose_policy
from router.prefix_index import PrefixIndex
from router.worker_state import Role
from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.placement_simulation import worker as simulated_worker
from tests.router.scripted_worker import ScriptedWorker

SCOPE = HashScope(b"scope", "model", 16)
TOKENS = list(range(160))
HASHES = prompt_hashes(TOKENS, SCOPE)
W = WorkerId("prefill-0")


class Source:
    """Notes what was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, WorkerId]] = []

    def watch(self, worker_id: WorkerId) -> None:
        self.calls.append(("watch", worker_id))

    def unwatch(self, worker_id: WorkerId) -> None:
        self.calls.append(("unwatch", worker_id))

    def read_again(self, worker_id: WorkerId) -> None:
        self.calls.append(("read_again", worker_id))

    def ask_snapshot(self, worker_id: WorkerId) -> None:
        self.calls.append(("ask_snapshot", worker_id))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _view() -> tuple[CacheView, Source, Clock]:
    clock, source = Clock(), Source()
    view = CacheView(PrefixIndex(), clock)
    view.connect(source)
    view.worker_joined(W)
    return view, source, clock


def _event(
    seq: int, hashes: list[BlockHash], op: int = membership_pb2.KV_EVENT_OP_STORED, incarnation: str = "one"
) -> membership_pb2.KvEvent:
    event = membership_pb2.KvEvent(worker_id=W, incarnation=incarnation, seq=seq, block_hashes=b"".join(hashes))
    event.op = op  # type: ignore[assignment]
    return event


def _cached(view: CacheView) -> int:
    return view.match(HASHES, 16, len(TOKENS)).tokens.get(W, 0)


def test_rt16_a_worker_that_publishes_nothing_is_noticed_within_ten_seconds_and_guessed_from_then_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    view, _, clock = _view()
    view.chosen(W, HASHES)
    clock.now_s = 600.0  # a long prompt on a slow device: nothing was computed yet
    view.tick()
    assert caplog.records == []
    view.answered(W)
    clock.now_s += SILENT_AFTER_S
    view.tick()
    view.tick()
    assert [record.message for record in caplog.records] == ["a worker publishes no KV events: its cache is guessed"]
    assert _cached(view) == 0
    view.chosen(W, HASHES)
    clock.now_s += 60  # long after what is speculative has expired
    assert _cached(view) == 159
    view.on_event(_event(1, HASHES[:1]))
    assert view.status()["workers"][W]["is_silent"] is False  # type: ignore[index]


def test_rt16_a_worker_that_was_sent_nothing_is_not_silent() -> None:
    view, _, clock = _view()
    clock.now_s = 10 * SILENT_AFTER_S
    view.tick()
    assert view.status()["workers"][W]["is_silent"] is False  # type: ignore[index]


@pytest.mark.parametrize("role", ["aggregated", "decode"])
async def test_s_b67_rt64_a_worker_without_events_is_a_gauge_and_an_error(role: str, start_router: StartRouter) -> None:
    """Also a decode worker: without its events no prompt would ever be prefilled where it is decoded."""
    router = await start_router()
    worker = await router.add_worker(router.new_worker("silent", role))
    view = router.core.cache_view
    assert view is not None

    async def silent_workers() -> str:
        async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
            body = {"model": MODEL, "prompt": list(range(200)), "max_tokens": 1}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            metrics = (await http.get("/metrics")).text
        return next(line for line in metrics.splitlines() if line.startswith("tandem_kv_event_silent_workers"))

    assert (await silent_workers()).endswith(" 0.0")
    clock = view._clock
    view._clock = lambda: clock() + SILENT_AFTER_S
    view.tick()
    assert (await silent_workers()).endswith(" 1.0")
    assert view.match(_hashes_of(router, worker), 16, 200).tokens == {"silent": 192}


def test_rt64_a_decode_workers_own_prefix_is_used_where_it_tells_of_it() -> None:
    view, _, _ = _view()
    decode = WorkerId("decode-0")
    view.worker_joined(decode)
    policy = choose_policy("cache_aware", 1).policy
    snapshot = ClusterSnapshot([simulated_worker(W, Role.PREFILL)], [simulated_worker(decode, Role.DECODE)])
    tokens = list(range(1024))
    hashes = prompt_hashes(tokens, SCOPE)

    def is_local() -> bool:
        match = view.match(hashes, 16, len(tokens))
        return policy.place(RequestView(len(tokens), 8, hashes, match.tokens, match.longest), snapshot, 0.0).is_local

    assert not is_local()
    event = _event(1, hashes)
    event.worker_id = decode
    view.on_event(event)
    assert is_local()


def test_s_b60_an_index_that_is_wrong_costs_one_prediction_and_is_believed_less() -> None:
    """The worker itself finds nothing: a miss there, which the router learns from."""
    view, _, _ = _view()
    view.on_event(_event(1, HASHES))
    before = _cached(view)
    view.observed(W, before, 0)
    assert _cached(view) < before


def test_rt17_hits_that_nobody_predicted_are_an_alert(caplog: pytest.LogCaptureFixture) -> None:
    view, _, _ = _view()
    for _ in range(2 * UNSEEN_HITS_ALERT):
        view.observed(W, 0, 64)
    assert len(caplog.records) == 1
    assert view.status()["workers"][W]["unseen_hits"] == 2 * UNSEEN_HITS_ALERT  # type: ignore[index]
    view.observed(W, 64, 64)
    assert view.status()["workers"][W]["unseen_hits"] == 0  # type: ignore[index]


def test_rt21_a_cache_that_was_reset_is_empty_in_the_index_at_once() -> None:
    view, _, _ = _view()
    view.on_event(_event(1, HASHES))
    assert _cached(view) == 159
    view.on_event(_event(2, [], membership_pb2.KV_EVENT_OP_CLEARED))
    assert _cached(view) == 0


def test_rt58_two_routers_that_read_the_same_events_know_the_same() -> None:
    """Each books and guesses for itself; what workers say is shared, and that is enough for every later hit."""
    first, second = _view()[0], _view()[0]
    first.chosen(W, HASHES)
    assert second.match(HASHES, 16, len(TOKENS)).tokens == {}
    for view in (first, second):
        view.on_event(_event(1, HASHES))
    assert first.match(HASHES, 16, len(TOKENS)) == second.match(HASHES, 16, len(TOKENS))


def test_rt24_the_router_hashes_as_the_workers_do() -> None:
    assert hash_blocks(np.array(TOKENS, dtype=np.int32), SCOPE) == HASHES


def test_stored_removed_cleared_blocks_show_in_the_match() -> None:
    view, _, _ = _view()
    view.on_event(_event(1, HASHES[:6]))
    assert _cached(view) == 96
    view.on_event(_event(2, HASHES[4:6], membership_pb2.KV_EVENT_OP_REMOVED))
    assert _cached(view) == 64
    view.on_event(_event(3, [], membership_pb2.KV_EVENT_OP_CLEARED))
    assert _cached(view) == 0


def test_the_last_token_is_always_computed() -> None:
    view, _, _ = _view()
    view.on_event(_event(1, HASHES))
    assert _cached(view) == len(TOKENS) - 1


def test_f40_rt14_a_gap_asks_and_keeps_serving_then_for_a_snapshot() -> None:
    view, source, clock = _view()
    view.on_event(_event(1, HASHES[:2]))
    view.on_event(_event(3, HASHES[4:6]))
    assert source.calls[-1] == ("read_again", W)
    assert _cached(view) == 32
    clock.now_s = 2.0
    view.tick()
    assert source.calls[-1] == ("ask_snapshot", W)
    view.on_event(_event(3, HASHES[:6], membership_pb2.KV_EVENT_OP_SNAPSHOT))
    assert _cached(view) == 96


def test_f40_rt18_a_restarted_worker_holds_nothing() -> None:
    view, source, _ = _view()
    view.on_event(_event(9, HASHES, membership_pb2.KV_EVENT_OP_SNAPSHOT))
    assert _cached(view) > 0
    view.worker_joined(W)
    assert _cached(view) == 0
    view.on_event(_event(1, HASHES[:1], incarnation="two"))
    assert _cached(view) == 16
    view.worker_left(W)
    assert _cached(view) == 0
    assert source.calls[-1] == ("unwatch", W)


def test_s_b68_events_of_unknown_workers_and_garbled_ones_change_nothing() -> None:
    view, _, _ = _view()
    stranger = membership_pb2.KvEvent(worker_id="who", incarnation="x", seq=1, block_hashes=HASHES[0])
    stranger.op = membership_pb2.KV_EVENT_OP_STORED
    view.on_event(stranger)
    garbled = _event(1, HASHES[:1])
    garbled.block_hashes = garbled.block_hashes[:-1]
    view.on_event(garbled)
    view.on_event(_event(1, HASHES[:1], membership_pb2.KV_EVENT_OP_UNSPECIFIED))
    assert view.match(HASHES, 16, len(TOKENS)).tokens == {}


def test_chosen_blocks_count_at_once_and_expire_unless_confirmed() -> None:
    view, _, clock = _view()
    view.chosen(W, HASHES[:4])
    assert _cached(view) == 64
    clock.now_s = 3.5
    assert _cached(view) == 0


def test_confidence_weighs_a_match_and_a_worker_that_is_always_wrong_is_asked_anew() -> None:
    view, source, _ = _view()
    view.on_event(_event(1, HASHES[:8]))
    view.observed(W, 128, 64)
    assert _cached(view) == int(128 * 0.95)
    num_wrong = 0
    while ("ask_snapshot", W) not in source.calls:
        view.observed(W, 128, 0)
        num_wrong += 1
    assert RESYNC_AFTER_REQUESTS < num_wrong < 2 * RESYNC_AFTER_REQUESTS
    assert _cached(view) == 0
    view.on_event(_event(1, HASHES[:2], membership_pb2.KV_EVENT_OP_SNAPSHOT))
    assert _cached(view) == 32


def test_right_predictions_restore_confidence() -> None:
    view, _, _ = _view()
    view.on_event(_event(1, HASHES[:8]))
    for _ in range(5):
        view.observed(W, 128, 0)
    low = _cached(view)
    for _ in range(40):
        view.observed(W, 128, 128)
    assert low < 80
    assert _cached(view) >= 125


async def test_the_live_router_sends_a_prompt_where_its_prefix_is(start_router: StartRouter) -> None:
    router = await start_router(policy="cache_aware")
    workers = [await router.add_worker(router.new_worker(f"both-{name}", "aggregated")) for name in "abc"]
    view = router.core.cache_view
    assert view is not None
    body = {"model": MODEL, "prompt": list(range(200)), "max_tokens": 1}
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        (home,) = [worker for worker in workers if worker.submits]
        for _ in range(4):
            await http.post("/v1/completions", json=body)
        assert len(home.submits) == 5
        elsewhere = _event_of(next(worker for worker in workers if worker is not home), home)
        view.on_event(elsewhere)
        status = (await http.get("/statusz")).json()
    assert status["policy"] == "cache_aware"
    assert status["prefix_index"]["entries"] == 12
    assert set(status["prefix_index"]["workers"]) == {"both-a", "both-b", "both-c"}


def _hashes_of(router: RunningRouter, worker: ScriptedWorker) -> list[BlockHash]:
    submit = worker.submits[0]
    scope = router.core.registry.hash_scope(submit.scope.scope_key)
    assert scope is not None
    return prompt_hashes(list(submit.token_ids), scope)


def _event_of(worker: ScriptedWorker, home: ScriptedWorker) -> membership_pb2.KvEvent:
    submit = home.submits[0]
    scope = HashScope(submit.scope.scope_key, "", 16)
    event = membership_pb2.KvEvent(worker_id=worker.worker_id, incarnation=worker.incarnation, seq=1)
    event.op = membership_pb2.KV_EVENT_OP_STORED
    event.block_hashes = b"".join(prompt_hashes(list(submit.token_ids), scope))
    return event


def _tiered(seq: int, hashes: list[BlockHash], op: int) -> membership_pb2.KvEvent:
    event = _event(seq, hashes, op)
    event.has_tiers = True
    return event


def _restorable(view: CacheView) -> int:
    return view.match(HASHES, 16, len(TOKENS)).restorable_tokens.get(W, 0)


def test_what_moved_to_a_lower_tier_is_restorable_and_not_cached() -> None:
    view, _, _ = _view()
    view.on_event(_tiered(1, HASHES[:8], membership_pb2.KV_EVENT_OP_STORED))
    assert (_cached(view), _restorable(view)) == (128, 0)
    view.on_event(_tiered(2, HASHES[3:8], membership_pb2.KV_EVENT_OP_DEMOTED))
    assert (_cached(view), _restorable(view)) == (48, 80)
    view.on_event(_tiered(3, HASHES[6:8], membership_pb2.KV_EVENT_OP_REMOVED))
    assert (_cached(view), _restorable(view)) == (48, 48)
    view.on_event(_tiered(4, HASHES[3:6], membership_pb2.KV_EVENT_OP_STORED))
    assert (_cached(view), _restorable(view)) == (96, 0)
    view.on_event(_tiered(5, [], membership_pb2.KV_EVENT_OP_CLEARED))
    assert (_cached(view), _restorable(view)) == (0, 0)
    view.on_event(_tiered(6, HASHES[:2], membership_pb2.KV_EVENT_OP_DEMOTED))
    assert (_cached(view), _restorable(view)) == (0, 32)
    view.worker_left(W)
    assert (_cached(view), _restorable(view)) == (0, 0)


def test_a_restore_is_dearer_than_a_hit_and_cheaper_than_computing() -> None:
    """Three equal prefill workers: one holds the prompt, one can restore it, one must compute it."""
    workers = [simulated_worker(f"prefill-{index}", Role.PREFILL) for index in range(3)]
    decode = simulated_worker("decode-0", Role.DECODE)
    for worker in workers:
        worker.restore_ms_per_token = 0.02
    held = {workers[0].worker_id: 1024}
    restorable = {workers[1].worker_id: 1024}
    for available, expected in ((workers, 0), (workers[1:], 1), (workers[2:], 2)):
        policy = choose_policy("cache_aware", 1).policy
        request = RequestView(1040, 16, (), held, None, restorable_tokens=restorable)
        placement = policy.place(request, ClusterSnapshot(available, [decode], False), 0.0)
        assert placement.prefill[0] is workers[expected]
        assert placement.expected_cached_tokens == (1024 if expected < 2 else 0)
    workers[1].restore_ms_per_token = 1e6
    placement = choose_policy("cache_aware", 1).policy.place(
        request, ClusterSnapshot(workers[1:], [decode], False), 0.0
    )
    assert placement.expected_cached_tokens == 0, "to compute is faster"


def test_a_decode_worker_that_can_restore_most_of_a_prompt_computes_the_rest_itself() -> None:
    prefill, decode = simulated_worker("prefill-0", Role.PREFILL), simulated_worker("decode-0", Role.DECODE)
    snapshot = ClusterSnapshot([prefill], [decode])
    policy = choose_policy("cache_aware", 1).policy

    def place(restore_ms_per_token: float) -> Placement:
        decode.restore_ms_per_token = restore_ms_per_token
        restorable = {decode.worker_id: 1024}
        return policy.place(RequestView(1040, 16, restorable_tokens=restorable), snapshot, 0.0)

    assert place(0.002).is_local
    assert not place(2.0).is_local
    remote = place(2.0).candidates[-1].terms_ms
    assert remote["transfer"] == policy.place(RequestView(1040, 16), snapshot, 0.0).candidates[-1].terms_ms["transfer"]
