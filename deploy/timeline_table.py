"""A request's way through the cluster as a table: where its time went, and which worker did what."""

from __future__ import annotations

import statistics

from rich.table import Table
from tandem.v1 import common_pb2

from deploy.client import AnswerRecord

MISSING = "the server sent no timeline"


def timeline_table(record: AnswerRecord) -> Table:
    """Stages in order of time, then the stream as the client saw it."""
    table = Table(title="timeline", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_column(justify="left", style="dim")
    for row in (*_stages(record.timeline), *_stream(record)):
        table.add_row(*row)
    return table


def _stages(timeline: common_pb2.Timeline | None) -> list[tuple[str, str, str]]:
    if timeline is None:
        return [(MISSING, "", "")]
    prefilled_by = timeline.prefill_worker_id or f"{timeline.decode_worker_id} (locally)"
    moved = f"{timeline.kv_bytes / 2**20:.1f} MiB in {timeline.kv_frames} frames over {timeline.transport}"
    attempts = f", attempt {timeline.attempts}" if timeline.attempts > 1 else ""
    return [
        ("placed", _ms(timeline.placed_us), f"admitted to chosen: prefill {prefilled_by}, decode "
                                            f"{timeline.decode_worker_id}"),
        ("reserved", _ms(timeline.reserved_us), "KV blocks on the decode worker"),
        ("prefill queue", _ms(timeline.prefill_queued_us), f"waited on {prefilled_by}"),
        ("prefill", _ms(timeline.prefill_compute_us), f"computed by {prefilled_by}{attempts}"),
        ("transfer, exposed", _ms(timeline.transfer_exposed_us), "what the prefill did not hide"),
        ("transfer, total", _ms(timeline.transfer_total_us), moved if timeline.kv_bytes else "no KV moved"),
        ("decode wait", _ms(timeline.decode_wait_us), f"verified to first step on {timeline.decode_worker_id}"),
        ("first token", _ms(timeline.first_token_us), "received by the decode worker to its first token"),
    ]  # fmt: skip


def _stream(record: AnswerRecord) -> list[tuple[str, str, str]]:
    rows = [("first text here", f"{record.first_piece_s * 1e3:.1f} ms", "as this client saw it")]
    if record.gaps_s:
        gaps_ms = sorted(gap_s * 1e3 for gap_s in record.gaps_s)
        worst_ms = gaps_ms[min(len(gaps_ms) - 1, int(len(gaps_ms) * 0.99))]
        rows.append(("per token", f"{statistics.median(gaps_ms):.1f} ms", f"median; p99 {worst_ms:.1f} ms"))
    tokens = f"{record.prompt_tokens} prompt ({record.cached_tokens} cached), {record.completion_tokens} generated"
    rows.append(("tokens", str(record.prompt_tokens + record.completion_tokens), f"{tokens}; {record.finish_reason}"))
    return rows


def _ms(duration_us: int) -> str:
    return f"{duration_us / 1e3:.1f} ms"
