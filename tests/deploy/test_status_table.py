"""`tandem status` shows pools, load and lost blocks."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from deploy.status_table import conservation_errors, fallback_lines, status_tables

WORKER: dict[str, Any] = {
    "worker_id": "decode-0",
    "role": "decode",
    "load": {"running_requests": 3, "total_blocks": 200, "free_blocks": 150, "tokens_per_s": 88.25, "step_ms": 9.5},
    "block_conservation_error": "0",
    "fallbacks": [
        {"component": "kernel", "wanted": "native", "used": "torch", "reason": "no AVX-512", "count": 1}
    ],
    "peers": [
        {"worker_id": "prefill-0", "transport": "shm", "measured_gb_per_s": 5.1, "state": "up", "reason": "same host"}
    ],
}  # fmt: skip
STATUS = {"model": "m", "workers": [WORKER, {**WORKER, "worker_id": "prefill-0", "role": "prefill", "peers": []}]}


def printed(status: dict[str, Any], width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(status_tables(status))
    return capture.get()


def test_tables_show_pools_load_fallbacks_and_links() -> None:
    text = printed(STATUS)
    for part in (
        "m · 1 prefill + 1 decode · all KV blocks accounted for",
        "3+0",
        "25% of 200",
        "88.2",
        "no AVX-512",
        "shm",
        "5.1",
        "same host",
    ):
        assert part in text


def test_workers_fit_in_80_columns() -> None:
    text = printed(STATUS, 80)
    for part in ("run+wait", "tok/s", "decode-0", "25% of 200"):
        assert part in text
    load = {**WORKER["load"], "quarantined_blocks": 7}
    text = printed({"model": "m", "workers": [{**WORKER, "load": load, "block_conservation_error": 2}]}, 80)
    for part in ("unsafe", "lost", "some KV blocks are lost"):
        assert part in text


def test_what_is_wrong_with_blocks_has_a_column_only_where_something_is() -> None:
    assert "unsafe" not in printed(STATUS)
    assert "lost" not in printed(STATUS)


def test_prefill_comes_first_and_workers_are_in_the_order_of_their_numbers() -> None:
    names = ["decode-10", "decode-9", "prefill-0"]
    text = printed({"workers": [{"worker_id": name, "role": name.partition("-")[0]} for name in names]})
    assert sorted(names, key=text.index) == ["prefill-0", "decode-9", "decode-10"]


def test_a_link_is_shown_once_unless_its_ends_disagree() -> None:
    there = {**WORKER, "peers": [{"worker_id": "prefill-0", "transport": "shm", "state": "ready"}]}
    back = {**WORKER, "worker_id": "prefill-0", "role": "prefill"}
    agreeing = {**back, "peers": [{"worker_id": "decode-0", "transport": "shm", "state": "ready"}]}
    disagreeing = {**back, "peers": [{"worker_id": "decode-0", "transport": "tcp", "state": "ready"}]}
    assert printed({"workers": [there, agreeing]}).count("shm") == 1
    text = printed({"workers": [there, disagreeing]})
    assert "shm" in text
    assert "tcp" in text


def test_worker_that_is_just_starting_is_shown_without_load() -> None:
    assert "prefill-0" in printed({"workers": [{"worker_id": "prefill-0", "role": "prefill", "state": "starting"}]})


def test_no_workers_is_said() -> None:
    assert "no workers" in printed({"model": "m", "workers": []})


def test_worker_of_several_ranks_shows_them_and_others_none() -> None:
    details = {"tensor_parallel": "2", "rank_pids": "4711 4712"}
    text = printed({"model": "m", "workers": [{**WORKER, "details": details}]})
    assert "tensor parallel" in text
    assert "4711 4712" in text
    assert "tensor parallel" not in printed(STATUS)


def test_kernels_show_the_instruction_set_and_how_weights_are_kept() -> None:
    details = {
        "backend": "native",
        "isa": "avx512_bf16",
        "weights": "BF16_COMPRESSED",
        "weight_bytes": "202597056",
        "weight_bytes_on_huge_pages": "209715200",
        "compressed_exceptions": "3777",
        "compressed_plain_panels": "2",
    }
    text = printed({"model": "m", "workers": [{**WORKER, "details": details}]})
    for part in ("avx512_bf16", "bf16, compressed", "203", "100%"):
        assert part in text
    plain = {
        "backend": "native",
        "isa": "avx2",
        "weights": "BF16",
        "weight_bytes": "400",
        "weight_bytes_on_huge_pages": "0",
    }
    assert "0%" in printed({"model": "m", "workers": [{**WORKER, "details": plain}]})
    assert "kernels" not in printed(STATUS)


def test_lost_blocks_are_an_error_that_names_the_worker() -> None:
    assert conservation_errors(STATUS) == []
    broken = {"workers": [{**WORKER, "block_conservation_error": 2}]}
    assert conservation_errors(broken) == ["decode-0: 2 blocks are unaccounted for"]


def test_speculation_shows_acceptance_by_position_and_why_there_was_no_draft() -> None:
    counters = {
        "speculation_steps": 40,
        "speculation_drafts_accepted": 30,
        "speculation_proposed_at_1": 40,
        "speculation_accepted_at_1": 20,
        "speculation_proposed_at_2": 20,
        "speculation_accepted_at_2": 10,
        "speculation_proposed_at_3": 0,
        "speculation_eagle_steps": 10,
        "speculation_eagle_proposed_at_1": 10,
        "speculation_eagle_accepted_at_1": 3,
        "speculation_no_draft_no_match": 7,
        "speculation_no_draft_does_not_pay": 12,
        "speculation_no_draft_off": 0,
    }
    text = printed({"model": "m", "workers": [{**WORKER, "counters": counters}]})
    for part in ("1.75", "0.50 0.50 ", "does not pay 12, no match 7", "eagle", "1.30", "0.30"):
        assert part in text
    assert "speculation" not in printed(STATUS)


def test_tiers_show_what_they_hold_what_came_back_and_why_one_does_not_work() -> None:
    counters = {
        "kv_tier_host_bytes": 1.5e9,
        "kv_tier_host_capacity_bytes": 4e9,
        "kv_tier_host_hits": 30,
        "kv_tier_host_misses": 10,
        "kv_tier_restored_blocks_from_host": 30,
        "kv_tier_host_ms_per_block": 0.25,
        "kv_tier_evicted_lost_blocks": 7,
        "kv_tier_disk_bytes": 0,
        "kv_tier_disk_capacity_bytes": 1e10,
        "kv_tier_disk_hits": 0,
        "kv_tier_disk_misses": 0,
    }
    details = {"kv_tier_disk_disabled": "/kv: No space left on device"}
    text = printed({"model": "m", "workers": [{**WORKER, "counters": counters, "details": details}]})
    for part in ("KV tiers", "1.50", "4.00", "75%", "30", "0.25", "7", "ready", "No space left on device"):
        assert part in text
    assert "KV tiers" not in printed(STATUS)


def test_second_choices_are_a_line_each_with_everybody_who_took_them() -> None:
    slow = {"component": "backend", "wanted": "native", "used": "torch", "reason": "no compiler"}
    workers = [{"worker_id": f"decode-{number}", "role": "decode", "fallbacks": [slow]} for number in (10, 2)]
    assert fallback_lines({"workers": workers}) == ["decode-2, decode-10: backend torch instead of native: no compiler"]
    assert fallback_lines({"workers": []}) == []
