"""`tandem explain`: what `/explain/{request_id}` says, as tables. Knows the field names of `router.decision_log`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Explanation = Mapping[str, Any]


def explanation_tables(explanation: Explanation) -> Group:
    """For each placement: the choice and its reason, the candidates by role, the best first, and what happened."""
    waited_ms = explanation.get("admission", {}).get("waited_ms", 0.0)
    parts: list[RenderableType] = [
        Text(f"{explanation['request_id']} · waited {waited_ms:.1f} ms in the router", style="bold")
    ]
    for placement in explanation["placements"]:
        parts.append(_headline(placement))
        parts += [_candidates(role, rows) for role, rows in placement["candidates"].items() if rows]
        if placement["outcome"]:
            parts.append(Text("what happened: " + _outcome(placement["outcome"])))
    return Group(*parts)


def _headline(placement: Explanation) -> Text:
    attempt = f", attempt {placement['attempt'] + 1}" if placement["attempt"] else ""
    because = f" ({placement['no_match_because']})" if placement["no_match_because"] else ""
    prefill = ", ".join(placement["prefill_worker_ids"]) or "nobody (the decode worker prefills)"
    return Text(
        f"\nchoice {placement['choice']}{attempt}: prefill {prefill}, decode {placement['decode_worker_id']} "
        f"by {placement['policy']}: {placement['reason']}; {placement['prompt_tokens']} prompt tokens, "
        f"{placement['expected_cached_tokens']} expected in the cache{because}"
    )


def _candidates(role: str, rows: list[dict[str, Any]]) -> Table:
    """One row for each worker; its terms add up to the total."""
    terms = list(dict.fromkeys(name for row in rows for name in row["terms_ms"]))
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(role)
    for name in ("total ms", *terms):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row['terms_ms'].get(name, 0.0):.2f}" for name in terms]
        table.add_row(row["worker_id"], f"{row['total_ms']:.2f}", *cells)
    return table


def _outcome(outcome: Explanation) -> str:
    return ", ".join(
        f"{name.removesuffix('_ms').replace('_', ' ')} {value:.1f} ms" if name.endswith("_ms")
        else f"{name.replace('_', ' ')} {value}"
        for name, value in outcome.items()
    )  # fmt: skip
