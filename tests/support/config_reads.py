"""Which keys of the config each part of the program reads, found in the source without running it.

The graph's nodes are the top-level functions and classes of every module outside `ajet/config`. A node leads to what it
names: through imports (those inside functions too) and through import paths in strings. A read is an attribute of an
expression that is known to be a section of the config: `….ajet.rollout.seed`, a variable assigned such a section, or a
parameter annotated with its class.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ajet.config import kinds
from ajet.config.keys import known_keys
from ajet.config.root import Config
from ajet.config.section import Section

AJET = Path(__file__).parent.parent.parent / "ajet"

KeyPath = tuple[str, ...]
KEYS = known_keys()
ROOT_NAMES = ("config", "_config", "loaded")
"""Variables and attributes that hold a whole `Config`."""
SECTIONS: dict[KeyPath, type[Section]] = {(): Config} | {
    path: key.section for path, key in KEYS.items() if key.section is not None
}
BY_CLASS: dict[str, set[KeyPath]] = defaultdict(set)
for _path, _section in SECTIONS.items():
    BY_CLASS[_section.__name__].add(_path)


FROM_CONFIG = "from_config"


class Node(NamedTuple):
    """A top-level function or class; `name` is empty for what a module runs when it is imported."""

    module: str
    name: str


class Source:
    """One module: its top-level definitions and what its names refer to."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.tree = ast.parse(path.read_text())
        self.definitions: dict[str, list[ast.stmt]] = {"": []}
        self.constants: dict[str, str] = {}
        for statement in _flat(self.tree.body):
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.definitions.setdefault(statement.name, []).append(statement)
                for method in getattr(statement, "body", []):
                    if getattr(method, "name", "") == FROM_CONFIG:  # not everyone who uses the class calls it
                        statement.body.remove(method)
                        self.definitions[f"{statement.name}.{FROM_CONFIG}"] = [method]
            else:
                self.definitions[""].append(statement)
                if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                    text = self.text(statement.value)
                    if text is not None:
                        self.constants[statement.targets[0].id] = text
        self.imports = dict(_imports(self.definitions[""]))

    def text(self, node: ast.AST) -> str | None:
        """The text that a literal or an f-string of known constants stands for."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.JoinedStr):
            parts = [self.text(part) for part in node.values]
            return None if None in parts else "".join(part or "" for part in parts)
        if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
            return self.constants.get(node.value.id)
        return None


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(statement.test):
                yield from _flat([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            yield from _flat([*statement.body, *statement.orelse, *statement.finalbody])
        else:
            yield statement


@cache
def _walk(statement: ast.AST) -> list[ast.AST]:
    """All nodes of a statement; several passes go through them."""
    return list(ast.walk(statement))


@cache
def _words(annotation: ast.expr) -> list[str]:
    return re.findall(r"\w+", ast.unparse(annotation))


def _imports(body: Iterable[ast.AST]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each imported name of ours, with the module and the name in it (empty: the module itself)."""
    for statement in body:
        for node in _walk(statement):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "ajet":
                        yield alias.asname or "ajet", (alias.name if alias.asname else "ajet", "")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ajet":
                for alias in node.names:
                    yield alias.asname or alias.name, (node.module or "", alias.name)


@cache
def sources() -> dict[str, Source]:
    """Every module outside `ajet/config`, by its name. Read when a test asks: each worker imports this module."""
    found = {}
    for path in sorted(AJET.rglob("*.py")):
        parts = path.relative_to(AJET.parent).with_suffix("").parts
        if parts[:2] == ("ajet", "config") or {"project_template", "agent_template"} & {*parts}:
            continue
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = Source(name, path)
    return found


def _resolve(module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Iterator[Node]:
    """The nodes that `name` in `module` stands for, through re-exports."""
    if (module, name) in seen:
        return
    seen |= {(module, name)}
    if name and f"{module}.{name}" in sources():
        yield from _whole(f"{module}.{name}")
    source = sources().get(module)
    if source is None:
        return
    if not name:
        yield from _whole(module)
    elif name in source.definitions:
        yield Node(module, name)
    elif name in source.imports:
        yield from _resolve(*source.imports[name], seen)
    elif "__getattr__" in source.definitions:
        yield Node(module, "__getattr__")
    else:
        yield Node(module, "")


def _whole(module: str) -> Iterator[Node]:
    yield from (Node(module, name) for name in sources()[module].definitions)


PATH = re.compile(r"^(?:pkg://)?(ajet(?:\.\w+)+)(?:(?::|->)(\w+))?$")


def _named_in(text: str) -> Iterator[Node]:
    """The nodes that an import path in a string leads to."""
    found = PATH.match(text)
    if found is None:
        return
    module, name = found[1], found[2] or ""
    if module not in sources() and not name:
        module, _, name = module.rpartition(".")
    if module in sources():
        yield from _resolve(module, name)
        if f"{name}.{FROM_CONFIG}" in sources()[module].definitions:
            yield Node(module, f"{name}.{FROM_CONFIG}")


def _table(call: ast.Call, names: dict[str, tuple[str, str]]) -> Mapping[str, str] | None:
    """The table of `ajet.config.kinds` that `load(TABLE, …)` or `TABLE.get(…)` takes a part from."""
    taken = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "get" else None
    if isinstance(call.func, ast.Name) and names.get(call.func.id) == ("ajet.config.kinds", "load"):
        taken = call.args[0]
    if isinstance(taken, ast.Name) and names.get(taken.id, ("", ""))[0] == "ajet.config.kinds":
        return vars(kinds)[taken.id]  # type: ignore[no-any-return]
    return None


def _edges(node: Node) -> set[Node]:
    source = sources()[node.module]
    found = {Node(node.module, "")}
    for statement in source.definitions[node.name]:
        names = source.imports | dict(_imports([statement]))
        for part in _walk(statement):
            if isinstance(part, ast.Name):
                if part.id in names:
                    module, name = names[part.id]
                    if f"{module}.{name}" not in sources() and name:  # a module itself counts by what is taken from it
                        found.update(_resolve(module, name))
                elif part.id in source.definitions:
                    found.add(Node(node.module, part.id))
            elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                module, name = names.get(part.value.id, (node.module, part.value.id))
                inner = f"{module}.{name}" if name else module
                if inner in sources():
                    found.update(_resolve(inner, part.attr))
                elif part.attr == FROM_CONFIG:
                    for owner in _resolve(module, name):
                        found.add(Node(owner.module, f"{owner.name}.{FROM_CONFIG}"))
            elif isinstance(part, ast.Constant | ast.JoinedStr) and (text := source.text(part)):
                found.update(_named_in(text))
            elif isinstance(part, ast.Call) and (table := _table(part, names)) is not None:
                found.update(node for place in table.values() for node in _named_in(place))
    for part in source.definitions[node.name] if not node.name else ():
        # importing a package runs what it imports
        for module, name in dict(_imports([part])).values():
            target = f"{module}.{name}" if f"{module}.{name}" in sources() else module
            if target in sources():
                found.add(Node(target, ""))
    return found


@cache
def edges() -> dict[Node, set[Node]]:
    """Where each node leads."""
    return {node: _edges(node) for source in sources() for node in _whole(source)}


def reachable(roots: Iterable[tuple[str, str]], without: Iterable[str]) -> set[Node]:
    """Every node that a run may come to from these definitions (module and name), never entering those in `without`."""
    banned = tuple(without)

    def allowed(node: Node) -> bool:
        return not any(f"{node.module}.{node.name}.".startswith(f"{name}.") for name in banned)

    waiting = [node for module, name in roots for node in _resolve(module, name)]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in seen and allowed(node):
            seen.add(node)
            waiting.extend(edges()[node])
    return seen


class _Reader:
    """Finds what one definition reads. Knows which expressions are sections: a set of key paths each."""

    def __init__(self, body: list[ast.stmt], known: dict[str, set[KeyPath]], itself: set[KeyPath]) -> None:
        self.names: dict[str, set[KeyPath]] = defaultdict(set)
        for name, paths in known.items():
            self.names[name] |= paths
        self.itself = itself
        self.found: set[KeyPath] = set()
        self.body = body

    def learn(self) -> dict[str, set[KeyPath]]:
        """Names (and attributes of `self`, with a dot) that hold sections."""
        naming = ast.arg | ast.Assign | ast.AnnAssign | ast.NamedExpr
        nodes = [node for statement in self.body for node in _walk(statement) if isinstance(node, naming)]
        for _ in range(3):  # a section may be named through other names
            for node in nodes:
                self._learn(node)
        return self.names

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.arg):
            words = _words(node.annotation) if node.annotation else ["Any"]
            for word in words:
                self.names[node.arg] |= BY_CLASS.get(word, set())
            if words == ["Any"]:
                self.names[node.arg] |= {path for path in SECTIONS if path and path[-1] == node.arg}
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._bind(target, node.value)

    def _bind(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._bind(one, other)
        elif isinstance(target, ast.Name):
            self.names[target.id] |= self.sections(value)
        elif isinstance(target, ast.Attribute):
            self.names["." + target.attr] |= self.sections(value)

    def sections(self, node: ast.AST) -> set[KeyPath]:
        """The sections that an expression may be."""
        if isinstance(node, ast.Name):
            if node.id == "self" and self.itself:
                return self.itself
            return self.names.get(node.id, set()) | ({()} if node.id in ROOT_NAMES else set())
        if isinstance(node, ast.Attribute):
            if node.attr == "ajet":
                return {("ajet",)}
            inner = {(*path, node.attr) for path in self.sections(node.value)}
            found = {path for path in inner if path in SECTIONS}
            return found or self.names.get("." + node.attr, set()) | ({()} if node.attr in ROOT_NAMES else set())
        if isinstance(node, ast.Subscript):
            inner = self.sections(node.value)
            if isinstance(node.slice, ast.Constant):
                return {path for base in inner if (path := (*base, node.slice.value)) in SECTIONS}
            return {path for base in inner for path in SECTIONS if path[:-1] == base and path}
        if isinstance(node, ast.IfExp):
            return self.sections(node.body) | self.sections(node.orelse)
        if isinstance(node, ast.BoolOp):
            return {path for value in node.values for path in self.sections(value)}
        return set()

    def read(self) -> set[KeyPath]:
        """The keys that are read."""
        for statement in self.body:
            for node in _walk(statement):
                self._read(node)
        return self.found

    def _read(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            for base in self.sections(node.value):
                self._take(base, node.attr)
        elif isinstance(node, ast.Subscript):
            for base in self.sections(node.value):
                self._take(base, node.slice.value if isinstance(node.slice, ast.Constant) else None)
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id == "getattr":
                for base in self.sections(node.args[0]):
                    name = node.args[1]
                    self._take(base, name.value if isinstance(name, ast.Constant) else None)
            elif isinstance(function, ast.Attribute) and function.attr == "model_dump":
                for base in self.sections(function.value):
                    if len(base) > 1:  # the whole config is dumped to be stored, which uses none of it
                        self.found |= {path for path in KEYS if path[: len(base)] == base}

    def _take(self, base: KeyPath, name: object) -> None:
        if name is None:
            self.found |= {path for path in KEYS if path[:-1] == base}
        elif (path := (*base, str(name))) in KEYS:
            self.found.add(path)
        elif isinstance(found := getattr(SECTIONS[base], str(name), None), property):
            source = ast.parse(textwrap.dedent(inspect.getsource(found.fget)))  # type: ignore[arg-type]
            reader = _Reader(source.body, {}, {base})
            reader.learn()
            self.found |= reader.read()


@cache
def _attributes(source: Source) -> dict[str, set[KeyPath]]:
    """Attributes that hold sections, in this module's classes and in those they are derived from."""
    found: dict[str, set[KeyPath]] = defaultdict(set)
    for body in source.definitions.values():
        for name, paths in _Reader(body, {}, set()).learn().items():
            if name.startswith("."):
                found[name] |= paths
        for base in (base for part in body if isinstance(part, ast.ClassDef) for base in part.bases):
            module, name = source.imports.get(ast.unparse(base), ("", ""))
            for node in _resolve(module, name):
                if node.module != source.name:
                    for attribute, paths in _attributes(sources()[node.module]).items():
                        found[attribute] |= paths
    return found


@cache
def reads() -> dict[Node, set[KeyPath]]:
    """What each node itself reads."""
    found = {}
    for source in sources().values():
        attributes = _attributes(source)
        for name, body in source.definitions.items():
            reader = _Reader(body, attributes, set())
            reader.learn()
            found[Node(source.name, name)] = reader.read()
    return found


LEAVES = {path for path, key in KEYS.items() if key.section is None}


def leaves_read_by(nodes: Iterable[Node]) -> set[KeyPath]:
    """The keys (not groups) that these nodes read."""
    return {path for node in nodes for path in reads()[node]} & LEAVES
