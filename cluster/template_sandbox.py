"""A jinja2 sandbox with bounds on time, output and the size of values: chat templates come from model files.

jinja2's own sandbox keeps a template away from Python's internals, and `range` below 100,000. It bounds neither nested
loops nor `'a' * 10**10`; this one does:

    time     every loop turn, call and operator looks at the clock
    output   whatever an expression writes is counted, also what a block or macro captures
    values   operators, `~` and namespaces refuse what would be above the limit before it is made;
             filters and string methods that pad, format or repeat are gone
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_VALUE_SIZE = 16 * 2**20  # characters and items; the largest default request body has 4 MiB
MAX_INTEGER_BITS = 1024
MAX_JSON_INDENT = 16

_DENIED_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "translate"})
_DENIED_FILTERS = (
    *("batch", "center", "filesizeformat", "format", "groupby", "indent", "pprint", "random", "slice", "sum"),
    *("urlize", "wordwrap", "xmlattr"),
)
_TICK, _JOIN = "__tandem_tick", "__tandem_join"


class TemplateLimitExceeded(TemplateError):
    """The template ran too long or made too much."""


class _Budget(threading.local):
    """What the render on this thread may still spend."""

    deadline_s = float("inf")
    characters = MAX_VALUE_SIZE


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An environment whose `render` is bounded. Safe to use from several threads."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlock],
            finalize=self._count_output,
        )
        self._clock = clock
        self._budget = _Budget()
        for name in _DENIED_FILTERS:
            del self.filters[name]
        self.filters.update(tojson=_to_json, replace=_replace, join=_JoinFilter(self.filters["join"]))
        del self.globals["lipsum"]
        self.globals.update({"namespace": _BoundedNamespace, _TICK: self._check_time, _JOIN: _concatenate})

    def render(self, template: Template, values: Mapping[str, Any], *, max_chars: int, timeout_s: float) -> str:
        """Raises `TemplateLimitExceeded`, or what jinja2 raises for a faulty template."""
        self._budget.deadline_s = self._clock() + timeout_s
        self._budget.characters = max_chars
        return template.render(**values)

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_time()
        if isinstance(getattr(__obj, "__self__", None), str):
            _check_string_method(__obj, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """jinja2 would allow `str.format`, with any width."""
        if super().wrap_str_format(value) is not None:
            raise SecurityError("a chat template may not call format() of a string; use ~ to put values together")
        return None

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._check_time()
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _BoundsInserter().visit(super()._parse(source, name, filename))
        return tree

    def _check_time(self) -> str:
        if self._clock() > self._budget.deadline_s:
            raise TemplateLimitExceeded("the chat template ran too long")
        return ""

    def _count_output(self, value: Any) -> Any:
        self._budget.characters -= len(value) if isinstance(value, str) else _checked_size(value)
        if self._budget.characters < 0:
            raise TemplateLimitExceeded("the chat template wrote too much")
        return value


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks an assistant's text for training; its content stays."""

    tags = {"generation"}  # noqa: RUF012  declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundsInserter(NodeTransformer):
    """A clock check at the head of each loop body, and `~` through a function that looks at sizes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.Name(_JOIN, "load"), node.nodes, [], None, None).set_lineno(node.lineno)


class _BoundedNamespace(Namespace):
    """Keeps values across loop turns, where a template could double one each time."""

    def __setitem__(self, name: str, value: Any) -> None:
        _checked_size(value)
        super().__setitem__(name, value)


def _checked_size(value: Any) -> int:
    """Characters and items in a value, whatever its depth. Raises when above the limit, before counting on."""
    size = 0
    pending = [value]
    while pending:
        item = pending.pop()
        size += len(item) if isinstance(item, str | bytes) else 1
        if isinstance(item, Mapping):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            pending.extend(item)
        elif isinstance(item, int) and item.bit_length() > MAX_INTEGER_BITS:
            raise TemplateLimitExceeded("the chat template made a number that is too large")
        if size + len(pending) > MAX_VALUE_SIZE:
            raise TemplateLimitExceeded("the chat template made a value that is too large")
    return size


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "%":
        if not isinstance(left, int | float):
            raise SecurityError("% formats text; use ~ to put values together")
    elif operator == "+":
        _check_limit(_checked_size(left) + _checked_size(right))
    elif operator == "**":
        if not (isinstance(right, int | float) and abs(right) <= MAX_INTEGER_BITS):
            raise TemplateLimitExceeded("the chat template raised a number to a power that is too large")
        _check_limit_bits(_bits(left) * int(abs(right)))
    elif isinstance(left, int | float) and isinstance(right, int | float):
        _check_limit_bits(_bits(left) + _bits(right))
    else:
        times = left if isinstance(left, int) else right
        if isinstance(times, int):
            _check_limit(_checked_size(right if times is left else left) * max(0, times))


def _check_string_method(method: Any, args: tuple[Any, ...]) -> None:
    if method.__name__ in _DENIED_METHODS:
        raise SecurityError(f"a chat template may not call {method.__name__}() of a string")
    if method.__name__ == "replace" and len(args) >= 2:
        _check_replacement(method.__self__, str(args[0]), str(args[1]))
    elif method.__name__ == "join" and args:
        _check_joined(method.__self__, args[0])


def _check_limit(size: int) -> None:
    if size > MAX_VALUE_SIZE:
        raise TemplateLimitExceeded("the chat template made a value that is too large")


def _check_limit_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise TemplateLimitExceeded("the chat template made a number that is too large")


def _bits(number: float) -> int:
    return number.bit_length() if isinstance(number, int) else 64


def _concatenate(*parts: Any) -> str:
    _check_limit(sum(_checked_size(part) for part in parts))
    return "".join(map(str, parts))


def _check_replacement(text: str, old: str, new: str) -> None:
    _check_limit(len(text) + text.count(old) * len(new))


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    _check_replacement(str(text), old, new)
    return str(text).replace(old, new, -1 if count is None else count)


def _check_joined(separator: Any, items: Any) -> None:
    if isinstance(items, list | tuple):
        _check_limit(_checked_size(items) + len(items) * len(str(separator)))
    else:
        raise SecurityError("join() takes a list here")


class _JoinFilter:
    """jinja2's `join` of a list whose size was looked at first. Carries jinja2's marks (it takes the eval context)."""

    def __init__(self, join: Callable[..., Any]) -> None:
        self._join = join
        self.jinja_pass_arg = join.jinja_pass_arg  # type: ignore[attr-defined]

    def __call__(self, eval_context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        items = list(value)
        _check_joined(d, items)
        return self._join(eval_context, items, d, attribute)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    """JSON as `transformers` writes it: no HTML escapes, non-ASCII characters as they are."""
    if indent is not None and not 0 <= indent <= MAX_JSON_INDENT:
        raise TemplateLimitExceeded(f"tojson indents by {indent}, at most {MAX_JSON_INDENT}")
    _checked_size(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)
