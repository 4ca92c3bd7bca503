"""Every known fault has a test that carries its number; those that a client can meet are met over HTTP and over gRPC.

Over which fronts a test asks is read from the test itself: the fixture `front` is both, `http` and `stub` are one each,
and the marker `fronts` says it of a test that opens its own connections. A case that is not asked for over both stands
here with the reason. Numbers of the catalogues of faults that public systems had; the missing ones were never given.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_source_rules import RULES

TESTS = Path(__file__).parents[1]
BOTH = frozenset({"http", "grpc"})
FIXTURES = {"front": BOTH, "http": frozenset({"http"}), "stub": frozenset({"grpc"})}
CASE = re.compile(r"(?:^|(?<=_))(rt\d+|s_b\d+|kv\d+|[abdfkqs]\d+)(?=_|$)")

ROUTING = [
    *(1, 2, 3, 5, 7, 8, 10, 11, 12, 14, 15, 16, 17, 18, 19, 21, 22, 23, 24, 26, 27, 28, 29, 30, 32, 33, 34, 35, 37),
    *(38, 39, 40, 42, 43, 44, 45, 46, 47, 49, 50, 51, 52, 54, 55, 56, 57, 58, 60, 61, 63, 64, 65),
]
SECURITY = [
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 25, 26, 27, 28, 30, 31, 32),
    *(35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 52, 53, 54, 55, 56, 58, 59, 60, 61, 62, 63, 64),
    *(65, 66, 67, 68, 69, 71, 72, 73, 74, 75),
]
TEXT = [*(f"d{number}" for number in (1, 2, 3, 5, 6, 8)), *(f"a{number}" for number in (1, 2, 3, 4, 6, 7, 8, 10))]
CASES = [*(f"rt{number}" for number in ROUTING), *(f"s_b{number}" for number in SECURITY), *TEXT]

HANDOFF = [
    *(1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 13, 14, 16, 17, 18, 19, 20, 21, 23, 24, 25, 27, 28, 29, 30, 31, 32, 34),
    *(35, 36, 37, 38, 39, 40, 41, 42, 44, 45, 46, 48, 49, 51, 52, 54, 55, 56, 57, 59, 60, 62, 63, 64, 65, 67),
    *(69, 70, 71, 72, 73, 74, 75),
]
FAULTS = [
    *(1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 27, 28, 29, 30, 31),
    *(32, 33, 34, 35, 37, 38, 39, 40, 41, 42, 43, 44),
]

SPECULATION = [1, 2, *range(4, 14), *range(15, 18), *range(19, 27), *range(28, 36)]
SCHEDULING = [*range(1, 6), *range(7, 16), *range(17, 23)]
SAMPLING = [1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 14]
MEASURING = [1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 14]
BEHIND = [
    *(f"kv{number}" for number in HANDOFF),
    *(f"f{number:02}" for number in FAULTS),
    *(f"s{number}" for number in SPECULATION),
    *(f"k{number}" for number in SCHEDULING),
    *(f"q{number}" for number in SAMPLING),
    *(f"b{number}" for number in MEASURING),
]

_PLACED = "placement, one object for both fronts: rt7, rt8, rt28 and rt63 ask both for what it decides"
_INDEX = "the index of caches, fed by events of the workers: no request takes part"
_SCALING = "the autoscaler or the planner, which read totals: rt44 and s_b72 ask both fronts for what is counted"
_SOURCES = "what stands in source files or on a socket, whoever asks"
_HANDOFF = "KV between workers and within them, behind both fronts"
_CLUSTER = "faults under load on real processes; what a front does then is f03, rt27 and s_b65 over both"

NOT_OVER_BOTH = {
    **dict.fromkeys(("rt1", "rt2", "rt3", "rt5", "rt29", "rt30", "rt39", "rt57", "rt58"), _PLACED),
    **dict.fromkeys(("rt12", "rt14", "rt15", "rt16", "rt19", "rt21", "rt23", "rt24", "rt26", "rt64"), _INDEX),
    **dict.fromkeys(("s_b42", "s_b43", "s_b60", "s_b67", "s_b68"), _INDEX),
    **dict.fromkeys(("rt45", "rt46", "rt47", "rt49", "rt50", "rt51", "rt52", "rt54", "rt55", "rt60"), _SCALING),
    **dict.fromkeys(("s_b1", "s_b2", "s_b3", "s_b4", "s_b5", "s_b7", "s_b10", "s_b12", "s_b13", "s_b14"), _SOURCES),
    **dict.fromkeys(("s_b27", "s_b45", "s_b46", "s_b47", "s_b53", "s_b59", "s_b61", "s_b74"), _HANDOFF),
    **dict.fromkeys(("rt65", "s_b52", "s_b54", "s_b55", "s_b56", "s_b66"), _CLUSTER),
    "rt11": "models with several KV groups (hybrids), which are refused when they are loaded",
    "s_b8": "a model's template, tried when it is loaded; s_b19 asks both fronts",
    "s_b9": "gRPC has no field for tensors",
    "s_b16": "gRPC has no `best_of`",
    "s_b23": "the tool parser and the grammar engine, which both fronts feed the same text",
    "s_b31": "Host, Origin and forms are a browser's: none speaks gRPC",
    "s_b40": "gRPC's messages are text: they have no images",
    "s_b44": "the Redis client, which is on no request's way",
    "s_b71": "gRPC's own calls; f17 and s_b73 leave over both",
    "a7": "gRPC has neither `echo` nor log-probabilities of the prompt",
    "a10": "the engine's noise, a function of seed and position; a3 repeats it over both",
}


def _tests() -> Iterator[tuple[str, frozenset[str]]]:
    """Each test's name, and the fronts over which it asks."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_"):
                continue
            fronts: set[str] = set()
            for argument in node.args.args:
                fronts |= FIXTURES.get(argument.arg, frozenset())
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fronts":
                    fronts |= {ast.literal_eval(name) for name in decorator.args}
            yield node.name, frozenset(fronts)


@functools.cache
def fronts_of_cases() -> dict[str, frozenset[str]]:
    """Of each number in the name of a test, or of a rule that one of them runs: over which fronts it is met."""
    found: dict[str, frozenset[str]] = {}
    for name, fronts in (*_tests(), *((rule, frozenset[str]()) for rule in RULES)):
        for case in CASE.findall(name):
            found[case] = found.get(case, frozenset()) | fronts
    return found


@pytest.mark.parametrize("case", CASES)
def test_each_fault_has_a_test_over_both_fronts_or_a_reason(case: str) -> None:
    met = fronts_of_cases().get(case)
    assert met is not None, "no test carries its number"
    if case in NOT_OVER_BOTH:
        assert met != BOTH, f"it is met over both: its line here is not true any more ({NOT_OVER_BOTH[case]})"
    else:
        assert met == BOTH, f"met over {sorted(met)}"


@pytest.mark.parametrize("case", BEHIND)
def test_each_fault_behind_the_fronts_has_a_test(case: str) -> None:
    assert case in fronts_of_cases()


def test_nothing_else_is_excused() -> None:
    assert set(NOT_OVER_BOTH) <= set(CASES)
