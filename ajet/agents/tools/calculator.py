"""`Calculator`: arithmetic, functions and statistics, exact for integers and bounded in size and time.

An expression is parsed, and only numbers, lists, operators and the functions named here are computed: nothing is
executed. Every operation is checked before it runs, so that no expression can take long or fill the memory.
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ajet.agents.tools.tool import Arguments, StatelessTool, ToolContext, ToolResult

Number = int | float
Value = Number | list[Number]

EXPRESSION_CHARS = 2000
MAX_DIGITS = 4000
"""The limit for an integer result. Python itself prints no more than 4300."""
_MAX_BITS = int(MAX_DIGITS * math.log2(10))
_MAX_NODES = 1000
_EXACT_FLOATS = 2.0**53
"""Below this, a float without a fraction is exactly an integer."""

_SPELLINGS = {
    "×": "*",
    "·": "*",
    "÷": "/",
    "−": "-",
    "–": "-",
    "^": "**",
    "²": "**2",
    "³": "**3",
    "π": "pi",
    "√": "sqrt",
    "∞": "inf",
}
_ROOT = re.compile(r"sqrt(\d+(?:\.\d+)?)")
"""`√9`, spelled out."""
_CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}


class CalculatorError(ValueError):
    """An expression that can't be computed. Says why."""


def calculate(expression: str) -> Value:
    """The value of an expression. Raises `CalculatorError`."""
    if len(expression) > EXPRESSION_CHARS:
        raise CalculatorError(f"the expression has {len(expression)} characters; at most {EXPRESSION_CHARS} are read")
    text = "".join(_SPELLINGS.get(character, character) for character in expression).strip()
    text = _ROOT.sub(r"sqrt(\1)", text)
    if not text:
        raise CalculatorError("the expression is empty")
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        where = f" near {text[max(0, (error.offset or 1) - 6) : (error.offset or 1) + 5]!r}"
        raise CalculatorError(f"the expression can't be read{where}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError):
        raise CalculatorError("the expression can't be read: it is nested too deeply or has an unknown sign") from None
    if sum(1 for _ in ast.walk(tree)) > _MAX_NODES:
        raise CalculatorError("the expression has too many parts: split it")
    if isinstance(tree.body, ast.Tuple):  # 1,234 + 5 would be the list [1, 239]
        raise CalculatorError("a comma only separates a function's arguments and a list's items: write 1234, not 1,234")
    try:
        return _tidy(_value(tree.body))
    except CalculatorError:
        raise
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None
    except OverflowError:
        raise CalculatorError("the result is too large for a decimal number") from None
    except statistics.StatisticsError as error:
        raise CalculatorError(str(error)) from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CalculatorError(f"not defined for these values: {error}") from None
    except RecursionError:
        raise CalculatorError("the expression is nested too deeply") from None


def show(value: Value) -> str:
    """Format a value, floats with all their digits."""
    return f"[{', '.join(map(show, value))}]" if isinstance(value, list) else str(value)


class Calculator(StatelessTool):
    """The tool."""

    def __init__(self, *, name: str = "calculator") -> None:
        self.name = name
        self.description = (
            "Compute an arithmetic expression. Integers are exact. Operators: + - * / // % ** (or ^). "
            f"Functions: {', '.join(_FUNCTIONS)}. Constants: {', '.join(_CONSTANTS)}. Angles are in radians. "
            "Lists in square brackets, for example mean([1, 2, 4])."
        )
        self.parameters = {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "For example 3 * (4 + 5), sqrt(2), or stdev([2, 4, 9])"}
            },
            "required": ["expression"],
            "additionalProperties": False,
        }

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        try:
            value = calculate(arguments["expression"])
        except CalculatorError as error:
            return ToolResult(f"{arguments['expression'][:200]!r}: {error}", success=False)
        return ToolResult(show(value), data=value)


# ---------------------------------------------------------------- evaluation


def _value(node: ast.expr) -> Value:
    match node:
        case ast.Constant(value=bool()):
            raise CalculatorError("True and False are no numbers")
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.Name(id=name):
            if name in _CONSTANTS:
                return _CONSTANTS[name]
            if name in _FUNCTIONS:
                raise CalculatorError(f"{name} is a function: write {name}(…)")
            raise CalculatorError(f"unknown name {name!r}; constants: {', '.join(_CONSTANTS)}")
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_number(_value(item)) for item in items]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _bounded(_UNARY[type(op)](_number(_value(operand))))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_number(_value(left)), _number(_value(right))))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return _call(name, [_value(argument) for argument in arguments])
        case ast.Call():
            raise CalculatorError("only the listed functions can be called, without keywords")
        case _:
            raise CalculatorError(f"{ast.unparse(node)[:60]!r} is not arithmetic: numbers, operators, functions, lists")


def _call(name: str, arguments: list[Value]) -> Value:
    function = _FUNCTIONS.get(name)
    if function is None:
        raise CalculatorError(f"unknown function {name!r}; there are: {', '.join(_FUNCTIONS)}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        raise CalculatorError(f"{name} can't take {len(arguments)} argument{'s' * (len(arguments) != 1)}") from None
    result = function(*arguments)
    return result if isinstance(result, list) else _bounded(_number(result))


def _bounded(number: Any) -> Number:
    """Return `number`, or raise if it has too many digits or isn't a real number."""
    if isinstance(number, complex):
        raise CalculatorError("the result is not a real number")
    if isinstance(number, int):
        _fits(number.bit_length())
    elif math.isnan(number) or math.isinf(number):
        raise CalculatorError("the result is not a finite number")
    result: Number = number
    return result


def _fits(bits: float) -> None:
    if bits > _MAX_BITS:
        raise CalculatorError(f"the result has more than {MAX_DIGITS} digits")


def _number(value: Any) -> Number:
    if isinstance(value, list):
        raise CalculatorError("a list can't be computed with; sum, mean, max and other functions take lists")
    if isinstance(value, int | float):
        return value
    return float(value)  # a Fraction of the statistics functions


def _tidy(value: Value) -> Value:
    """Convert a float without a fraction to an integer, where that is exact."""
    if isinstance(value, list):
        return [_tidy_number(item) for item in value]
    return _tidy_number(value)


def _tidy_number(value: Number) -> Number:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_FLOATS else value


def _integer(value: Any, what: str) -> int:
    number = _tidy_number(_number(value))
    if not isinstance(number, int):
        raise CalculatorError(f"{what} needs an integer")
    return number


def _divide(a: Number, b: Number) -> Number:
    """Divide; the result is exact if the quotient is an integer."""
    if isinstance(a, int) and isinstance(b, int) and b and a % b == 0:
        return a // b
    return a / b


def _power(base: Number, exponent: Number) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        _fits((abs(base).bit_length() - 1) * exponent)
    return base**exponent


def _factorial(value: Any) -> int:
    number = _integer(value, "factorial")
    if number < 0:
        raise CalculatorError("factorial needs an integer from 0 on")
    _fits(math.lgamma(number + 1) / math.log(2) if number < 10**6 else math.inf)
    return math.factorial(number)


def _choices(function: Callable[[int, int], int], name: str) -> Callable[[Any, Any], int]:
    def chosen(n: Any, k: Any) -> int:
        total, taken = _integer(n, name), _integer(k, name)
        _fits(max(0, min(taken, total - taken) if name == "comb" else taken) * total.bit_length())
        return function(total, taken)

    return chosen


def _lcm(*values: Any) -> int:
    numbers = [_integer(value, "lcm") for value in _flat(values)]
    _fits(sum(number.bit_length() for number in numbers))
    return math.lcm(*numbers)


def _round(value: Any, digits: Any = 0) -> Number:
    places = max(-MAX_DIGITS, min(_integer(digits, "round"), 400))
    return round(_number(value), places) if places else round(_number(value))


def _log(value: Any, base: Any = None) -> float:
    return math.log(_number(value)) if base is None else math.log(_number(value), _number(base))


def _flat(values: Sequence[Any]) -> list[Number]:
    """`f(1, 2)` and `f([1, 2])` mean the same."""
    if len(values) == 1 and isinstance(values[0], list):
        return values[0]
    return [_number(value) for value in values]


def _of_list(function: Callable[[list[Number]], Any]) -> Callable[..., Any]:
    def over(*values: Any) -> Any:
        numbers = _flat(values)
        if not numbers:
            raise CalculatorError("the list is empty")
        return function(numbers)

    return over


def _of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: function(*map(_number, values))


_UNARY: dict[type, Callable[[Number], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type, Callable[[Number, Number], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: _of_numbers(getattr(math, name))
        for name in (
            *("sqrt", "cbrt", "exp", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
            *("sinh", "cosh", "tanh", "degrees", "radians", "ceil", "floor", "trunc", "hypot", "isqrt"),
        )
    },
    "abs": _of_numbers(abs),
    "log": _log,
    "round": _round,
    "factorial": _factorial,
    "gcd": lambda *values: math.gcd(*(_integer(value, "gcd") for value in _flat(values))),
    "lcm": _lcm,
    "comb": _choices(math.comb, "comb"),
    "perm": _choices(math.perm, "perm"),
    **{name: _of_list(function) for name, function in (("min", min), ("max", max), ("sum", sum), ("len", len))},
    **{
        name: _of_list(getattr(statistics, name))
        for name in ("mean", "median", "mode", "stdev", "pstdev", "variance", "pvariance")
    },
    "sorted": _of_list(sorted),
}
