"""Who is next and who is shed: tiers, ageing, deadlines, round robin by deficit, longest queue drop; virtual time."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.identity import Tenant
from router.fair_queue import AGEING_S, QUANTUM_TOKENS, FairQueue, Tier, Waiting, tier_of

FAR = 1e9


def waiting(tenant: str, tokens: int = 100, tier: Tier = Tier.NORMAL, at_s: float = 0.0, **fields: float) -> Waiting:
    return Waiting(Tenant(tenant), tier, tokens, fields.get("deadline_s", FAR), at_s, fields.get("weight", 1.0))


def drain(queue: FairQueue, now_s: float = 0.0) -> list[Waiting]:
    return [popped for _ in range(len(queue)) if (popped := queue.pop(now_s)) is not None]


def test_priorities_are_tiers() -> None:
    assert [tier_of(priority) for priority in (-3, 0, 7)] == [Tier.CRITICAL, Tier.NORMAL, Tier.SHEDDABLE]


def test_a_higher_tier_goes_first_whoever_came_first() -> None:
    queue = FairQueue(10)
    low, normal, high = (waiting("a", tier=tier) for tier in (Tier.SHEDDABLE, Tier.NORMAL, Tier.CRITICAL))
    for one in (low, normal, high):
        queue.push(one)
    assert drain(queue) == [high, normal, low]


def test_waiting_long_enough_moves_up_so_nobody_starves() -> None:
    queue = FairQueue(1000)
    old = waiting("a", tier=Tier.SHEDDABLE)
    queue.push(old)
    now_s = 0.0
    for _ in range(30):  # a stream of critical requests that never ends
        now_s += 1.0
        queue.push(waiting("b", tier=Tier.CRITICAL, at_s=now_s))
        if queue.pop(now_s) is old:
            break
    assert 2 * AGEING_S <= now_s <= 2 * AGEING_S + 2


def test_within_a_tenant_the_earliest_deadline_goes_first() -> None:
    queue = FairQueue(10)
    late, early = waiting("a", deadline_s=9.0), waiting("a", deadline_s=3.0)
    queue.push(late)
    queue.push(early)
    assert drain(queue) == [early, late]


def test_tenants_share_tokens_not_requests() -> None:
    """One tenant's prompts are ten times as long: of the first tokens served both have about half."""
    queue = FairQueue(10_000)
    for _ in range(200):
        queue.push(waiting("long", tokens=5000))
    for _ in range(2000):
        queue.push(waiting("short", tokens=500))
    tokens: Counter[str] = Counter()
    while sum(tokens.values()) < 500_000:
        popped = queue.pop(0.0)
        assert popped is not None
        tokens[popped.tenant] += popped.num_tokens
    assert abs(tokens["long"] - tokens["short"]) <= 5000 + QUANTUM_TOKENS


def test_weights_give_a_larger_share() -> None:
    queue = FairQueue(10_000)
    for _ in range(1000):
        queue.push(waiting("a", tokens=1000, weight=3.0))
        queue.push(waiting("b", tokens=1000))
    first = Counter(popped.tenant for _ in range(400) if (popped := queue.pop(0.0)) is not None)
    assert 280 <= first[Tenant("a")] <= 320


def test_f32_a_flood_does_not_delay_the_polite_tenant() -> None:
    queue = FairQueue(512)
    for _ in range(500):
        queue.push(waiting("flood", tokens=1000))
    polite = waiting("polite", tokens=1000, at_s=1.0)
    queue.push(polite)
    assert polite in [queue.pop(1.0) for _ in range(3)]


def test_f32_a_flood_that_has_waited_long_does_not_delay_the_polite_tenant_either() -> None:
    """One request a second is served, so the flood's are old when the polite tenant comes, in any tier."""
    for tier in (Tier.NORMAL, Tier.SHEDDABLE):
        queue, now_s = FairQueue(512), 0.0
        for _ in range(500):
            queue.push(waiting("flood", tokens=1000, tier=tier))
        while now_s < 4 * AGEING_S:
            now_s += 1.0
            queue.pop(now_s)
        polite = waiting("polite", tokens=1000, tier=tier, at_s=now_s)
        assert queue.tokens_before(polite, now_s) <= 2 * QUANTUM_TOKENS
        queue.push(polite)
        assert polite in [queue.pop(now_s) for _ in range(3)]


def test_an_old_tier_takes_turns_with_the_one_above_and_no_more_than_its_turns() -> None:
    queue = FairQueue(1000)
    for _ in range(200):
        queue.push(waiting("flood", tokens=1000))
    for _ in range(20):
        queue.push(waiting("b", tokens=500, tier=Tier.CRITICAL, at_s=AGEING_S))
    newcomer = waiting("b", tokens=500, tier=Tier.CRITICAL, at_s=AGEING_S)
    assert queue.tokens_before(newcomer, AGEING_S - 0.1) == 20 * 500
    assert queue.tokens_before(newcomer, AGEING_S) == 20 * 500 + 21 * 500
    served = [queue.pop(AGEING_S) for _ in range(30)]
    critical = [one for one in served if one is not None and one.tier is Tier.CRITICAL]
    assert len(critical) == 20  # twice as many, for they are half as long
    assert all(one is not None and one.tier is Tier.NORMAL for one in (queue.pop(AGEING_S) for _ in range(5)))


def test_f32_a_full_queue_sheds_the_flood_and_takes_the_polite_tenant_in() -> None:
    queue = FairQueue(100)
    for number in range(100):
        assert queue.push(waiting("flood", at_s=number)) is None
    polite = waiting("polite", at_s=200.0)
    shed = queue.push(polite)
    assert shed is not None
    assert (shed.tenant, shed.arrived_s) == ("flood", 99)  # its newest: the others have waited
    assert len(queue) == 100
    flood = waiting("flood", at_s=201.0)
    assert queue.push(flood) is flood


def test_a_full_queue_sheds_a_lower_tier_for_a_higher_one() -> None:
    queue = FairQueue(2)
    normal, sheddable = waiting("a"), waiting("a", tier=Tier.SHEDDABLE)
    queue.push(normal)
    queue.push(sheddable)
    critical = waiting("a", tier=Tier.CRITICAL)
    assert queue.push(critical) is sheddable
    another = waiting("b", tier=Tier.SHEDDABLE)
    assert queue.push(another) is another


def test_a_request_that_leaves_is_never_next() -> None:
    queue = FairQueue(10)
    first, second = waiting("a"), waiting("a")
    queue.push(first)
    queue.push(second)
    queue.remove(first)
    queue.remove(first)
    assert drain(queue) == [second]
    assert queue.pop(0.0) is None


def test_a_flood_of_one_tenant_is_before_another_one_only_by_its_turns() -> None:
    queue = FairQueue(1000)
    for _ in range(200):
        queue.push(waiting("flood", tokens=500))
    newcomer = waiting("small", tokens=300)
    assert queue.tokens_before(waiting("flood", tokens=300), 0.0) == 200 * 500
    assert queue.tokens_before(newcomer, 0.0) == QUANTUM_TOKENS  # one turn of the other
    assert queue.tokens_before(waiting("small", tokens=300, tier=Tier.SHEDDABLE), 0.0) == 200 * 500
    queue.push(newcomer)
    gone_before = drain(queue).index(newcomer)
    assert gone_before * 500 <= QUANTUM_TOKENS + 500
    queue.push(newcomer)
    assert queue.tokens_before(waiting("small", tokens=300), 0.0) == 300  # its own; nobody else is there


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "pop", "remove"]),
            st.sampled_from("abc"),
            st.sampled_from(list(Tier)),
            st.integers(0, 20_000),
            st.floats(0, 3),
        ),
        max_size=120,
    )
)
def test_nobody_is_lost_or_served_twice(script: list[tuple[str, str, Tier, int, float]]) -> None:
    queue, inside, now_s = FairQueue(20), set[int](), 0.0
    known: dict[int, Waiting] = {}
    for action, tenant, tier, tokens, passed_s in script:
        now_s += passed_s
        if action == "push":
            one = waiting(tenant, tokens, tier, now_s)
            known[id(one)] = one
            shed = queue.push(one)
            if shed is not one:
                inside.add(id(one))
            if shed is not None and shed is not one:
                inside.remove(id(shed))
        elif action == "pop":
            popped = queue.pop(now_s)
            assert (popped is None) == (not inside)
            if popped is not None:
                inside.remove(id(popped))
        elif inside:
            gone = known[min(inside)]
            queue.remove(gone)
            inside.remove(id(gone))
        assert len(queue) == len(inside)
        # Whoever has almost no share of the turns comes after everybody, as long as no tier is old.
        last = waiting("new", tier=Tier.SHEDDABLE, weight=1e-9)
        assert queue.tokens_before(last, 0.0) == sum(known[number].num_tokens for number in inside)
    assert {id(one) for one in drain(queue, now_s)} == inside
