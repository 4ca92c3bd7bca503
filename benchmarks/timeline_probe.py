"""Requests over the gRPC front that bring their timeline back: where the time to the first token went.

A sample beside the load, not the load itself: HTTP answers carry no timeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from tandem.v1 import inference_pb2, inference_pb2_grpc

CALL_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class TimelineSample:
    """One request's stages in milliseconds, in the order in which they follow each other."""

    route_ms: float
    prefill_queue_ms: float
    prefill_compute_ms: float
    exposed_transfer_ms: float
    decode_wait_ms: float
    ttft_ms: float  # as the decode worker saw it
    transfer_total_ms: float
    kv_bytes: int
    transport: str  # empty: prefilled where it was decoded

    @property
    def kv_gb_per_s(self) -> float | None:
        """Bytes over the time from the first frame to the verified last one; it holds the prefill's own pace."""
        return self.kv_bytes / self.transfer_total_ms / 1e6 if self.kv_bytes and self.transfer_total_ms else None


STAGES = ("route_ms", "prefill_queue_ms", "prefill_compute_ms", "exposed_transfer_ms", "decode_wait_ms")


async def probe_timelines(
    address: str, prompts: Sequence[tuple[int, ...]], interval_s: float = 0.0
) -> list[TimelineSample]:
    """One request of two tokens for each prompt, `interval_s` apart (0: one after another).

    Raises `ConnectionError` naming the status when a request fails.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        if interval_s <= 0:
            return [await _probe(stub, prompt) for prompt in prompts]
        tasks = []
        for prompt in prompts:
            tasks.append(asyncio.create_task(_probe(stub, prompt)))
            await asyncio.sleep(interval_s)
        return list(await asyncio.gather(*tasks))


async def _probe(stub: inference_pb2_grpc.InferenceAsyncStub, prompt: tuple[int, ...]) -> TimelineSample:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        max_tokens=2,
        temperature=0.0,
        ignore_eos=True,
        return_timeline=True,
    )
    last = inference_pb2.GenerateResponse()
    try:
        async for response in stub.Generate(request, timeout=CALL_TIMEOUT_S):
            last = response
    except grpc.aio.AioRpcError as error:
        raise ConnectionError(f"gRPC Generate: {error.code().name}: {error.details()}") from error
    timeline = last.timeline
    return TimelineSample(
        route_ms=timeline.placed_us / 1e3,
        prefill_queue_ms=timeline.prefill_queued_us / 1e3,
        prefill_compute_ms=timeline.prefill_compute_us / 1e3,
        exposed_transfer_ms=timeline.transfer_exposed_us / 1e3,
        decode_wait_ms=timeline.decode_wait_us / 1e3,
        ttft_ms=timeline.first_token_us / 1e3,
        transfer_total_ms=timeline.transfer_total_us / 1e3,
        kv_bytes=timeline.kv_bytes,
        transport=timeline.transport,
    )
