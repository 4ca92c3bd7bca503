"""Stop strings are found across pieces, and nothing of them is ever shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.stop_strings import StopMatch, StopMatcher


def _run(stops: list[str], pieces: list[str]) -> tuple[StopMatch | None, list[int]]:
    matcher = StopMatcher(stops)
    held: list[int] = []
    for piece in pieces:
        match = matcher.push(piece)
        if match is not None:
            return match, held
        held.append(matcher.num_held)
    return None, held


def test_match_across_pieces_holds_back_only_what_may_become_a_stop() -> None:
    match, held = _run(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J"])
    assert held == [0, 3, 4, 6]
    assert match == StopMatch("DEFGHIJ", 3)


def test_false_start_is_released() -> None:
    match, held = _run(["aab"], ["a", "a", "a", "c"])
    assert match is None
    assert held == [1, 2, 2, 0]


def test_stop_that_is_complete_first_wins_and_of_two_at_once_the_longer() -> None:
    assert _run(["END OF", "ND"], ["xEND OF"])[0] == StopMatch("ND", 2)
    assert _run(["lo", "hello"], ["say hello"])[0] == StopMatch("hello", 4)


def test_skipped_text_takes_no_part() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("xa") is None
    matcher.skip(1)
    assert matcher.num_held == 0
    assert matcher.push("b") is None
    assert matcher.push("ab") == StopMatch("ab", 4)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_equals_a_plain_search_for_any_cut(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    match, held = _run(stops, pieces)
    if not ends:
        assert match is None
        tail = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        assert (held[-1] if held else 0) == tail
    else:
        end, _, stop = min(ends)
        assert match == StopMatch(stop, end - len(stop))
