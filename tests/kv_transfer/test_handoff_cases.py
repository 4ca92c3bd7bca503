"""Every known fault of a KV handoff has a test that carries its number, or a line here that says why it has none."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Numbers of the catalogue of faults that public systems had; the missing ones were never given.
NUMBERS = [
    *(
        1,
        2,
        3,
        4,
        6,
        7,
        8,
        9,
        10,
        11,
        13,
        14,
        16,
        17,
        18,
        19,
        20,
        21,
        23,
        24,
        25,
        27,
        28,
        29,
        30,
        31,
        32,
        34,
        35,
        36,
        37,
    ),
    *(
        38,
        39,
        40,
        41,
        42,
        44,
        45,
        46,
        48,
        49,
        51,
        52,
        54,
        55,
        56,
        57,
        59,
        60,
        62,
        63,
        64,
        65,
        67,
        69,
        70,
        71,
        72,
        73,
        74,
    ),
    75,
]
WITHOUT_TEST = {
    20: "No draft KV travels: a drafter computes its own on the decode worker, and its acceptance is a metric there.",
    21: "Layers leave when they are written, draft layers are not among them: there is no end to call too early.",
    25: "A prompt has one KV group: models with several (sliding windows, hybrids) are refused when they are loaded.",
    28: "A GPU's KV is gathered and scattered on the stream that computes: no second one runs ahead of it.",
    42: "A transfer has one decode worker, which alone cancels it; ranks of a decode worker are refused at Hello.",
    55: "Hidden states do not travel: a drafter that needs them takes those of the decode worker's own steps.",
}


@functools.cache
def numbers_with_a_test() -> frozenset[int]:
    found: set[int] = set()
    for path in TESTS.rglob("test_*.py"):
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8")):
            found |= {int(number) for number in re.findall(r"_kv(\d+)(?=_)", name)}
    return frozenset(found)


@pytest.mark.parametrize("number", NUMBERS)
def test_each_fault_has_a_test_or_a_reason(number: int) -> None:
    assert (number in numbers_with_a_test()) != (number in WITHOUT_TEST), f"KV{number}"


def test_no_test_carries_a_number_that_is_not_in_the_catalogue() -> None:
    assert numbers_with_a_test() <= set(NUMBERS)
