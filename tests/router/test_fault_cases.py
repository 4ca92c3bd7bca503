"""Every known fault of routing, text and input has a test that carries its number, or a line that says why not.

Numbers of the catalogue of faults that public systems had; the missing ones were never given, and those of scaling
belong to the autoscaler's and the planner's tests.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROUTING = [
    *(1, 2, 3, 5, 7, 8, 10, 11, 12, 14, 15, 16, 17, 18, 19, 21, 22, 23, 24, 26, 27, 28, 29, 30, 32, 33, 34, 35, 37),
    *(38, 39, 40, 42, 43, 44, 56, 57, 58, 61, 63, 64, 65),
]
SECURITY = [
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 25, 26, 27, 28, 30, 31, 32),
    *(35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 52, 53, 54, 55, 56, 58, 59, 60, 61, 62, 63, 64),
    *(65, 66, 67, 68, 69, 71, 72, 73, 74, 75),
]
TEXT = [*(f"d{number}" for number in (1, 2, 3, 5, 6, 8)), *(f"a{number}" for number in (1, 2, 3, 4, 6, 7, 8, 10))]
CASES = [*(f"rt{number}" for number in ROUTING), *(f"s_b{number}" for number in SECURITY), *TEXT]
WITHOUT_TEST = {
    "rt11": "A prompt has one KV group: models with several (hybrids) are refused when they are loaded.",
}


@functools.cache
def cases_with_a_test() -> frozenset[str]:
    """Numbers in the names of tests, and of the rules that one of them runs."""
    found: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        for name in re.findall(r"(?:def test_|[\"'])((?:[a-z]+_?[a-z]?\d+_)+)", path.read_text(encoding="utf-8")):
            found |= set(re.findall(r"(?:^|(?<=_))(rt\d+|s_b\d+|sb\d+|d\d+|a\d+)(?=_)", name))
    return frozenset(re.sub(r"^sb", "s_b", case) for case in found)


@pytest.mark.parametrize("case", CASES)
def test_each_fault_has_a_test_or_a_reason(case: str) -> None:
    assert (case in cases_with_a_test()) != (case in WITHOUT_TEST), case
