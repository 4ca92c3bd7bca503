"""`tandem scaler explain`: a journal as lines for a person: what was seen, decided and done, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from deploy.autoscaler.decide import Action, PoolDecision
from deploy.autoscaler.forecast import Forecaster
from deploy.autoscaler.journal import Entry, EventEntry, PolicyEntry, TickEntry
from deploy.autoscaler.replay import ReplayedTick
from deploy.autoscaler.signals import Demand


def explained(entries: Iterable[Entry], *, shows_all: bool = False) -> Iterator[str]:
    """Ticks that did something, raised an alert, or held for another reason than the tick before; or all of them."""
    before: tuple[object, ...] = ()
    for entry in entries:
        match entry:
            case PolicyEntry():
                dry = ", dry run: nothing is changed" if entry.policy.dry_run else ""
                yield f"{entry.at}  policy {entry.policy.name!r} is in force{dry}"
            case EventEntry():
                yield f"{entry.at}  {entry.what}"
            case TickEntry():
                key = _key(entry)
                if shows_all or entry.done or key != before:
                    yield from _tick(entry)
                before = key


def _key(entry: TickEntry) -> tuple[object, ...]:
    decision = entry.decision
    pools = (decision.prefill, decision.decode)
    return (decision.alerts, *((one.action, one.wish, one.current) for one in pools))


def _tick(entry: TickEntry) -> Iterator[str]:
    demand, snapshot = entry.snapshot.demand, entry.snapshot
    yield f"{entry.at}  {_demand(demand) if snapshot.has_heartbeat else 'nothing is known of the traffic'}"
    if snapshot.ttft_p90_ms:
        stages = ", ".join(f"{stage.value} {value:.0f}" for stage, value in snapshot.ttft_p90_ms.items())
        yield f"    p90 ms: {stages}; itl {snapshot.itl_p90_ms:.0f}"
    if (expected := entry.decision.forecast) is not None and expected.forecaster is not Forecaster.LAST_VALUE:
        yield f"    expected: {expected.requests_per_s:.2f} requests/s, by {expected.forecaster.value}"
    for alert in entry.decision.alerts:
        yield f"    alert: {alert}"
    for one in (entry.decision.prefill, entry.decision.decode):
        yield f"    {_pool(one)}"
    for what in entry.done:
        yield f"    -> {what}"


def _demand(demand: Demand) -> str:
    queued = f", {demand.queued_requests} queued" if demand.queued_requests else ""
    if not demand.requests_per_s:
        return f"no requests{queued}"
    return (
        f"{demand.requests_per_s:.2f} requests/s of {demand.uncached_tokens_per_request:.0f} uncached + "
        f"{demand.cached_tokens_per_request:.0f} cached tokens, {demand.output_tokens_per_request:.0f} out{queued}"
    )


def _pool(one: PoolDecision) -> str:
    action = one.action.value if one.action is Action.HOLD else f"{one.action.value} {one.change:+d}"
    return f"{one.pool.value}: {one.current} running or starting, {one.wish} wanted: {action} ({one.reason})"


def difference(tick: ReplayedTick) -> str:
    """The recorded decision and the one made anew."""
    recorded, anew = tick.recorded.decision, tick.decision
    lines = [tick.recorded.at]
    for before, now in ((recorded.prefill, anew.prefill), (recorded.decode, anew.decode)):
        if before != now:
            lines += [f"    recorded  {_pool(before)}", f"    anew      {_pool(now)}"]
    if recorded.alerts != anew.alerts:
        lines.append(f"    alerts    {', '.join(recorded.alerts) or 'none'} -> {', '.join(anew.alerts) or 'none'}")
    return "\n".join(lines)
