"""Faults of text and streaming that other servers had, asked for over HTTP, whole and streamed, and over gRPC."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fronts import Front, Reply, Usage
from tests.router.test_openai_features import says


async def ask(front: Front, router: RunningRouter, **fields: Any) -> Reply:
    return await front.ask(router, **{"prompt": "abc", "max_tokens": 50, "temperature": 0, **fields})


# --- bytes to text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(1, 2, 3), (2,), (1,), (3,)])
async def test_d1_an_emoji_over_several_tokens_is_one_character(
    cuts: tuple[int, ...], router: RunningRouter, front: Front
) -> None:
    data = "😀".encode()
    router.workers[-1].script = says(*(data[a:b] for a, b in zip((0, *cuts), (*cuts, 4), strict=True)))
    reply = await ask(front, router)
    assert [chunk.text for chunk in reply.chunks if chunk.text] == ["😀"]


async def test_d1_half_characters_wait_for_their_other_half(router: RunningRouter, front: Front) -> None:
    data = "ďábelské 😀!".encode()
    router.workers[-1].script = says(*(data[i : i + 1] for i in range(len(data))))
    reply = await ask(front, router)
    assert reply.text == "ďábelské 😀!"
    assert all("\ufffd" not in chunk.text for chunk in reply.chunks)


async def test_d2_incomplete_bytes_before_a_token_that_begins_with_a_space(router: RunningRouter, front: Front) -> None:
    router.workers[-1].script = says(b"\xe4", b"\xbd", b" the")
    assert (await ask(front, router)).text == "\ufffd the"


async def test_d3_s_b35_bytes_that_are_no_text_raise_nothing_and_end_as_replacement_characters(
    router: RunningRouter, front: Front
) -> None:
    chance = random.Random(3)
    noise = bytes(chance.randrange(256) for _ in range(400))
    for data in (noise, b"ok\xff\x80\xf0\x9f", b"\x80" * 20):
        router.workers[-1].script = says(*(data[i : i + 3] for i in range(0, len(data), 3)))
        reply = await ask(front, router, max_tokens=len(data))
        assert reply.is_whole
        assert reply.text == data.decode("utf-8", "replace")
    router.workers[-1].script = None
    assert (await ask(front, router, max_tokens=3)).usage.completion_tokens == 3


# --- stop strings -----------------------------------------------------------------------------------------------------


async def test_d5_nothing_of_a_stop_string_shows_and_the_worker_is_told_to_end(
    router: RunningRouter, front: Front
) -> None:
    worker = router.workers[-1]
    worker.script = says(b"ABC", b"DEF", b"G", b"HI", b"J", b"KLM", b"NOP")
    reply = await ask(front, router, stop=["DEFGHIJ"])
    assert reply.text == "ABC"
    assert reply.finish_reasons == {0: "stop"}
    assert reply.usage.completion_tokens == 10
    await router.until(lambda: set(router.bookings()) == {(0, 0, 0)})
    worker.script = says(b"DEF", b"G", b"HI", b"J")
    assert (await ask(front, router, stop=["DEFGHIJ"])).text == ""


async def test_d6_text_tokens_and_logprobs_of_every_message_agree(router: RunningRouter, front: Front) -> None:
    router.workers[-1].script = says(b"ab x", b"y", b"q x", b"yz", b"!")
    reply = await ask(front, router, stop=["xyz"], logprobs=1)
    assert reply.text == "ab xyq "
    for chunk in reply.chunks:
        assert "".join(chunk.tokens) == chunk.text
        assert len(chunk.tokens) == len(chunk.logprobs) == len(chunk.num_alternatives)


async def test_d8_text_is_cut_before_the_stop_and_usage_counts_its_token(router: RunningRouter, front: Front) -> None:
    router.workers[-1].script = says(b"wait", b"...", b"more")
    reply = await ask(front, router, stop=[".."])
    assert reply.text == "wait"
    assert reply.usage.completion_tokens == 6  # a byte is a token here: "wait" and the stop's two


# --- choices and usage ------------------------------------------------------------------------------------------------


async def test_a1_a2_usage_of_two_choices_is_their_sum_and_comes_once_at_the_end(
    router: RunningRouter, front: Front
) -> None:
    reply = await ask(front, router, n=2, max_tokens=5, temperature=1, seed=1)
    assert reply.usages == [Usage(3, 10, 13, 0)]
    assert reply.finish_reasons == {0: "length", 1: "length"}


async def test_a3_a4_choices_are_all_there_differ_and_repeat_with_their_seed(
    router: RunningRouter, front: Front
) -> None:
    replies = [await ask(front, router, n=8, temperature=1, seed=1, max_tokens=12) for _ in range(2)]
    assert [sorted({chunk.index for chunk in reply.chunks}) for reply in replies] == [list(range(8))] * 2
    assert replies[0].texts == replies[1].texts
    assert len(set(replies[0].texts)) == 8
    assert {submit.sampling.seed for submit in router.workers[-1].submits} == {1}


async def test_a4_routers_beside_each_other_draw_differently_where_no_seed_is_named(
    start_router: StartRouter, front: Front
) -> None:
    """Answers to one prompt at two of them are two answers; one router draws the same again after a restart."""
    seeds: list[set[int]] = []
    for router_id in ("router-0", "router-1", "router-0"):
        router = await start_router(router_id=router_id)
        worker = await router.add_worker(router.new_worker(f"both-{len(seeds)}", "aggregated"))
        await asyncio.gather(*(ask(front, router, max_tokens=1) for _ in range(3)))
        seeds.append({submit.sampling.seed for submit in worker.submits})
    assert not seeds[0] & seeds[1]
    assert seeds[0] == seeds[2]


async def test_a6_logprobs_zero_is_the_chosen_token_only(router: RunningRouter, front: Front) -> None:
    reply = await ask(front, router, logprobs=0, max_tokens=5)
    logprobs = [value for chunk in reply.chunks for value in chunk.logprobs]
    assert logprobs == [-0.25] * 5
    assert {number for chunk in reply.chunks for number in chunk.num_alternatives} == {0}
    assert "".join(token for chunk in reply.chunks for token in chunk.tokens) == reply.text


async def test_a8_the_length_cap_is_heeded_and_said(router: RunningRouter, front: Front) -> None:
    reply = await ask(front, router, max_tokens=3, ignore_eos=True)
    assert (reply.usage.completion_tokens, reply.finish_reasons) == (3, {0: "length"})
    assert router.workers[-1].submits[-1].sampling.max_tokens == 3
