"""Faults that show after very many handoffs, or only at one moment of them: both workers in this process."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.v1 import common_pb2

from tests.integration.in_process_pair import MOMENTS, running_pair
from tests.integration.mock_tokens import VOCAB_SIZE, expected_tokens

NUM_ABORTS = 1_000
NUM_ANSWERS = 10_000
NUM_LANES = 32


def after(num_turns: int, act: Callable[[], object]) -> Callable[[], None]:
    """Acts so many turns of the event loop after each call."""

    def wait(left: int) -> None:
        if left == 0:
            act()
        else:
            asyncio.get_running_loop().call_soon(wait, left - 1)

    return lambda: wait(num_turns)


async def test_s_b49_a_thousand_aborts_around_the_moment_at_which_prefill_is_done(tmp_path: Path) -> None:
    """Another request runs beside each, in a pool so small that it soon has the blocks that an abort gave back (and so
    large that what still waits to be sent is never half of it: more would be refused as overload)."""
    choose, ends = random.Random(49), Counter[str]()
    async with running_pair(tmp_path, "shm", num_blocks=32) as pair:
        for number in range(NUM_ABORTS):
            moment = MOMENTS[number % len(MOMENTS)]
            prompts = [[choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(1, 60))] for _ in range(2)]
            name = f"aborted-{number}"
            pair.at = {moment: after(choose.randrange(8), lambda name=name: pair.cancel(name))}  # type: ignore[misc]
            aborted, other = await asyncio.gather(
                pair.ask(name, prompts[0], 3), pair.ask(f"other-{number}", prompts[1], 3)
            )
            assert other.token_ids == expected_tokens(prompts[1], 3), other
            assert aborted.failure is None, aborted
            is_cancelled = aborted.last.finish_reason == common_pb2.FINISH_REASON_CANCELLED
            expected = expected_tokens(prompts[0], 3)
            assert aborted.token_ids == expected[: len(aborted.token_ids) if is_cancelled else 3]
            ends[f"{moment} cancelled"] += is_cancelled
            if number % 20 == 0:
                await pair.all_is_back()
        await pair.all_is_back()
    # Some come too late, on a busy machine more of them: as long as there are others.
    assert all(ends[f"{moment} cancelled"] > NUM_ABORTS // 100 for moment in MOMENTS), ends


async def test_s_b52_the_ten_thousandth_answer_is_as_right_as_the_first(tmp_path: Path) -> None:
    """Each answer is compared, and the KV of each prompt before it is used; at 1, 100, ... nothing may be left over."""
    choose, num_right = random.Random(52), 0

    async def ask_one(number: int) -> None:
        nonlocal num_right
        prompt = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(1, 40))]
        answer = await pair.ask(str(number), prompt, 2)
        assert answer.token_ids == expected_tokens(prompt, 2), (number, answer)
        num_right += 1

    async def ask_until(last: int) -> None:
        async def lane() -> None:
            for number in numbers:
                await ask_one(number)

        numbers = iter(range(num_right, last))
        await asyncio.gather(*(lane() for _ in range(NUM_LANES)))
        await pair.all_is_back()

    async with running_pair(tmp_path, "tcp", num_blocks=160) as pair:
        for last in (1, 100, 1_000, NUM_ANSWERS):
            await ask_until(last)
    assert num_right == NUM_ANSWERS


async def test_kv42_requests_of_one_prompt_let_its_source_go_one_without_the_other(tmp_path: Path) -> None:
    """The second one's prompt comes from the first one's blocks: neither's abort, nor both, takes them from the other.

    The pool is small and what it frees is poisoned: a block that is let go too early arrives as poison.
    """
    choose, ends = random.Random(42), Counter[int]()
    async with running_pair(tmp_path, "shm", num_blocks=14) as pair:
        for number in range(200):
            prompt = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(33, 60))]
            names = [f"{number}-{which}" for which in "ab"]
            gone = names[: number % 3]
            asked = [asyncio.create_task(pair.ask(name, prompt, 3)) for name in names]

            def leave(gone: Sequence[str] = gone) -> None:
                for name in gone:
                    pair.cancel(name)

            pair.at = {MOMENTS[number % len(MOMENTS)]: after(choose.randrange(8), leave)}
            answers = dict(zip(names, await asyncio.gather(*asked), strict=True))
            for name, answer in answers.items():
                is_cancelled = answer.last.finish_reason == common_pb2.FINISH_REASON_CANCELLED
                assert not is_cancelled or name in gone
                assert answer.token_ids == expected_tokens(prompt, len(answer.token_ids) if is_cancelled else 3), answer
                ends[number % 3] += is_cancelled
            await pair.all_is_back()
    assert ends[0] == 0
    assert min(ends[1], ends[2]) > 20, ends


async def test_both_workers_say_whether_requests_are_under_way(tmp_path: Path) -> None:
    """What is said last is so, also while some requests have ended and others have not."""
    said, are_so = [], []
    async with running_pair(tmp_path, "shm", num_blocks=160) as pair:
        in_prefill, in_decode = pair.told_of_requests()

        def note() -> None:
            said.append((in_prefill[-1], in_decode[-1]))
            are_so.append((pair.prefill.status().active_transfers > 0, len(pair.decode.live) > 0))

        pair.at = {"computing": note, "committed": note}
        await asyncio.gather(*(pair.ask(str(number), [number] * 40, 2) for number in range(30)))
        await pair.all_is_back()
        note()
    assert said == are_so
    assert (True, True) in said
    assert said[-1] == (False, False)
