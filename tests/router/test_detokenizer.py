"""Text out of tokens: whole characters, as early as possible, whatever the bytes are."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.detokenizer import Detokenizer

BYTES = [bytes([byte]) for byte in range(256)]


def _pieces(token_bytes: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(token_bytes)
    pieces = [detokenizer.push((token_id,)) for token_id in range(len(token_bytes))]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("cuts", [(1, 2, 3), (2,), (1,), (3,)])
def test_d1_emoji_over_several_tokens_is_one_character(cuts: tuple[int, ...]) -> None:
    data = "😀".encode()
    edges = [0, *cuts, 4]
    tokens = [data[a:b] for a, b in itertools.pairwise(edges)]
    assert _pieces(tokens) == [*[""] * (len(tokens) - 1), "😀", ""]


def test_d1_czech_text_byte_by_byte_has_no_replacement_character() -> None:
    text = "ďábelské ódy"
    assert "".join(_pieces([bytes([byte]) for byte in text.encode()])) == text


def test_d2_incomplete_bytes_before_a_token_that_begins_with_a_space() -> None:
    assert _pieces([b"\xe4", b"\xbd", b" the"]) == ["", "", "\ufffd the", ""]


def test_d3_s_b35_random_bytes_never_raise_and_equal_decoding_at_once() -> None:
    generator = random.Random(3)
    token_ids = [generator.randrange(256) for _ in range(100_000)]
    detokenizer = Detokenizer(BYTES)
    text = "".join(detokenizer.push((token_id,)) for token_id in token_ids) + detokenizer.finish()
    assert text == bytes(token_ids).decode("utf-8", "replace")


@given(st.lists(st.binary(max_size=5), max_size=40))
def test_pieces_join_to_the_whole_for_any_cut(tokens: list[bytes]) -> None:
    assert "".join(_pieces(tokens)) == b"".join(tokens).decode("utf-8", "replace")


def test_replacement_for_what_never_became_whole_comes_only_at_the_end() -> None:
    assert _pieces([b"a", b"\xf0\x9f"]) == ["a", "", "\ufffd"]


def test_hidden_tokens_have_no_text() -> None:
    detokenizer = Detokenizer([b"<|im_end|>", b"hi"], hidden_ids={0})
    assert detokenizer.push((1, 0, 1)) == "hihi"


def test_cost_of_a_token_does_not_grow_with_the_text() -> None:
    detokenizer = Detokenizer(BYTES)

    def best_of(rounds: int) -> float:
        times = []
        for _ in range(rounds):
            start = time.thread_time()
            for _ in range(2_000):
                detokenizer.push((97,))
            times.append(time.thread_time() - start)
        return min(times)

    early = best_of(5)
    for _ in range(200_000):
        detokenizer.push((97,))
    assert best_of(5) < 5 * early
