"""What a client sees of a choice: text, ids and logprobs of the same tokens, cut before the stop."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tandem.v1 import common_pb2

from router.choice_text import ChoiceText, TextDelta
from router.detokenizer import Detokenizer


def _logprob(token_id: int) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=-1.0, rank=1))


def _deltas(pieces: list[bytes], stops: list[str], *, keeps: bool, min_tokens: int = 0) -> list[TextDelta]:
    choice = ChoiceText(Detokenizer(pieces), stops, min_tokens=min_tokens, keeps_tokens=keeps)
    deltas = []
    for token_id in range(len(pieces)):
        choice.push((token_id,), (_logprob(token_id),))
        deltas.append(choice.take())
        if choice.matched_stop:
            break
    choice.finish()
    return [*deltas, choice.take()]


def _texts(pieces: list[bytes], stops: list[str], *, keeps: bool = False, min_tokens: int = 0) -> list[str]:
    return [delta.text for delta in _deltas(pieces, stops, keeps=keeps, min_tokens=min_tokens)]


def test_d5_nothing_of_a_stop_string_leaks() -> None:
    assert _texts([b"DEF", b"G", b"HI", b"J"], ["DEFGHIJ"]) == ["", "", "", "", ""]
    assert "".join(_texts([b"ABC", b"DEF", b"G", b"HI", b"J", b"K"], ["DEFGHIJ"])) == "ABC"


def test_d6_held_back_text_holds_its_ids_and_logprobs() -> None:
    pieces = [b"ab", b" x", b"y", b"q", b" x", b"yz", b"never"]
    deltas = _deltas(pieces, ["xyz"], keeps=True)
    shown = []
    for delta in deltas:
        for token in delta.tokens:
            assert token.logprobs is not None
            assert token.logprobs.chosen.token_id == token.token_id
        shown += [token.token_id for token in delta.tokens]
        assert bool(delta.text) == bool(delta.tokens)
        if delta.tokens:
            assert delta.tokens[-1].end - delta.tokens[0].start == len(delta.text)
    assert "".join(delta.text for delta in deltas) == "ab xyq "
    assert shown == [0, 1, 2, 3, 4]
    assert [len(delta.tokens) for delta in deltas] == [1, 0, 0, 3, 0, 1, 0]


def test_d8_text_is_cut_before_the_stop_inside_a_token() -> None:
    deltas = _deltas([b"wait", b"..."], [".."], keeps=True)
    assert "".join(delta.text for delta in deltas) == "wait"
    assert _texts([b"Hm", b"a...b"], [".."])[1] == "a"


def test_token_that_begins_before_the_stop_is_shown_with_what_is_left_of_it() -> None:
    deltas = _deltas([b"one", b" two STOP"], ["STOP"], keeps=True)
    assert [(t.token_id, t.start, t.end) for delta in deltas for t in delta.tokens] == [(0, 0, 3), (1, 3, 8)]


def test_parts_of_a_character_come_out_with_it() -> None:
    data = "é!".encode()
    deltas = _deltas([data[:1], data[1:2], data[2:]], [], keeps=True)
    assert [(delta.text, len(delta.tokens)) for delta in deltas] == [("", 0), ("é", 2), ("!", 1), ("", 0)]


def test_incomplete_character_at_the_end_is_shown_as_replacement_with_its_token() -> None:
    deltas = _deltas([b"a", b"\xf0\x9f"], [], keeps=True)
    assert [(delta.text, len(delta.tokens)) for delta in deltas] == [("a", 1), ("", 0), ("\ufffd", 1)]


def test_stop_within_min_tokens_is_no_stop() -> None:
    assert "".join(_texts([b"x", b"x", b"x", b"x"], ["x"], min_tokens=2)) == "xx"


def test_what_was_held_is_shown_at_the_end() -> None:
    assert _texts([b"abc", b"DE"], ["DEF"]) == ["abc", "", "DE"]


@given(
    st.lists(st.binary(min_size=1, max_size=4).map(lambda b: bytes(97 + x % 4 for x in b)), max_size=20),
    st.lists(st.text("abcd", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_stream_equals_the_whole_answer(pieces: list[bytes], stops: list[str], keeps: bool) -> None:
    whole = b"".join(pieces).decode()
    ends = [(whole.index(stop) + len(stop), -len(stop)) for stop in stops if stop in whole]
    expected = whole if not ends else whole[: sum(min(ends))]
    assert "".join(_texts(pieces, stops, keeps=keeps)) == expected
