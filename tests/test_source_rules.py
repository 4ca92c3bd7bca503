"""Rules for every source file of the project, read from the syntax tree: what must not stand anywhere in it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("cluster", "engine", "kv_transfer", "prefill_worker", "decode_worker", "router", "deploy", "benchmarks")
PICKLES = frozenset({"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"})
RUNS_CODE = frozenset({"eval", "exec", "compile", "__import__"})


@cache
def sources(*, with_tests: bool) -> tuple[Path, ...]:
    folders = (*PACKAGES, "tests") if with_tests else PACKAGES
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


def _compares_a_digest_with_equals(node: ast.AST) -> bool:
    """A secret's bytes against others, by an operator that stops at the first difference."""
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
        return False
    sides = " ".join(ast.unparse(side) for side in (node.left, *node.comparators))
    return any(secret in sides for secret in ("api_key", "cluster_token", "security.token"))


def _waits_so_that_a_cancel_may_be_lost(node: ast.AST) -> bool:
    """Python 3.11's `wait_for` drops a cancel that comes with the result; `asyncio.timeout` does not."""
    return called(node) in ("asyncio.wait_for", "wait_for")


RULES: dict[str, tuple[Callable[[ast.AST], bool], bool]] = {
    "s_b2_s_b4_s_b5_s_b7_unpickles": (_unpickles, True),
    "s_b3_opens_a_tcp_store": (_opens_a_store, False),
    "s_b6_s_b11_runs_text_as_code": (_runs_text_as_code, False),
    "s_b10_asserts_what_a_user_may_get_wrong": (_asserts, False),
    "s_b37_compares_a_secret_with_equals": (_compares_a_digest_with_equals, False),
    "f10_waits_so_that_a_cancel_may_be_lost": (_waits_so_that_a_cancel_may_be_lost, False),
}


def findings(breaks: Callable[[ast.AST], bool], *, with_tests: bool) -> Iterator[str]:
    for path in sources(with_tests=with_tests):
        for node in ast.walk(tree(path)):
            if breaks(node):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:100]}"


@pytest.mark.parametrize("rule", RULES)
def test_no_source_file(rule: str) -> None:
    breaks, with_tests = RULES[rule]
    assert list(findings(breaks, with_tests=with_tests)) == []


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
        ("s_b37_compares_a_secret_with_equals", "if api_key == known: pass"),
        ("f10_waits_so_that_a_cancel_may_be_lost", "asyncio.wait_for(event.wait(), 1)"),
    ],
)
def test_the_rules_see_what_they_are_about(rule: str, text: str) -> None:
    assert any(RULES[rule][0](node) for node in ast.walk(ast.parse(text)))
