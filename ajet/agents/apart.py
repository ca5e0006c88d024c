"""Two processes that talk over pipes: the tests' process, and the one that imports what they test.

In the tests' process `install` makes `import` find the result's modules, as proxies: what a test takes from them, calls
and gets back is asked of the other process (`serve`), which alone imports the agent's code. Plain values cross as JSON,
by value and of exactly Python's own types; anything else crosses as a proxy, which equals no plain value. So what a
test compares with what it expects can't be an object of the agent's, and what it expects never crosses.

This file is copied into sandboxes and runs there by itself, with whatever Python they have from 3.8 on. Answers come
from code that a model wrote: whatever they are, they raise nothing but an `Exception`, so that none ends the tests.
"""

from __future__ import annotations

import base64
import builtins
import collections
import functools
import importlib.machinery
import importlib.util
import json
import operator
import os
import stat
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

QUESTIONS, ANSWERS = 9, 8
"""Descriptors of the tests' process, as its shell opens them."""
SMALL = 1 << 63
SPECIAL: dict[str, Callable[..., Any]] = {
    "__len__": len,
    "__iter__": iter,
    "__next__": next,
    "__str__": str,
    "__repr__": repr,
    "__bool__": bool,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__eq__": operator.eq,
    "__lt__": operator.lt,
    "__le__": operator.le,
    "__gt__": operator.gt,
    "__ge__": operator.ge,
    "__delitem__": operator.delitem,
    "__reversed__": reversed,
    "__neg__": operator.neg,
    "__pos__": operator.pos,
    "__invert__": operator.invert,
    "__abs__": abs,
    "__index__": operator.index,
    "__hash__": hash,
    "__int__": int,
    "__float__": float,
    "__round__": round,
}
"""What a proxy does as its object would."""
_NAMES = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
ARITHMETIC = [f"__{way}{name}__" for name in _NAMES for way in ("", "i")]
SPECIAL.update({name: getattr(operator, name) for name in ARITHMETIC})
BETWEEN = ("__eq__", "__lt__", "__le__", "__gt__", "__ge__", *ARITHMETIC)
"""These are between proxies. No expected value goes across: `abs(f(2) - 0.5) < 0.1` would ask the agent."""
AS_TEXT = ("decimal.Decimal", "fractions.Fraction", "uuid.UUID", "datetime.date", "datetime.datetime", "datetime.time")
"""Python's own types whose values cross as their texts."""


class ResultError(Exception):
    """The result's process has ended, or raised what may not be raised here."""


class Peer:
    """One end. `serves`: the questions that it answers."""

    def __init__(self, incoming: Any, outgoing: Any, serves: dict[str, Callable[..., Any]]) -> None:
        self.incoming, self.outgoing, self.serves = incoming, outgoing, serves
        self.lock = threading.RLock()
        self.given: list[Any] = []
        """Objects that the other end holds proxies of."""
        self.numbers: dict[int, int] = {}
        self.proxies: weakref.WeakValueDictionary[int, Proxy] = weakref.WeakValueDictionary()
        self.errors: dict[str, type[Exception]] = {}

    def ask(self, what: str, *arguments: Any) -> Any:
        """The other end's answer. Meanwhile it may ask, too."""
        with self.lock:
            self._send({"ask": what, "with": [self.encoded(each) for each in arguments]})
            while True:
                line = self.incoming.readline()
                if not line:
                    raise ResultError("the process that holds the result has ended")
                said = json.loads(line)
                if "ask" in said:
                    self.answer(said)
                elif "error" in said:
                    self._raise(said["error"], what == "special" and arguments[0] == "__next__")
                else:
                    return self.decoded(said["value"])

    def answer(self, said: dict[str, Any]) -> None:
        """Answer one question."""
        try:
            arguments = [self.decoded(each) for each in said["with"]]
            reply = {"value": self.encoded(self.serves[said["ask"]](*arguments))}
        except BaseException as error:  # noqa: BLE001 - the agent's code, sys.exit included
            reply = {"error": {"class": self._lineage(type(error)), "text": _text(error)}}
        self._send(reply)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self.outgoing.write(json.dumps(message).encode() + b"\n")
            self.outgoing.flush()
        except OSError as error:
            raise ResultError("the process that holds the result has ended") from error

    # ------------------------------------------------------------ values

    def encoded(self, value: Any) -> Any:
        """A value as JSON. Subclasses of plain types cross as the plain type."""
        if value is None or value is True or value is False:
            return value
        if type(value) is Proxy or isinstance(value, ProxyModule):
            return {"t": "yours", "v": _number_of(value)}
        if isinstance(value, int):
            return int(value) if -SMALL < value < SMALL else {"t": "int", "v": hex(value)}
        if isinstance(value, float):
            return float(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, list):
            return [self.encoded(each) for each in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"t": "named", "v": [type(value).__name__, list(value._fields), [self.encoded(x) for x in value]]}
        for kind in (tuple, set, frozenset):
            if isinstance(value, kind):
                return {"t": kind.__name__, "v": [self.encoded(each) for each in value]}
        if isinstance(value, dict):
            return {"t": "dict", "v": [[self.encoded(key), self.encoded(each)] for key, each in value.items()]}
        if isinstance(value, (bytes, bytearray)):
            return {"t": type(value).__name__, "v": base64.b64encode(value).decode()}
        if isinstance(value, complex):
            return {"t": "complex", "v": [value.real, value.imag]}
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if name in AS_TEXT:
            return {"t": "text", "v": [name, str(value)]}
        if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
            return self.encoded(value.item())
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"t": "error", "v": self._lineage(value)}
        return {"t": "object", "v": self._given(value)}

    def decoded(self, value: Any) -> Any:
        """The value that the other end encoded."""
        if isinstance(value, list):
            return [self.decoded(each) for each in value]
        if not isinstance(value, dict):
            return value
        kind, content = value["t"], value["v"]
        if kind == "yours":
            return self.given[content]
        if kind == "object":
            known = self.proxies.get(content)
            return Proxy(self, content) if known is None else known  # its truth would be asked of the other end
        if kind == "error":
            return self._error_class(content)
        if kind == "int":
            return int(content, 16)
        if kind == "complex":
            return complex(*content)
        if kind == "dict":
            return {self.decoded(key): self.decoded(each) for key, each in content}
        if kind in ("bytes", "bytearray"):
            return getattr(builtins, kind)(base64.b64decode(content))
        if kind == "named":
            name, fields, values = content
            return _named_tuple(name, tuple(fields))(*map(self.decoded, values))
        if kind == "text":
            name, text = content
            module, _, name = AS_TEXT[AS_TEXT.index(name)].partition(".")  # no other names
            found = getattr(importlib.import_module(module), name)
            return getattr(found, "fromisoformat", found)(text)
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(self.decoded, content))

    def _given(self, value: Any) -> int:
        if id(value) not in self.numbers:
            if "get" not in self.serves and not callable(value):
                raise TypeError(f"the result gets copies of plain values, and functions, not {type(value).__name__}")
            self.numbers[id(value)] = len(self.given)
            self.given.append(value)
        return self.numbers[id(value)]

    # ------------------------------------------------------------ errors

    def _lineage(self, kind: type) -> Any:
        """An exception's class: its name if it is Python's own, else also those that it derives from."""
        if getattr(builtins, kind.__name__, None) is kind:
            return kind.__name__
        above = [self._lineage(each) for each in kind.__bases__ if issubclass(each, BaseException)]
        return [f"{self._given(kind)}:{kind.__name__}", above]

    def _error_class(self, lineage: Any) -> type[Exception]:
        """A class of this process's own that stands for it."""
        if isinstance(lineage, str):
            known = getattr(builtins, lineage)
            return known if issubclass(known, Exception) else ResultError
        name, above = lineage
        if name not in self.errors:
            bases = tuple(dict.fromkeys(map(self._error_class, above)))
            self.errors[name] = type(name.partition(":")[2], bases, {})
        return self.errors[name]

    def _raise(self, error: dict[str, Any], may_stop: bool) -> NoReturn:
        kind = self._error_class(error["class"])
        if issubclass(kind, StopIteration) and not may_stop:  # it would end a loop of the tests'
            kind = ResultError
        text = error["text"]
        if kind is ResultError:
            text = f"{error['class']}: {text}"
        try:
            raised = kind(text)
        except TypeError:  # UnicodeDecodeError and others that want more
            raised = kind.__new__(kind)
            raised.args = (text,)
        raise raised


@functools.lru_cache(maxsize=256)
def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    return collections.namedtuple(name, fields)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - the agent's class
        return ""


# ---------------------------------------------------------------- the tests' process


class Proxy:
    """An object of the result's."""

    __slots__ = ("__weakref__", "_ajet")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_ajet", (peer, number))
        peer.proxies[number] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__", "__version__"):
            raise AttributeError(name)
        return self._ajet[0].ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ajet[0].ask("set", self, name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ajet[0].ask("call", self, list(arguments), named)

    def __instancecheck__(self, other: Any) -> bool:
        return type(other) is Proxy and self._ajet[0].ask("isinstance", other, self) is True


def _special(name: str) -> Callable[..., Any]:
    def method(self: Proxy, *arguments: Any) -> Any:
        if name in BETWEEN and type(arguments[0]) is not Proxy:
            return NotImplemented
        return self._ajet[0].ask("special", name, self, *arguments)

    return method


for _name in SPECIAL:
    setattr(Proxy, _name, _special(_name))


class ProxyModule(types.ModuleType):
    """A module of the result's."""

    def __getattr__(self, name: str) -> Any:
        result = self.__dict__["__ajet__"]
        if name == "__all__":  # `import *` replaces nothing that the tests have: neither `abs` nor `__name__`
            there = {*vars(builtins), *sys._getframe(1).f_globals}
            return [each for each in result._ajet[0].ask("names", result) if each not in there]
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(result, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or isinstance(value, types.ModuleType):
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["__ajet__"], name, value)


def _number_of(value: Any) -> int:
    proxy = value.__dict__["__ajet__"] if isinstance(value, ProxyModule) else value
    return int(proxy._ajet[1])


class Finder:
    """Finds modules in the result. What lies beside the tests comes first."""

    def __init__(self, peer: Peer, root: str, names: Iterable[str] | None) -> None:
        """`names`: those that the task brought; None: all, asked for last, so that an agent's file hides nothing."""
        self.peer, self.root = peer, root
        self.names = None if names is None else frozenset(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Called by `import`."""
        parts = name.split(".")
        if name == "usercustomize" or (self.names is not None and parts[0] not in self.names):
            return None
        beside = os.path.join(self.root, *parts)
        if os.path.isfile(beside + ".py") or os.path.isfile(os.path.join(beside, "__init__.py")):
            return None
        looked_in = [os.path.relpath(each or ".", self.root) for each in sys.path]
        kind = self.peer.ask("find", name, [each for each in looked_in if not each.startswith("..")])
        if kind is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=kind == "package")  # type: ignore[arg-type]
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(beside)
        return spec

    def create_module(self, spec: Any) -> types.ModuleType:
        """Called by `import`."""
        module = ProxyModule(spec.name)
        module.__dict__["__ajet__"] = self.peer.ask("import", spec.name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Called by `import`."""


def install(root: str, names: Iterable[str]) -> None:
    """Make `import` find the result's modules, if this is a process of the tests."""
    try:
        if not stat.S_ISFIFO(os.fstat(QUESTIONS).st_mode) and not stat.S_ISSOCK(os.fstat(QUESTIONS).st_mode):
            return
        incoming, outgoing = os.fdopen(ANSWERS, "rb", closefd=False), os.fdopen(QUESTIONS, "wb", closefd=False)
    except OSError:  # a process that the tests started, without their descriptors
        return
    peer = Peer(incoming, outgoing, {"call": lambda function, arguments, named: function(*arguments, **named)})
    finders: list[Any] = sys.meta_path
    finders.insert(0, Finder(peer, root, names))
    finders.append(Finder(peer, root, None))


# ---------------------------------------------------------------- the result's process


def serve() -> None:
    """Import the result's modules from the working directory, and answer until nobody asks any more."""
    root = os.path.realpath(os.getcwd())
    sys.path[0] = root

    def find(name: str, folders: list[str]) -> str | None:
        for folder in folders:
            place = os.path.normpath(os.path.join(root, folder))
            if place not in sys.path:
                sys.path.append(place)
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        places = [*(spec.submodule_search_locations or []), spec.origin or ""]
        if not any(os.path.realpath(place).startswith(root + os.sep) for place in places if place):
            return None
        return "module" if spec.submodule_search_locations is None else "package"

    def names(module: Any) -> list[str]:
        return list(getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")]))

    with os.fdopen(os.dup(0), "rb") as incoming, os.fdopen(os.dup(1), "wb") as outgoing:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        peer = Peer(
            incoming,
            outgoing,
            {
                "find": find,
                "import": importlib.import_module,
                "names": names,
                "get": getattr,
                "set": setattr,
                "call": lambda function, arguments, named: function(*arguments, **named),
                "special": lambda name, *arguments: SPECIAL[name](*arguments),
                "isinstance": isinstance,
            },
        )
        for line in incoming:
            peer.answer(json.loads(line))


if __name__ == "__main__":
    serve()
