"""The stages of a measurement: each asks a server for one kind of work and adds its figures.

    decode         one stream: tokens/s, TTFT, ITL
    batch          many streams that decode together
    prefill        one long prompt, and how its KV was handed over where the server tells
    long-context   one stream behind a long prompt
    interference   streams that decode while a long prompt arrives every few seconds

Every run has its own prompts, so no prefix cache helps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import numpy as np

from benchmarks.load_run import LoadRun, RunLimits, run_closed_loop, run_open_loop
from benchmarks.measurement import Measurement, RunFailed, Shape
from benchmarks.openai_client import OpenAiClient
from benchmarks.request_record import Outcome, RequestRecord
from benchmarks.statistics import percentile
from benchmarks.ttft_stages import TtftStages
from benchmarks.workload import LengthLaw, Workload, merged, plan_synthetic

RUN_TIMEOUT_S = 300.0
MAX_BATCH_OUTPUT_TOKENS = 1024
# More than any server here decodes in that time: the streams are cut off when the window is over.
INTERFERENCE_OUTPUT_TOKENS = 4_000
LONG_PROMPT_OUTPUT_TOKENS = 8

Progress = Callable[[str], None]
Stage = Callable[[OpenAiClient, Shape, Measurement, Progress], Awaitable[None]]


async def warm_up(client: OpenAiClient, shape: Shape) -> None:
    """One short request, so that no figure pays for a first time. Raises `RunFailed` when it fails."""
    await _run(client, 1, shape.prompt_tokens, 8, seed=999)


async def measure_single_stream(
    client: OpenAiClient, shape: Shape, measurement: Measurement, progress: Progress
) -> None:
    records: list[RequestRecord] = []
    for run in range(shape.runs):
        progress(f"one stream, run {run + 1} of {shape.runs}")
        records += (await _run(client, 1, shape.prompt_tokens, shape.single_output_tokens, seed=run)).records
    measurement.add("one stream: decode", "tokens/s", [1 / (record.tpot_s or np.inf) for record in records])
    measurement.add("one stream: TTFT", "ms", [_ttft_ms(record) for record in records])
    _add_itl(measurement, "one stream", [[record] for record in records])


async def measure_batch(client: OpenAiClient, shape: Shape, measurement: Measurement, progress: Progress) -> None:
    output_tokens = shape.batch_output_tokens
    runs: list[list[RequestRecord]] = []
    while len(runs) < shape.runs:
        progress(f"{shape.batch_streams} streams of {output_tokens} tokens, run {len(runs) + 1} of {shape.runs}")
        # A seed is used once: a prompt that was sent before could be in a prefix cache.
        seed = 1000 * output_tokens + len(runs)
        load = await _run(client, shape.batch_streams, shape.prompt_tokens, output_tokens, seed)
        if common_decode_window(load.records) is None:
            # The first stream was through before the last had begun: longer answers, and all runs anew.
            output_tokens, runs = 2 * output_tokens, []
            if output_tokens > MAX_BATCH_OUTPUT_TOKENS:
                raise RunFailed(f"{shape.batch_streams} streams never decode together: prefill is too slow for it")
            continue
        runs.append(load.records)
    name = f"{shape.batch_streams} streams"
    measurement.add(f"{name}: decode while all decode", "tokens/s", [rate_while_all_decode(one) for one in runs])
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        measurement.add(f"{name}: TTFT {label}", "ms", [percentile([_ttft_ms(r) for r in one], share) for one in runs])
    _add_itl(measurement, name, runs)


async def measure_prefill(client: OpenAiClient, shape: Shape, measurement: Measurement, progress: Progress) -> None:
    rates, ttfts_ms = [], []
    stages: list[TtftStages] = []
    for run in range(shape.runs):
        progress(f"prefill of {shape.prefill_tokens} tokens, run {run + 1} of {shape.runs}")
        (record,) = (await _run(client, 1, shape.prefill_tokens, 1, seed=200 + run)).records
        ttfts_ms.append(_ttft_ms(record))
        rates.append(shape.prefill_tokens / ttfts_ms[-1] * 1e3)
        if record.stages is not None:
            stages.append(record.stages)
    measurement.add(f"prefill of {shape.prefill_tokens} tokens, by TTFT", "tokens/s", rates)
    measurement.add(f"TTFT of a {shape.prefill_tokens}-token prompt", "ms", ttfts_ms)
    _add_handoff(measurement, f"KV handoff of {shape.prefill_tokens} tokens", stages)


async def measure_long_context(
    client: OpenAiClient, shape: Shape, measurement: Measurement, progress: Progress
) -> None:
    rates = []
    for run in range(shape.runs):
        progress(f"one stream behind {shape.prefill_tokens} tokens, run {run + 1} of {shape.runs}")
        load = await _run(client, 1, shape.prefill_tokens, shape.single_output_tokens, seed=300 + run)
        rates += [1 / (record.tpot_s or np.inf) for record in load.records]
    measurement.add(f"one stream behind {shape.prefill_tokens} tokens: decode", "tokens/s", rates)


async def measure_interference(
    client: OpenAiClient, shape: Shape, measurement: Measurement, progress: Progress
) -> None:
    """Tokens and gaps of the streams inside the window alone; a long prompt without an answer by its end is said."""
    name = f"{shape.interference_streams} streams and a {shape.prefill_tokens}-token prompt every "
    name += f"{shape.interference_interval_s:g} s"
    window = _window(shape)
    rates, gaps_p50_ms, gaps_p99_ms, longest_ms, ttfts_ms, answered = [], [], [], [], [], []
    for run in range(shape.runs):
        progress(f"{name}, run {run + 1} of {shape.runs}")
        streams, prompts = await _interfere(client, shape, seed=400 + run)
        gaps = [gap for record in streams for gap in _gaps_in_window(record, *window)]
        if not gaps:
            raise RunFailed(f"no stream brought a token while long prompts arrived ({streams[0].detail})")
        rates.append(sum(weight for _, weight in gaps) / shape.interference_window_s)
        gaps += [silence for record in streams for silence in _open_silence(record, *window)]
        weights = [weight for _, weight in gaps]
        gaps_p50_ms.append(percentile([gap_s * 1e3 for gap_s, _ in gaps], 0.5, weights))
        gaps_p99_ms.append(percentile([gap_s * 1e3 for gap_s, _ in gaps], 0.99, weights))
        longest_ms.append(max(gap_s * 1e3 for gap_s, _ in gaps))
        ended = [_ttft_ms(record) for record in prompts if record.chunk_times_s]
        answered.append(100 * len(ended) / len(prompts))
        if ended:
            ttfts_ms.append(percentile(ended, 0.5))
    measurement.add(f"{name}: streamed", "tokens/s", rates)
    measurement.add(f"{name}: ITL p50", "ms", gaps_p50_ms)
    measurement.add(f"{name}: ITL p99", "ms", gaps_p99_ms)
    measurement.add(f"{name}: longest gap", "ms", longest_ms)
    measurement.add(f"{name}: prompts answered in time", "%", answered)
    if ttfts_ms:
        measurement.add(f"{name}: TTFT of an answered prompt", "ms", ttfts_ms)
    else:
        measurement.missing[f"{name}: TTFT"] = "no long prompt was answered before the window was over"


async def _interfere(client: OpenAiClient, shape: Shape, seed: int) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """The records of the streams and of the long prompts. What is unfinished at the end is cut off, as planned."""
    streams = plan_synthetic(
        _shape(shape.prompt_tokens, INTERFERENCE_OUTPUT_TOKENS), np.zeros(shape.interference_streams), seed
    )
    start_s, end_s = _window(shape)
    times_s = np.arange(start_s, end_s, shape.interference_interval_s)
    prompts = plan_synthetic(_shape(shape.prefill_tokens, LONG_PROMPT_OUTPUT_TOKENS), times_s, seed + 50)
    run = await run_open_loop(merged([streams, prompts]), client, end_s, RunLimits(drain_timeout_s=0.0))
    for record in run.records:
        if record.outcome not in (Outcome.OK, Outcome.UNFINISHED):
            raise RunFailed(f"a request failed: {record.outcome.value} {record.http_status} {record.detail}")
    # `merged` sorts by time and keeps the order of equals: the streams, all due at 0, come first.
    return run.records[: len(streams)], run.records[len(streams) :]


def _window(shape: Shape) -> tuple[float, float]:
    return shape.interference_lead_s, shape.interference_lead_s + shape.interference_window_s


def _gaps_in_window(record: RequestRecord, start_s: float, end_s: float) -> list[tuple[float, int]]:
    """(gap, tokens) of the chunks that came while long prompts arrived."""
    times_s = record.chunk_times_s
    gaps = [gap for gap, time_s in zip(record.itl_gaps_s(), times_s[1:], strict=True) if start_s < time_s <= end_s]
    return gaps


def _open_silence(record: RequestRecord, start_s: float, end_s: float) -> list[tuple[float, int]]:
    """The silence in which the window ended, as one gap: a stream that stalls for good would have none otherwise."""
    if record.outcome is not Outcome.UNFINISHED or not record.chunk_times_s:
        return []
    last_s = max(record.chunk_times_s[-1], start_s)
    return [(end_s - last_s, 1)] if last_s < end_s else []


def _add_handoff(measurement: Measurement, name: str, stages: Sequence[TtftStages]) -> None:
    if not stages:
        measurement.missing[name] = "the server tells no timeline"
        return
    if not all(one.transport for one in stages):
        measurement.missing[name] = "the prompts were prefilled where they were decoded: nothing was handed over"
        return
    measurement.add(f"{name} over {stages[0].transport}: size", "MB", [one.kv_bytes / 1e6 for one in stages])
    measurement.add(f"{name}: exposed transfer", "ms", [one.exposed_transfer_ms for one in stages])
    measurement.add(f"{name}: prefill compute", "ms", [one.prefill_compute_ms for one in stages])


def common_decode_window(records: Sequence[RequestRecord]) -> tuple[float, float] | None:
    """From the last first token to the first end: all decode, nothing prefills, nothing has thinned out."""
    start_s = max(record.chunk_times_s[0] for record in records)
    end_s = min(record.chunk_times_s[-1] for record in records)
    return (start_s, end_s) if end_s > start_s else None


def rate_while_all_decode(records: Sequence[RequestRecord]) -> float:
    """Tokens a second in the window in which all streams decode. Raises `RunFailed` when there is none."""
    window = common_decode_window(records)
    if window is None:
        raise RunFailed("the first stream ended before the last began: there was no moment at which all decoded")
    start_s, end_s = window
    num_tokens = sum(
        tokens
        for record in records
        for time_s, tokens in zip(record.chunk_times_s, record.chunk_tokens, strict=True)
        if start_s < time_s <= end_s
    )
    return num_tokens / (end_s - start_s)


async def _run(client: OpenAiClient, streams: int, prompt_tokens: int, output_tokens: int, seed: int) -> LoadRun:
    """`streams` requests at once. Raises `RunFailed` with the first failure."""
    plan = plan_synthetic(_shape(prompt_tokens, output_tokens), np.zeros(streams), seed)
    run = await run_closed_loop(plan, client, streams, num_warmup=0, timeout_s=RUN_TIMEOUT_S)
    for record in run.records:
        if not record.is_ok:
            raise RunFailed(f"a request failed: {record.outcome.value} {record.http_status} {record.detail}")
        if record.num_output_tokens != output_tokens:
            raise RunFailed(f"a request brought {record.num_output_tokens} tokens, {output_tokens} were asked for")
    return run


def _shape(prompt_tokens: int, output_tokens: int) -> Workload:
    return Workload(LengthLaw(prompt_tokens, prompt_tokens), LengthLaw(output_tokens, output_tokens))


def _ttft_ms(record: RequestRecord) -> float:
    if record.ttft_s is None:
        raise RunFailed("a request brought no token")
    return record.ttft_s * 1e3


def _add_itl(measurement: Measurement, name: str, runs: Sequence[Sequence[RequestRecord]]) -> None:
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        values = []
        for records in runs:
            gaps = [gap for record in records for gap in record.itl_gaps_s()]
            values.append(percentile([gap_s * 1e3 for gap_s, _ in gaps], share, [weight for _, weight in gaps]))
        measurement.add(f"{name}: ITL {label}", "ms", values)


STAGES: Final[dict[str, Stage]] = {
    "decode": measure_single_stream,
    "batch": measure_batch,
    "prefill": measure_prefill,
    "long-context": measure_long_context,
    "interference": measure_interference,
}
