"""Rules for every source file of the project, read from the syntax tree: what must not stand anywhere in it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("cluster", "engine", "kv_transfer", "prefill_worker", "decode_worker", "router", "deploy", "benchmarks"),
    "drafter_training",
)
TESTS = ("tests",)
EVERYWHERE = (*PACKAGES, *TESTS)
# A machine that others use stands still for seconds: a test that gives up before fails of nothing.
STALL_S = 10.0
WALL_CLOCKS = ("time.monotonic", "time.perf_counter", "time.time")
PICKLES = frozenset({"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"})
RUNS_CODE = frozenset({"eval", "exec", "compile", "__import__"})


@cache
def sources(folders: tuple[str, ...]) -> tuple[Path, ...]:
    return tuple(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return set()


def called(node: ast.AST) -> str:
    """The dotted name of what is called, as far as it is a name."""
    if not isinstance(node, ast.Call):
        return ""
    return ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""


def _unpickles(node: ast.AST) -> bool:
    """`torch.load` and numpy's `allow_pickle` unpickle as well."""
    modules = {name.partition(".")[0] for name in imported(node)}
    if modules & PICKLES or "recv_pyobj" in called(node):
        return True
    if called(node) in ("torch.load", "torch.save"):
        return True
    return isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False"


def _opens_a_store(node: ast.AST) -> bool:
    """By its name, or by torch's global group, which opens one on all interfaces and unpickles objects it is sent."""
    names = (*imported(node), called(node))
    return any(
        word in name
        for name in names
        for word in ("TCPStore", "init_process_group", "broadcast_object", "gather_object")
    )


def _runs_text_as_code(node: ast.AST) -> bool:
    return called(node) in RUNS_CODE


def _asserts(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert)


def _opens_another_stream(node: ast.AST) -> bool:
    """A GPU's KV is gathered, scattered and computed with on one stream: on two, bytes are read before they are there.
    The one that warms a graph up is waited for at once, when nobody has KV yet."""
    return called(node) in ("torch.cuda.Stream", "torch.cuda.ExternalStream", "torch.Stream", "cuda.Stream")


def _compares_a_digest_with_equals(node: ast.AST) -> bool:
    """A secret's bytes against others, by an operator that stops at the first difference."""
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
        return False
    sides = " ".join(ast.unparse(side) for side in (node.left, *node.comparators))
    return any(secret in sides for secret in ("api_key", "cluster_token", "security.token"))


def _waits_so_that_a_cancel_may_be_lost(node: ast.AST) -> bool:
    """Python 3.11's `wait_for` drops a cancel that comes with the result; `asyncio.timeout` does not."""
    return called(node) in ("asyncio.wait_for", "wait_for")


def _fails_when_the_machine_stands_still(node: ast.AST) -> bool:
    """A short deadline of a wait, or an upper bound of seconds that passed: what took them may be somebody else."""
    if called(node) == "asyncio.timeout" and isinstance(node, ast.Call):
        return any(_is_short(argument) for argument in node.args)
    if not isinstance(node, ast.Compare):
        return False
    sides = (node.left, *node.comparators)
    return any(
        isinstance(order, ast.Lt | ast.LtE) and _reads_a_wall_clock(smaller) and _is_short(larger)
        for smaller, order, larger in zip(sides[:-1], node.ops, sides[1:], strict=True)
    )


def _is_short(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value < STALL_S


def _reads_a_wall_clock(node: ast.AST) -> bool:
    return any(called(inner) in WALL_CLOCKS for inner in ast.walk(node))


RULES: dict[str, tuple[Callable[[ast.AST], bool], tuple[str, ...]]] = {
    "s_b2_s_b4_s_b5_s_b7_unpickles": (_unpickles, EVERYWHERE),
    "s_b3_opens_a_tcp_store": (_opens_a_store, PACKAGES),
    "s_b6_s_b11_runs_text_as_code": (_runs_text_as_code, PACKAGES),
    "s_b10_asserts_what_a_user_may_get_wrong": (_asserts, PACKAGES),
    "kv28_opens_another_stream": (_opens_another_stream, PACKAGES),
    "s_b37_compares_a_secret_with_equals": (_compares_a_digest_with_equals, PACKAGES),
    "f10_waits_so_that_a_cancel_may_be_lost": (_waits_so_that_a_cancel_may_be_lost, PACKAGES),
    "fails_when_the_machine_stands_still": (_fails_when_the_machine_stands_still, TESTS),
}


def findings(breaks: Callable[[ast.AST], bool], folders: tuple[str, ...]) -> Iterator[str]:
    for path in sources(folders):
        for node in ast.walk(tree(path)):
            if breaks(node):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:100]}"


# What a rule finds and is right as it is, with how often.
ALLOWED = {"kv28_opens_another_stream": {"engine/decode_graphs.py": 1}}


@pytest.mark.parametrize("rule", RULES)
def test_no_source_file(rule: str) -> None:
    breaks, folders = RULES[rule]
    found = list(findings(breaks, folders))
    assert Counter(line.partition(":")[0] for line in found) == ALLOWED.get(rule, {}), found


# Every limit of the fronts and of the workers, what a peer's Hello and a file's header may say, flags.
VALIDATION = (
    *(
        "tests/router/test_limits.py",
        "tests/engine/test_request_check.py",
        "tests/prefill_worker/test_prefill_check.py",
    ),
    *("tests/kv_transfer/test_hello.py", "tests/cluster/test_gguf_file.py", "tests/cluster/test_settings_flags.py"),
)


@pytest.mark.timeout(600)
def test_s_b10_what_is_refused_is_refused_without_assertions_too(tmp_path: Path) -> None:
    """Under `python -O`, where an `assert` of ours, or of a library that we trust with a check, is not there."""
    canary = tmp_path / "test_canary.py"
    canary.write_text("def test_that_tests_can_fail():\n    assert __debug__\n")
    quiet = ("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestConfigWarning")
    ended = subprocess.run(
        [sys.executable, "-O", "-m", "pytest", *quiet, *VALIDATION, str(canary)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    last = ended.stdout.splitlines()[-1]
    assert re.fullmatch(r"1 failed, \d{3,} passed in .*", last), ended.stdout[-4000:]
    assert "FAILED" in ended.stdout
    assert "test_that_tests_can_fail" in ended.stdout


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("s_b2_s_b4_s_b5_s_b7_unpickles", "import pickle"),
        ("s_b2_s_b4_s_b5_s_b7_unpickles", "from cloudpickle import loads"),
        ("s_b2_s_b4_s_b5_s_b7_unpickles", "torch.load(path, weights_only=True)"),
        ("s_b2_s_b4_s_b5_s_b7_unpickles", "numpy.load(path, allow_pickle=True)"),
        ("s_b2_s_b4_s_b5_s_b7_unpickles", "socket.recv_pyobj()"),
        ("s_b3_opens_a_tcp_store", "torch.distributed.TCPStore('0.0.0.0', 1)"),
        ("s_b6_s_b11_runs_text_as_code", "eval(arguments)"),
        ("s_b10_asserts_what_a_user_may_get_wrong", "assert is_safe(tensor)"),
        ("kv28_opens_another_stream", "stream = torch.cuda.Stream()"),
        ("s_b37_compares_a_secret_with_equals", "if api_key == known: pass"),
        ("f10_waits_so_that_a_cancel_may_be_lost", "asyncio.wait_for(event.wait(), 1)"),
        ("fails_when_the_machine_stands_still", "async with asyncio.timeout(5): pass"),
        ("fails_when_the_machine_stands_still", "assert 0.1 < time.monotonic() - started < 1.0"),
    ],
)
def test_the_rules_see_what_they_are_about(rule: str, text: str) -> None:
    assert any(RULES[rule][0](node) for node in ast.walk(ast.parse(text)))
