"""`judge_by_tests`: what crosses between the tests and the result, and what is an error of the task's."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from ajet.agents.task_tests import Verdict, bring_files, judge_by_tests
from ajet.environment.sandboxes import SandboxError, SandboxSettings, open_sandbox
from ajet.schema.errors import TaskDataError

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


def judged(files: dict[str, str], test: str, command: str = "python3 test_it.py", **metadata: Any) -> Verdict:
    task = {"files": files, "test_files": {"test_it.py": test}, **metadata}

    async def main() -> Verdict:
        async with open_sandbox(SandboxSettings(memory_mb=256, disk_mb=8)) as sandbox:
            await bring_files(sandbox, task)
            return await judge_by_tests(sandbox, task, command)

    return asyncio.run(main())


SHAPES = """
from collections import Counter, OrderedDict, namedtuple
from datetime import date, datetime
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from uuid import UUID

class Error(Exception): pass
class TooSmall(Error, ValueError): pass
class Colour(IntEnum):
    RED = 3
Pair = namedtuple("Pair", "left right")
LIMIT = 10 ** 30
VALUES = [None, True, -1, 1.5, float("inf"), "ü\\ud800", b"\\x00", (1, [2]), {3}, frozenset(), {(1, 2): {"a": 1j}}]

EXACT = [Decimal("1.50"), Fraction(1, 3), UUID(int=7), date(2024, 2, 29), datetime(2024, 1, 1, 12, 0, 0, 5)]

def same(value): return value
def count(text): return Counter(text)
def pair(): return Pair(1, "b")
def small(n):
    if n < LIMIT: raise TooSmall(f"{n} is too small")
def numbers(n):
    for i in range(n): yield i
def apply(function, values, *, key=None): return [function(v) for v in sorted(values, key=key)]
def changed(values): values.append(4)
def leave(): raise SystemExit(0)
def five(): return Number()

class Stack:
    def __init__(self, *items): self.items = list(items)
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
    def __eq__(self, other): return self.items == other.items
    def __repr__(self): return f"Stack{tuple(self.items)}"
    def push(self, item):
        self.items.append(item)
        return self

class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
    def __hash__(self): return hash((self.x, self.y))
    def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)
    def __mul__(self, other): return self.x * other.x + self.y * other.y
    def __neg__(self): return Vector(-self.x, -self.y)
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
    def __float__(self): return abs(self)
    def __round__(self, digits=0): return round(abs(self), digits)
    def __ior__(self, other):
        self.x = other.x
        return self

class Number:
    # as numpy's
    ndim = 0
    def item(self): return 5
Number.__module__ = "numpy"

class Cheat:
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
"""
ASKS = """
import decimal, fractions, math
import shapes, pack.inner
from pack import inner as again
from shapes import *

assert shapes.VALUES == [same(v) for v in VALUES] and all(type(a) is type(same(a)) for a in VALUES), VALUES
assert EXACT == [same(v) for v in EXACT] and EXACT[:2] == [decimal.Decimal("1.5"), fractions.Fraction(1, 3)], EXACT
assert math.isnan(same(math.nan)) and LIMIT == 10 ** 30 and shapes.LIMIT == LIMIT
assert count("aab") == {"a": 2, "b": 1} and Colour.RED == 3
assert pair() == (1, "b") and pair().right == "b"
assert list(numbers(3)) == [0, 1, 2] and 2 in numbers(3) and sum(numbers(4)) == 6
assert apply(lambda v: v * 2, [3, 1], key=lambda v: -v) == [6, 2] and apply(same, {5}) == [5]
values = [1]
changed(values)
assert values == [1]

def raised(kind, call, *arguments):
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(kind)

assert raised(TooSmall, small, 3) == "3 is too small" == raised(shapes.Error, small, 3) == raised(ValueError, small, 3)
assert "SystemExit: 0" in raised(Exception, leave)
assert "unexpected keyword" in raised(TypeError, lambda: same(value=1, other=2))
assert "int" in raised(TypeError, lambda: Stack() - 1) and "Proxy" in raised(TypeError, lambda: 1 < Stack())
assert "not object" in raised(TypeError, same, object())

stack = Stack(1, 2)
assert len(stack.push(3)) == 3 and stack[2] == 3 and stack.items == [1, 2, 3] and list(stack) == [1, 2, 3]
assert isinstance(stack, Stack) and not isinstance(3, Stack) and stack.push(4) is stack and stack
assert repr(stack) == "Stack(1, 2, 3, 4)" and stack == Stack(1, 2, 3, 4) and stack != Stack() and stack != 3
empty = Stack()
assert not empty and same(empty) is empty
stack.items = [9]
assert stack[0] == 9 and same(stack) is stack
shapes.LIMIT = 2
assert small(2) is None
assert shapes.five() == 5 and type(shapes.five()) is int
one, two = Vector(3, 4), Vector(1, -1)
assert (one + two).x == 4 and one * two == -1 and -one == Vector(-3, -4) and abs(one) == float(one) == round(one) == 5
assert sum([two, two], Vector(0, 0)) == Vector(2, -2) and len({one, Vector(3, 4), two}) == 2 and one in {Vector(3, 4)}
kept = two
two |= one
assert two is kept and kept.x == 3
for wrong in (lambda: Cheat() - 1, lambda: 1 - Cheat(), lambda: abs(Cheat() - 0.5), lambda: one - two, lambda: ~one):
    raised(TypeError, wrong)
assert pack.inner.WHO == again.WHO == "inner" and again is pack.inner
"""
FILES = {"shapes.py": SHAPES, "pack/__init__.py": "", "pack/inner.py": "from shapes import LIMIT\nWHO = 'inner'\n"}


def test_what_crosses() -> None:
    verdict = judged(FILES, ASKS)
    assert verdict.passed, verdict.output


@pytest.mark.parametrize(
    ("files", "test", "command"),
    [
        ({"src/lib/__init__.py": "from lib.a import N", "src/lib/a.py": "N = 2"}, "import lib; assert lib.N == 2",
         "PYTHONPATH=$PYTHONPATH:src python3 test_it.py"),
        ({"colorsys.py": "N = 2"}, "import colorsys; assert colorsys.N == 2", "cd / && python3 /workspace/test_it.py"),
        ({"n.py": "N = 2"}, "", "python3 -c 'import n; assert n.N == 2'"),
        ({"n.py": "N = 2"}, "import unittest, n\nclass T(unittest.TestCase):\n"
         "    def test_n(self): self.assertEqual(n.N, 2)", "python3 -m unittest -q test_it"),
    ],
    ids=["src", "a name of the standard library", "a line", "unittest"],
)  # fmt: skip
def test_where_modules_are_found(files: dict[str, str], test: str, command: str) -> None:
    assert judged(files, test, command).passed


def test_a_folder_of_the_tasks(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").write_text("N = 2")
    test = {"lib/test_lib.py": "import lib\nassert lib.N == 2\n"}
    assert judged({}, "", "python3 lib/test_lib.py", folder=str(tmp_path), test_files=test).passed


def test_a_result_replaces_nothing_that_the_tests_have() -> None:
    result = "__all__ = ['n', 'abs', 'math', '__name__']\nn = 2\ndef abs(x): return 0\nclass math: inf = 2"
    test = "import math\nfrom r import *\nassert n == 2 and __name__ == '__main__' and abs(-1) and math.inf > 2"
    verdict = judged({"r.py": result}, test)
    assert verdict.passed, verdict.output


def test_tests_that_say_nothing_are_an_error() -> None:
    with pytest.raises(TaskDataError, match=r"imported nothing of what the agent wrote.*result_as: files"):
        judged({"n.py": "N = 1"}, "print('fine')")
    with pytest.raises(TaskDataError, match="its options -I"):
        judged({"n.py": "N = 1"}, "import n", "python3 -I test_it.py")
    with pytest.raises(TaskDataError, match="`result_as` must be one of modules, files, not 'file'"):
        judged({"n.py": "N = 1"}, "import n", result_as="file")
    skipped = judged({"m.py": ""}, "try:\n    import n\nexcept ImportError:\n    pass")
    assert (skipped.exit_code, skipped.passed, skipped.why) == (0, False, "no module of the result was imported")


def test_the_result_as_files() -> None:
    files = {"go.sh": "echo 42 > answer", "test_it.py/x": ""}

    async def main() -> tuple[Verdict, Verdict]:
        task = {"test_files": {"test_it.sh": "sh go.sh; grep -qx 42 answer; echo $HOME"}, "result_as": "files"}
        async with open_sandbox(SandboxSettings(memory_mb=64, disk_mb=8)) as sandbox:
            await bring_files(sandbox, {"files": files})
            await sandbox.exec("rm -rf test_it.py; mkdir -p test_it.sh; chmod 000 test_it.sh")
            passed = await judge_by_tests(sandbox, task, "sh -e test_it.sh")
            await sandbox.exec("echo exit 1 > go.sh; cat /dev/zero > zeros")
            return passed, await judge_by_tests(sandbox, task, "sh -e test_it.sh")

    passed, failed = asyncio.run(main())
    assert passed == Verdict(0, "/tmp\n(exit code 0)")
    assert not failed.passed


def test_a_sandbox_that_cant_be_made_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> Verdict:
        task = {"files": {"n.py": "N = 2"}, "test_files": {"test_it.py": "import n"}}
        async with open_sandbox(SandboxSettings(memory_mb=64, disk_mb=8)) as sandbox:
            await bring_files(sandbox, task)
            monkeypatch.setenv("PATH", "/nowhere")
            return await judge_by_tests(sandbox, task, "python3 test_it.py")

    with pytest.raises(SandboxError):
        asyncio.run(main())


def test_without_confinement() -> None:
    async def main() -> Verdict:
        task = {"files": {"n.py": "N = 2"}, "test_files": {"test_it.py": "import n; assert n.N == 2"}}
        async with open_sandbox(SandboxSettings(kind="none", network="host")) as sandbox:
            await bring_files(sandbox, task)
            await sandbox.exec("rm test_it.py; mkfifo test_it.py; ln -s n.py m.py")
            return await judge_by_tests(sandbox, task, "python3 test_it.py")

    assert asyncio.run(main()).passed
