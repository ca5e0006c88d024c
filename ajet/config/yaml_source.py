"""YAML text → a tree of nodes that know their lines.

Tags such as `!!python/…`, repeated keys, files that are too large and anchors that multiply ("bombs") are refused.
Numbers, booleans and null are read as OmegaConf reads them (so `1e-6` is a number); dates stay text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from ajet.config.keys import nearest
from ajet.schema.errors import ConfigError

MAX_BYTES = 512 * 1024
"""A config has a few KB. Beyond this, parsing could take longer than the second within which errors are promised."""
MAX_VALUES = 20_000
"""Most values after anchors are expanded: about a hundred times as many as in the largest config we know."""
MAX_DEPTH = 40

NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
TRUE = re.compile(r"^(?:yes|Yes|YES|true|True|TRUE|on|On|ON)$")
FALSE = re.compile(r"^(?:no|No|NO|false|False|FALSE|off|Off|OFF)$")
INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x_*[0-9a-fA-F][0-9a-fA-F_]*|0o_*[0-7][0-7_]*|0b_*[01][01_]*)$")
FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$")
INFINITY = re.compile(r"^([-+]?)\.(?:inf|Inf|INF)$")
NOT_A_NUMBER = re.compile(r"^\.(?:nan|NaN|NAN)$")

PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq")}

NO_NAME = ("a key must be a name", "quote text that begins with [ or {; `{{…}}` needs quotes too")
NOT_YAML = {"\t": "a tab", "\xa0": "a no-break space", "\u3000": "a wide space"}
"""What an editor or a web page leaves where YAML takes nothing but spaces."""
HINTS = {
    "mapping values are not allowed": "wrong indentation, no `: ` in the line above, or text with `: ` needs quotes",
    "could not find expected ':'": "a key needs `: ` after it",
    "did not find expected key": "the indentation doesn't match the lines above",
    "did not find expected '-' indicator": "the indentation doesn't match the lines above",
    "found undefined alias": "no `&name` above defines it",
    "cannot start any token": "quote text that begins with @, ` or %",
    "unexpected end of stream": "a quote or bracket is never closed",
    "did not find expected ',' or ']'": "a bracket is never closed",
    "did not find expected ',' or '}'": "a brace is never closed",
}


class Unfilled(str):
    """`{{NAME}}` without quotes: the place in a template where a program was to write a value."""


@dataclass(slots=True)
class YamlNode:
    """A value and its line. Mappings and lists hold nodes."""

    value: Any
    line: int
    size: int = 1
    """Number of values in it, itself included, with anchors expanded."""
    depth: int = 1
    key_lines: dict[Any, int] = field(default_factory=dict)

    def plain(self) -> Any:
        """As plain Python data."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def line_of(self, path: tuple[Any, ...]) -> int:
        """The line of the key at `path`, or of its nearest ancestor that exists."""
        if not path:
            return self.line
        if isinstance(self.value, dict) and path[0] in self.value:
            inner: YamlNode = self.value[path[0]]
            return inner.line_of(path[1:]) if path[1:] and inner.reaches(path[1]) else self.key_lines[path[0]]
        if isinstance(self.value, list) and isinstance(path[0], int) and path[0] < len(self.value):
            element: YamlNode = self.value[path[0]]
            return element.line_of(path[1:])
        return self.line

    def reaches(self, key: Any) -> bool:
        """Whether there is a value for `key`."""
        if isinstance(self.value, dict):
            return key in self.value
        return isinstance(self.value, list) and isinstance(key, int) and key < len(self.value)


def read_yaml_file(path: Path, needs: str = "an `ajet:` block") -> YamlNode:
    """A file's tree. `needs`: what an empty file lacks."""
    return parse_yaml(_read_text(path), str(path), needs)


def _read_text(path: Path) -> str:
    if path.is_dir():
        found = ", ".join(sorted(entry.name for entry in path.glob("*.y*ml"))[:5])
        raise ConfigError(f"{path} is a folder" + (f"; it has: {found}" if found else "; a YAML file is needed"))
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        folder = path.parent
        present = [entry.name for entry in folder.glob("*.y*ml")] if folder.is_dir() else []
        near = next(
            (
                name
                for name in present
                if Path(name).stem == nearest(path.stem, (Path(other).stem for other in present))
            ),
            None,
        )
        there = f"did you mean {folder / near}?" if near else ", ".join(sorted(present)[:8])
        where = f"\n    {'' if near else 'there are: '}{there}" if there else ""
        raise ConfigError(f"{path}: no such file" + where) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES // 1024} KB\n    keep data in files that the config names")
    try:
        return content.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text\n    save the file as UTF-8") from None


def parse_yaml(text: str, name: str, needs: str = "an `ajet:` block") -> YamlNode:
    """The tree of a YAML text whose top level is a mapping."""
    root = _Composer(name, text).compose()
    if root is None or root.value is None:
        raise ConfigError(f"{name}: the file is empty\n    it needs {needs}")
    if not isinstance(root.value, dict):
        raise ConfigError(f"{name}:{root.line}: keys are expected at the top level\n    begin with {needs}")
    return root


def parse_value(text: str, name: str) -> Any:
    """One value as YAML reads it: number, boolean, null, list, mapping or text."""
    root = _Composer(name, text).compose()
    return None if root is None else root.plain()


def resolve_plain(text: str) -> Any:
    """What an unquoted scalar means."""
    if NULL.match(text):
        return None
    if TRUE.match(text):
        return True
    if FALSE.match(text):
        return False
    bare = text.replace("_", "")
    if INT.match(text) and len(text) < 300:
        return int(bare, 0)
    if FLOAT.match(text):
        return float(bare)
    if sign := INFINITY.match(text):
        return float(f"{sign.group(1)}inf")
    return float("nan") if NOT_A_NUMBER.match(text) else text


class _Composer:
    """Turns parser events into nodes, counting as it goes."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.anchors: dict[str, YamlNode | None] = {}
        """None until the anchored value is complete."""
        self.values = 0

    def fail(self, line: int, message: str, hint: str = "") -> NoReturn:
        raise ConfigError(f"{self.name}:{line}: {message}" + (f"\n    {hint}" if hint else ""))

    def compose(self) -> YamlNode | None:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            return self._compose(iter(yaml.parse(self.text, Loader=loader)))
        except yaml.YAMLError as error:
            self._explain(error)

    def _explain(self, error: yaml.YAMLError) -> NoReturn:
        """Raise the parser's error with its line and the usual cause."""
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        if mark is None:  # a character that YAML does not allow
            position = getattr(error, "position", 0) or 0
            line = self.text[:position].count("\n") + 1
            character = getattr(error, "character", None)
            shown = f" (code {character:#x})" if isinstance(character, int) else ""
            self.fail(line, f"a character that YAML does not allow{shown}", "remove the control character")
        line = mark.line + 1
        lines = self.text.split("\n")
        for number in (line, line - 1):
            content = lines[number - 1] if 0 < number <= len(lines) else ""
            indentation = content[: len(content) - len(content.lstrip())]
            if wrong := next((name for character, name in NOT_YAML.items() if character in indentation), None):
                self.fail(number, f"{wrong} in the indentation", "indent with spaces")
            if key := re.match(r"\s*([\w.-]+)(：|:[\xa0\u3000])", content):
                self.fail(number, f"no `: ` after {key[1]!r}", "write an ordinary colon and an ordinary space")
        hint = next((hint for part, hint in HINTS.items() if part in problem), "")
        if (begun := getattr(error, "context_mark", None)) and begun.line + 1 != line and "never closed" in hint:
            hint += f": line {begun.line + 1} opens it"
        elif begun and "expected ':'" in problem:
            line = begun.line + 1
        self.fail(line, f"not YAML: {problem}", hint)

    def _compose(self, events: Any) -> YamlNode | None:
        root: YamlNode | None = None
        documents = 0
        # for each open collection: its node, its anchor and, in a mapping, the key that is waiting for its value
        stack: list[tuple[YamlNode, str | None, list[Any]]] = []
        for event in events:
            line = event.start_mark.line + 1
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self.fail(line, "a second document begins (`---`)", "keep one document per file")
                continue
            if isinstance(event, MappingEndEvent | SequenceEndEvent):
                node, anchor, _ = stack.pop()
                if isinstance(node.value, dict):
                    self._unfilled(node)
                    self._merge(node)
                self._finish(node, anchor)
            elif isinstance(event, MappingStartEvent | SequenceStartEvent):
                self._check_tag(event, line)
                empty: Any = {} if isinstance(event, MappingStartEvent) else []
                if event.anchor:
                    self.anchors[event.anchor] = None
                if len(stack) >= MAX_DEPTH:
                    self.fail(line, f"nested more than {MAX_DEPTH} levels deep")
                stack.append((YamlNode(empty, line), event.anchor, []))
                continue
            elif isinstance(event, ScalarEvent):
                self._check_tag(event, line)
                node = YamlNode(self._scalar(event, line), line)
                self._finish(node, event.anchor)
            elif isinstance(event, AliasEvent):
                node = self._alias(event, line)
            else:
                continue
            self.values += node.size if isinstance(event, AliasEvent | ScalarEvent) else 1
            if self.values > MAX_VALUES:
                self.fail(line, f"more than {MAX_VALUES} values after anchors are expanded")
            if stack:
                self._add(stack[-1], node, event, line)
            else:
                root = node
        return root

    def _add(self, parent: tuple[YamlNode, str | None, list[Any]], node: YamlNode, event: Event, line: int) -> None:
        """Add a complete value to the collection it belongs to."""
        collection, _, waiting = parent
        if isinstance(collection.value, list):
            collection.value.append(node)
        elif not waiting:
            waiting.append((self._key(node, event, line), line))
        else:
            key, key_line = waiting.pop()
            if key in collection.value:
                first = collection.key_lines[key]
                self.fail(key_line, f"the key {key!r} is there twice (first on line {first})", "remove one of them")
            collection.value[key] = node
            collection.key_lines[key] = key_line

    def _key(self, node: YamlNode, event: Event, line: int) -> Any:
        if isinstance(node.value, dict) and [each.value for each in node.value.values()] == [None]:
            return Unfilled(f"{{{{{next(iter(node.value))}}}}}")
        if not isinstance(event, ScalarEvent) or isinstance(node.value, dict | list):
            self.fail(line, *NO_NAME)
        if isinstance(node.value, int) and not isinstance(node.value, bool):
            return node.value
        return event.value

    def _unfilled(self, node: YamlNode) -> None:
        """Turn `{{NAME}}`, a mapping whose only key is a mapping to YAML, into what it stands for."""
        for key in [key for key in node.value if isinstance(key, Unfilled)]:
            if len(node.value) > 1 or node.value[key].value is not None:
                self.fail(node.line, *NO_NAME)
            node.value, node.key_lines = key, {}

    def _scalar(self, event: ScalarEvent, line: int) -> Any:
        if "\0" in event.value:
            self.fail(line, "the text has a NUL character (\\0), which no name or prompt can have", "remove it")
        if event.tag in (None, "!"):
            return resolve_plain(event.value) if event.tag is None and event.implicit[0] else event.value
        if event.tag == "tag:yaml.org,2002:str":
            return event.value
        value = resolve_plain(event.value)
        kinds = {"int": int, "float": float, "bool": bool, "null": type(None)}
        kind = event.tag.rpartition(":")[2]
        if kind == "float" and isinstance(value, int):
            return float(value)
        if kind not in kinds or not isinstance(value, kinds[kind]):
            self.fail(line, f"{event.value!r} isn't a valid {kind}")
        return value

    def _check_tag(self, event: Any, line: int) -> None:
        if event.tag not in (None, "!") and event.tag not in PLAIN_TAGS:
            shown = event.tag.replace("tag:yaml.org,2002:", "!!")
            self.fail(line, f"the tag {shown} is not allowed: a config is pure data", "remove the tag")

    def _alias(self, event: AliasEvent, line: int) -> YamlNode:
        if event.anchor not in self.anchors:
            self.fail(line, f"not YAML: *{event.anchor} is not defined above", f"define it with &{event.anchor}")
        node = self.anchors[event.anchor]
        if node is None:
            self.fail(line, f"*{event.anchor} contains itself", "remove the alias")
        return node

    def _finish(self, node: YamlNode, anchor: str | None) -> None:
        """Measure a complete value, and register it under its anchor."""
        if isinstance(node.value, dict | list):
            inner = list(node.value.values()) if isinstance(node.value, dict) else node.value
            node.size = 1 + sum(child.size for child in inner)
            node.depth = 1 + max((child.depth for child in inner), default=0)
            if node.depth > MAX_DEPTH:
                self.fail(node.line, f"nested more than {MAX_DEPTH} levels deep")
        if anchor:
            self.anchors[anchor] = node

    def _merge(self, node: YamlNode) -> None:
        """Expand `<<: *base`. The mapping's own keys take precedence."""
        if "<<" not in node.value:
            return
        line = node.key_lines.pop("<<")
        given: YamlNode = node.value.pop("<<")
        for base in given.value if isinstance(given.value, list) else [given]:
            if not isinstance(base.value, dict):
                self.fail(line, "`<<` takes a mapping, or a list of mappings")
            for key, value in base.value.items():
                if key not in node.value:
                    node.value[key] = value
                    node.key_lines[key] = base.key_lines[key]
