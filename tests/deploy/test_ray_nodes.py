"""What Ray's cluster autoscaler is asked for, by a recording stand-in of its SDK call."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from deploy.ray_nodes import Bundles, NodeRequests

GPU, CPU = {"GPU": 1.0}, {"CPU": 2.0}
TIMEOUT_S = 60.0


class RecordingRay:
    """`ray.autoscaler.sdk.request_resources`, as far as it is used."""

    def __init__(self) -> None:
        self.requests: list[Bundles] = []
        self.has_begun = threading.Event()
        self.error: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Condition()

    def __call__(self, bundles: Bundles) -> None:
        self.has_begun.set()
        assert self.may_answer.wait(TIMEOUT_S)
        error = self.error  # of this call, whatever the test sets once it has been told
        self.requests.append(bundles)
        asyncio.run_coroutine_threadsafe(self._tell(), self._loop)
        if error is not None:
            raise error

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(TIMEOUT_S), self._asked:
            await self._asked.wait_for(lambda: len(self.requests) >= count)

    async def _tell(self) -> None:
        async with self._asked:
            self._asked.notify_all()


async def test_the_whole_of_what_shall_run_is_asked_for_and_taken_back_at_the_end() -> None:
    ray = RecordingRay()
    nodes = NodeRequests(ray)
    nodes.want("prefill-0", CPU)
    nodes.want("decode-0", GPU)
    await ray.wait_for(1)
    nodes.want("decode-1", GPU)
    await ray.wait_for(2)
    nodes.release("decode-0")
    await ray.wait_for(3)
    await nodes.close()
    assert ray.requests == [[GPU, CPU], [GPU, GPU, CPU], [GPU, CPU], []]


async def test_what_changes_during_a_call_is_one_request_after_it_and_no_change_is_none() -> None:
    ray = RecordingRay()
    ray.may_answer.clear()
    nodes = NodeRequests(ray)
    nodes.want("decode-0", GPU)
    await asyncio.sleep(0)
    for number in range(1, 5):
        nodes.want(f"decode-{number}", GPU)
    ray.may_answer.set()
    await ray.wait_for(1)
    while len(ray.requests[-1]) < 5:
        await ray.wait_for(len(ray.requests) + 1)
    assert len(ray.requests) <= 2
    nodes.want("decode-0", GPU)  # it was started again
    await nodes.close()
    assert ray.requests[-1] == []
    assert len(ray.requests) <= 3


async def test_a_ray_that_does_not_answer_is_told_and_asked_again_at_the_next_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ray = RecordingRay()
    ray.error = ConnectionError("the GCS is gone")
    nodes = NodeRequests(ray)
    with caplog.at_level(logging.WARNING):
        nodes.want("decode-0", GPU)
        await ray.wait_for(1)
        ray.error = None
        nodes.want("decode-0", GPU)
        await ray.wait_for(2)
        await nodes.close()
    assert "the GCS is gone" in caplog.text
    assert ray.requests == [[GPU], [GPU], []]


async def test_a_launcher_that_started_nothing_asks_nothing() -> None:
    ray = RecordingRay()
    await NodeRequests(ray).close()
    assert ray.requests == []


async def test_a_request_that_is_under_way_at_the_end_is_taken_back_after_it() -> None:
    ray = RecordingRay()
    ray.may_answer.clear()
    nodes = NodeRequests(ray)
    nodes.want("decode-0", GPU)
    assert await asyncio.to_thread(ray.has_begun.wait, TIMEOUT_S)
    async with asyncio.timeout(TIMEOUT_S):
        closing = asyncio.create_task(nodes.close())
        await asyncio.sleep(0)
        ray.may_answer.set()
        await closing
    assert ray.requests == [[GPU], []]
