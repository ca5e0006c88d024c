"""A small part of Python, interpreted: what an agent needs to call apps and to compute with what they return.

No code of the agent is ever executed by Python itself: names, attributes and calls are looked up in short lists, there
are no imports, files or classes, and time and sizes are limited. What is not known is an error that the agent is told.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MOST_STEPS = 5_000
"""Of one block: nodes that are evaluated."""
LARGEST_VALUE = 10_000
"""Items and characters of one value, with all that it holds; also of what a block prints."""
LARGEST = 10**15
FORMAT = re.compile(r"[<>^]?\d{0,2}(\.\d)?[dfs%]?")
METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset({
        "lower", "upper", "strip", "split", "startswith", "endswith", "replace", "join", "title", "splitlines", "find",
        "count", "isdigit",
    }),
    list: frozenset({"append", "extend", "sort", "index", "count", "pop", "remove", "insert", "copy", "reverse"}),
    dict: frozenset({"get", "items", "keys", "values", "pop", "update", "setdefault", "copy"}),
    set: frozenset({"add", "discard", "remove", "union", "intersection", "difference"}),
}  # fmt: skip
BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_,
}  # fmt: skip
BUILTINS: Mapping[str, Callable[..., Any]] = {
    "len": len, "sum": sum, "sorted": sorted, "min": min, "max": max, "abs": abs, "round": round, "int": int,
    "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "set": set, "tuple": tuple,
    "enumerate": lambda items, start=0: list(enumerate(items, start)), 
    "zip": lambda *items: list(zip(*items, strict=False)),
    "any": any, "all": all, "reversed": lambda items: list(reversed(items)),
}  # fmt: skip


class CodeError(Exception):
    """What is wrong with the agent's code, in words for the agent."""


class _Break(Exception): ...


class _Continue(Exception): ...


class Interpreter:
    """Runs blocks one after the other; names stay between them. `call` is `apis.APP.NAME(**arguments)`."""

    def __init__(self, call: Callable[[str, str, dict[str, Any]], Any]) -> None:
        self._call_app = call
        self._names: dict[str, Any] = {}
        self._steps = 0
        self._output: list[str] = []

    def run(self, code: str) -> str:
        """What the block prints, or the value of its last line if it prints nothing. Errors are part of the output."""
        self._steps, self._output = 0, []
        value = None
        try:
            for statement in ast.parse(code).body:
                value = self._statement(statement)
        except CodeError as error:
            return self._said(f"Error: {error}")
        except (_Break, _Continue):
            return self._said("Error: break and continue belong in a loop")
        except SyntaxError as error:
            return f"SyntaxError: {error.msg} (line {error.lineno})"
        except RecursionError:
            return self._said("Error: the code is nested too deeply")
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, MemoryError) as error:
            return self._said(f"{type(error).__name__}: {error}")
        return self._said("" if self._output or value is None else str(value))

    def _said(self, last: str) -> str:
        text = "\n".join([*self._output, *([last] if last else [])])
        return text if len(text) <= LARGEST_VALUE else f"{text[:LARGEST_VALUE]} …"

    # ------------------------------------------------------------ statements

    def _statement(self, node: ast.stmt) -> Any:
        self._count()
        match node:
            case ast.Expr():
                return self._value(node.value)
            case ast.Assign():
                value = self._value(node.value)
                for target in node.targets:
                    self._assign(target, value)
            case ast.AugAssign():
                read = ast.copy_location(ast.BinOp(_as_load(node.target), node.op, node.value), node)
                self._assign(node.target, self._value(read))
            case ast.If():
                self._block(node.body if self._value(node.test) else node.orelse)
            case ast.For():
                self._loop((lambda item=item: self._assign(node.target, item) for item in self._items(node.iter)), node)
            case ast.While():
                self._loop(iter(lambda: bool(self._value(node.test)), False), node)
            case ast.Break():
                raise _Break
            case ast.Continue():
                raise _Continue
            case ast.Pass():
                pass
            case _:
                raise CodeError(f"{type(node).__name__} is not known in this small world")
        return None

    def _loop(self, rounds: Iterable[Any], node: ast.For | ast.While) -> None:
        for each in rounds:
            if callable(each):
                each()
            try:
                self._block(node.body)
            except _Break:
                return
            except _Continue:
                continue

    def _block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name():
                self._names[target.id] = value
            case ast.Tuple() | ast.List():
                values = self._list(value)
                if len(values) != len(target.elts):
                    raise CodeError(f"{len(values)} values can't be assigned to {len(target.elts)} names")
                for each, one in zip(target.elts, values, strict=True):
                    self._assign(each, one)
            case ast.Subscript():
                container = self._value(target.value)
                container[self._value(target.slice)] = value
            case _:
                raise CodeError("only names and items can be assigned to")

    # ------------------------------------------------------------ expressions

    def _value(self, node: ast.expr) -> Any:
        self._count()
        value = self._evaluated(node)
        weigh(value, LARGEST_VALUE)
        return value

    def _evaluated(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                if node.id not in self._names:
                    raise CodeError(f"the name {node.id!r} is not defined")
                return self._names[node.id]
            case ast.List() | ast.Tuple() | ast.Set():
                values = [self._value(each) for each in node.elts]
                return {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)](values)
            case ast.Dict() if all(node.keys):
                pairs = zip(node.keys, node.values, strict=True)
                return {self._value(key): self._value(value) for key, value in pairs if key is not None}
            case ast.BinOp():
                return self._binary(node)
            case ast.BoolOp():
                stops_at = isinstance(node.op, ast.Or)
                value = None
                for each in node.values:
                    value = self._value(each)
                    if bool(value) == stops_at:
                        break
                return value
            case ast.UnaryOp() if type(node.op) in UNARY:
                return UNARY[type(node.op)](self._value(node.operand))
            case ast.Compare():
                return self._compare(node)
            case ast.IfExp():
                return self._value(node.body if self._value(node.test) else node.orelse)
            case ast.Subscript():
                return self._value(node.value)[self._value(node.slice)]
            case ast.Slice():
                parts = (node.lower, node.upper, node.step)
                return slice(*(None if part is None else self._value(part) for part in parts))
            case ast.JoinedStr():
                return "".join(self._formatted(part) for part in node.values)
            case ast.ListComp() | ast.GeneratorExp():
                return [self._value(node.elt) for _ in self._comprehend(node.generators)]
            case ast.SetComp():
                return {self._value(node.elt) for _ in self._comprehend(node.generators)}
            case ast.DictComp():
                return {self._value(node.key): self._value(node.value) for _ in self._comprehend(node.generators)}
            case ast.Lambda():
                return self._lambda(node)
            case ast.Call():
                return self._call(node)
        raise CodeError(f"{type(node).__name__} is not known in this small world")

    def _binary(self, node: ast.BinOp) -> Any:
        left, right = self._value(node.left), self._value(node.right)
        function = BINARY.get(type(node.op))
        plain = (int, float)
        if function is None or (isinstance(node.op, ast.Mod | ast.Mult) and not _both(left, right, plain)):
            raise CodeError(f"{type(node.op).__name__} is not known here for these values")
        return function(left, right)

    def _compare(self, node: ast.Compare) -> bool:
        left = self._value(node.left)
        for op, other in zip(node.ops, node.comparators, strict=True):
            right = self._value(other)
            if not COMPARE[type(op)](left, right):
                return False
            left = right
        return True

    def _formatted(self, node: ast.expr) -> str:
        if not isinstance(node, ast.FormattedValue):
            return str(self._value(node))
        form = "" if node.format_spec is None else str(self._value(node.format_spec))
        if not FORMAT.fullmatch(form):
            raise CodeError(f"the format {form!r} is not known here")
        value = self._value(node.value)
        return format(repr(value) if node.conversion == ord("r") else value, form)

    def _comprehend(self, generators: list[ast.comprehension]) -> Iterable[None]:
        first, *others = generators
        for item in self._items(first.iter):
            self._assign(first.target, item)
            if all(self._value(test) for test in first.ifs):
                if others:
                    yield from self._comprehend(others)
                else:
                    yield

    def _lambda(self, node: ast.Lambda) -> Callable[..., Any]:
        names = [argument.arg for argument in node.args.args]

        def function(*values: Any) -> Any:
            for name, value in zip(names, values, strict=True):
                self._names[name] = value
            return self._value(node.body)

        return function

    def _call(self, node: ast.Call) -> Any:
        if any(keyword.arg is None for keyword in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args):
            raise CodeError("* and ** are not known here")
        given = [self._value(argument) for argument in node.args]
        named = {keyword.arg: self._value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        match node.func:
            case ast.Name(id="print"):
                self._output.append(" ".join(map(str, given)))
                if sum(map(len, self._output)) > LARGEST_VALUE:
                    raise CodeError("too much was printed")
                return None
            case ast.Name(id="range"):
                numbers = range(*given)
                return list(numbers[: LARGEST_VALUE + 1])
            case ast.Name(id=name) if name in BUILTINS:
                return BUILTINS[name](*given, **named)
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="apis"), attr=app), attr=name):
                if given:
                    raise CodeError(f"give the arguments of apis.{app}.{name} by name")
                return self._call_app(app, name, named)
            case ast.Attribute(attr=name):
                owner = self._value(node.func.value)
                if name not in METHODS.get(type(owner), ()):
                    raise CodeError(f"{type(owner).__name__} has no method {name!r} here")
                result = getattr(owner, name)(*given, **named)
                return list(result) if name in ("items", "keys", "values") else result
        raise CodeError("only apps, methods and the usual functions can be called")

    # ------------------------------------------------------------ limits

    def _count(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise CodeError("the code takes too long")

    def _items(self, node: ast.expr) -> list[Any]:
        return self._list(self._value(node))

    def _list(self, value: Any) -> list[Any]:
        if not isinstance(value, list | tuple | set | dict | str):
            raise CodeError(f"a value of type {type(value).__name__} has no items")
        return list(value)


def weigh(value: Any, left: int) -> int:
    """How much of `left` remains after the value's items and characters. Raises CodeError if nothing does, so that no
    later step can take long or need much memory."""
    if isinstance(value, int | float) and abs(value) > LARGEST:
        raise CodeError("a number became too large")
    left -= 1 + (len(value) if isinstance(value, str) else 0)
    if left < 0:
        raise CodeError("a value became too large")
    if isinstance(value, dict):
        for key, item in value.items():
            left = weigh(item, weigh(key, left))
    elif isinstance(value, list | tuple | set):
        for item in value:
            left = weigh(item, left)
    return left


def _as_load(target: ast.expr) -> ast.expr:
    """The same place, to be read."""
    read = ast.parse(ast.unparse(target), mode="eval").body
    return ast.copy_location(read, target)


def _both(left: Any, right: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(left, kinds) and isinstance(right, kinds)
