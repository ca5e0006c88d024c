"""Limits the computation of one template rendering, so that a template can't block a process or fill its memory. A chat
template is a program that comes with the model. Jinja's sandbox keeps it away from the machine, but doesn't stop it
from looping or computing `'a' * 10**10`. `limit_templates` makes transformers compile templates whose every loop, call,
concatenation and filter is charged to the budget of the `rendering` that it happens in.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_VALUE = 32 * 1024 * 1024
"""The maximum characters of a text and elements of a list. No prompt is that long."""
ELEMENT = 64
"""The cost of a list's element, in addition to its size."""
CALL = 1024
"""The cost of calling a macro or function: it takes as long as copying so many characters."""
MAX_TOTAL = 2 * 1024 * 1024 * 1024
"""The limit on all texts and lists that one rendering makes. Each round of a loop counts as a copy of the template."""
MAX_SECONDS = 30.0
MAX_BITS = 4096
_LONG_NUMBER = re.compile(r"\d{6,}|\*")
_GROWING = frozenset({"expandtabs", "translate", "wordwrap", "indent"})
_WRITING = frozenset(
    {"tojson", "string", "pprint", "join", "sum", "escape", "e", "forceescape", "xmlattr", "urlencode"}
)
"""Filters that write out their whole argument, including repeated elements."""


METHODS = frozenset(dir(dict))
SIZED = (str, bytes, list, tuple, dict)


class TemplateLimitError(TemplateError):
    """The template computes more than any prompt needs."""


class _Budget:
    """What one rendering may still cost."""

    __slots__ = ("left", "until")

    def __init__(self) -> None:
        self.left, self.until = MAX_TOTAL, time.monotonic() + MAX_SECONDS


class _Rendering(threading.local):
    budget: _Budget | None = None


_rendering = _Rendering()


@contextmanager
def rendering() -> Iterator[None]:
    """Renderings inside have one budget."""
    _rendering.budget = _Budget()
    try:
        yield
    finally:
        _rendering.budget = None


@functools.cache
def limit_templates() -> None:
    """Templates that transformers compiles from now on have limits."""
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    module.ImmutableSandboxedEnvironment = LimitedEnvironment
    module._compile_jinja_template.cache_clear()


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandboxed environment, which charges every operation that a template can repeat."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, finalize=_written, **options)
        del self.globals["lipsum"]  # makes any length of text in one call
        self.filters["ajet_rounds"] = _Rounds
        self.filters["ajet_part"] = _part
        self._charged: set[Any] = {_Rounds, _part}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        for one, function in self.filters.items():  # by now, transformers has added its own
            if function not in self._charged:
                self.filters[one] = _limited(one, function)
                self._charged.add(self.filters[one])
        parsed = super()._parse(source, name, filename)
        changed: nodes.Template = _Charging(len(source)).visit(parsed)
        return changed

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The sandbox's own, which looks for an attribute first, without that where it can't be one."""
        if type(obj) is dict and attribute in obj and attribute not in METHODS:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A product, power, sum or formatted text."""
        if operator == "+" and type(left) is type(right) is str:  # nearly always
            return _charged(left + right)
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator in ("*", "**"):
            _check_product(operator, left, right)
        return _charged(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *arguments: Any, **options: Any) -> Any:
        """A method, function or macro."""
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        _check_call(getattr(method, "__name__", ""), owner, [*arguments, *options.values()])
        _charge(CALL)
        return _charged(super().call(__context, __obj, *arguments, **options))


class _Charging(NodeTransformer):
    """Rewrites the syntax for which Jinja calls no hook: loops, slices, and `~`."""

    def __init__(self, round_cost: int) -> None:
        self._round_cost = round_cost

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "ajet_rounds", [nodes.Const(self._round_cost)], node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "join", [], node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(cut := node.arg, nodes.Slice):
            return node
        parts = [part or nodes.Const(None) for part in (cut.start, cut.stop, cut.step)]
        return _filter(node.node, "ajet_part", parts, node)


def _filter(value: Any, name: str, arguments: list[Any], at: nodes.Node) -> nodes.Filter:
    made = nodes.Filter(value, name, arguments, [], None, None, lineno=at.lineno)
    for inner in (*arguments, made):
        inner.set_lineno(at.lineno)
    if at.environment is not None:
        made.set_environment(at.environment)
    return made


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps what says which context a filter wants as its first argument
    def charged(*arguments: Any, **options: Any) -> Any:
        given = list(arguments)
        at = 1 if hasattr(function, "jinja_pass_arg") else 0
        if name in ("join", "list", "string", "sum") and len(given) > at and isinstance(given[at], Iterator):
            given[at] = list(_Rounds(given[at], 16))
        value = given[at] if len(given) > at else None
        rest = [*given[at + 1 :], *options.values()]
        if name in _WRITING:
            _check(_weight([value, *rest]) + (_separators(value, rest) if name == "join" else 0))
        if name == "format" and isinstance(value, str):
            _check_format(value)
        _check_call(name, value, rest)
        return _charged(function(*given, **options))

    return charged


class _Rounds:
    """The iterable of a loop. Each iteration is charged."""

    def __init__(self, over: Iterable[Any], cost: int) -> None:
        self._over, self._cost = over, cost

    def __len__(self) -> int:
        return len(self._over)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for item in self._over:
            _charge(self._cost)
            yield item


def _part(value: Any, start: Any, stop: Any, step: Any) -> Any:
    return _charged(value[start:stop:step])


def _written(value: Any) -> Any:
    """The text that `{{ … }}` writes."""
    _charge(len(value) if type(value) is str else _weight(value))
    return value


# ---------------------------------------------------------------- what things cost


def _charge(cost: int) -> None:
    budget = _rendering.budget
    if budget is None:  # compiling computes constants
        _check(cost)
        return
    budget.left -= cost
    if budget.left < 0 or time.monotonic() > budget.until:
        raise TemplateLimitError("the chat template loops, or makes texts, beyond what any prompt needs")


def _charged(value: Any) -> Any:
    """The value, charged with its own size."""
    if isinstance(value, SIZED):
        size = len(value)
        _check(size)
        _charge(size + 16)
    else:
        _charge(64)
    return value


def _check(size: int) -> None:
    if size > MAX_VALUE:
        raise TemplateLimitError(f"the chat template makes a text or list of more than {MAX_VALUE:,} elements")


def _weight(value: Any) -> int:
    """The cost of writing out a value; repeated elements count each time."""
    if isinstance(value, str):
        return len(value)
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, Mapping):
            total += 2 * ELEMENT * len(item)
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            total += ELEMENT * len(item)
            _check(total)
            stack += item
        else:
            total += ELEMENT
        _check(total)
    return total


def _separators(value: Any, rest: list[Any]) -> int:
    count = len(value) if hasattr(value, "__len__") else 0
    return count * max((len(one) for one in rest if isinstance(one, str)), default=0)


def _check_product(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise TemplateLimitError("the chat template computes with numbers beyond what any prompt needs")
    for sized, count in ((left, right), (right, left)):
        if isinstance(sized, str | bytes | list | tuple) and isinstance(count, int):
            _check(len(sized) * count)


def _check_format(pattern: str) -> None:
    if _LONG_NUMBER.search(pattern):
        raise TemplateLimitError(f"the chat template formats with a width beyond any prompt: {pattern[:80]!r}")


def _check_call(name: str, owner: Any, arguments: list[Any]) -> None:
    """Refuse calls that would make a long text out of a short one, before they run."""
    numbers = [one for one in arguments if isinstance(one, int)]
    _check(max(numbers, default=0))
    if not isinstance(owner, str):
        return
    texts = [one for one in arguments if isinstance(one, str)]
    if name in ("format", "format_map"):
        _check_format(owner)
    elif name == "replace" and len(texts) > 1:
        _check(len(owner) + (owner.count(texts[0]) if texts[0] else len(owner) + 1) * len(texts[1]))
    elif name == "join":
        for one in arguments:
            _check(_weight(one) + len(owner) * (len(one) if hasattr(one, "__len__") else 0))
    elif name in _GROWING:
        widest = max([0, *numbers, *map(len, texts), *(_weight(one) for one in arguments if isinstance(one, dict))])
        breaks = owner.count("\n") + owner.count("\t") + 1 if name in ("indent", "expandtabs") else len(owner)
        _check(len(owner) + breaks * widest)
