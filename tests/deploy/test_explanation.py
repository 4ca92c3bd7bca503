"""`tandem explain` shows the choice, the candidates' terms and the outcome."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from deploy.explanation import explanation_tables

EXPLANATION: dict[str, Any] = {
    "request_id": "chatcmpl-1",
    "admission": {"tier": "default", "waited_ms": 12.34},
    "placements": [
        {
            "choice": 0, "attempt": 1, "policy": "cache_aware", "reason": "lowest total", "is_fallback": False,
            "prompt_tokens": 200, "decode_worker_id": "decode-1", "prefill_worker_ids": ["prefill-0"],
            "expected_cached_tokens": 64, "no_match_because": "", "expected_prefill_ms": 8.0,
            "candidates": {
                "prefill": [
                    {"worker_id": "prefill-0", "total_ms": 9.5, "terms_ms": {"queue": 1.5, "prefill": 8.0}},
                    {"worker_id": "prefill-1", "total_ms": 11.0, "terms_ms": {"queue": 0.0, "prefill": 11.0}},
                ],
                "decode": [],
            },
            "outcome": {"prefill_worker_id": "prefill-0", "cached_tokens": 64, "prefill_ms": 8.2},
        }
    ],
}  # fmt: skip


def test_choice_candidates_terms_and_outcome_are_shown() -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(explanation_tables(EXPLANATION))
    shown = capture.get()
    assert "chatcmpl-1 · waited 12.3 ms" in shown
    assert "attempt 2: prefill prefill-0, decode decode-1 by cache_aware: lowest total" in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith("prefill-")]
    assert rows == [["prefill-0", "9.50", "1.50", "8.00"], ["prefill-1", "11.00", "0.00", "11.00"]]
    assert "prefill worker id prefill-0, cached tokens 64, prefill 8.2 ms" in shown
