"""YAML text → a tree of nodes that know their lines.

Tags such as `!!python/…`, repeated keys, files that are too large and anchors that multiply ("bombs") are refused.
Numbers, booleans and null are read as OmegaConf reads them (so `1e-6` is a number); dates stay text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    NodeEvent,
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

TEXT_TAG = "tag:yaml.org,2002:str"

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
        near = nearest(path.name, present)
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


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


class _Composer:
    """Turns parser events into nodes, and counts them. PyYAML's own composer crashes where nesting is too deep."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.events: Iterator[Any] = iter(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
        self.anchors: dict[str, YamlNode | None] = {}
        """None until the anchored value is complete."""
        self.values = 0

    def fail(self, line: int, message: str, hint: str = "") -> NoReturn:
        raise ConfigError(f"{self.name}:{line}: {message}" + (f"\n    {hint}" if hint else ""))

    def compose(self) -> YamlNode | None:
        root = None
        try:
            for event in self.events:
                if isinstance(event, DocumentStartEvent) and root is not None:
                    line = _line(event)
                    self.fail(line, "a second document begins (`---`)", "keep one document per file")
                if isinstance(event, NodeEvent):
                    root = self._node(event, 1)
        except yaml.YAMLError as error:
            self._explain(error)
        return root

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

    def _node(self, event: NodeEvent, depth: int) -> YamlNode:
        """The value that begins with `event`."""
        line = _line(event)
        if isinstance(event, AliasEvent):
            node = self._alias(event, line)
            self._count(node, depth, line)
            return node
        self._check_tag(event, line)
        node = YamlNode(None, line)
        self._count(node, depth, line)
        if event.anchor:
            self.anchors[event.anchor] = None
        if isinstance(event, ScalarEvent):
            node.value = self._scalar(event, line)
        elif isinstance(event, SequenceStartEvent):
            node.value = [self._node(each, depth + 1) for each in self._until(SequenceEndEvent)]
        else:
            node.value = {}
            for each in self._until(MappingEndEvent):
                self._add(node, each, depth + 1)
            self._unfilled(node)
            self._merge(node)
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def _until(self, end: type[Event]) -> Iterator[NodeEvent]:
        while not isinstance(event := next(self.events), end):
            yield event

    def _count(self, node: YamlNode, depth: int, line: int) -> None:
        """Count a value; in place of an alias, with all that is in it."""
        self.values += 1
        if self.values > MAX_VALUES:
            self.fail(line, f"more than {MAX_VALUES} values after anchors are expanded")
        if depth > MAX_DEPTH:
            self.fail(line, f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(node.value, dict | list):
            for inner in node.value.values() if isinstance(node.value, dict) else node.value:
                self._count(inner, depth + 1, line)

    def _add(self, mapping: YamlNode, event: NodeEvent, depth: int) -> None:
        """Add a key, which begins with `event`, and its value."""
        line = _line(event)
        key = self._key(self._node(event, depth), event, line)
        value = self._node(next(self.events), depth)
        if key in mapping.value:
            first = mapping.key_lines[key]
            self.fail(line, f"the key {key!r} is there twice (first on line {first})", "remove one of them")
        mapping.value[key] = value
        mapping.key_lines[key] = line

    def _key(self, node: YamlNode, event: Event, line: int) -> Any:
        if isinstance(node.value, dict) and [each.value for each in node.value.values()] == [None]:
            return Unfilled(f"{{{{{next(iter(node.value))}}}}}")
        if not isinstance(event, ScalarEvent):
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
        return resolve_plain(event.value) if event.tag is None and event.implicit[0] else event.value

    def _check_tag(self, event: Any, line: int) -> None:
        if event.tag not in (None, "!", TEXT_TAG):
            shown = event.tag.replace("tag:yaml.org,2002:", "!!")
            self.fail(line, f"the tag {shown} is not allowed: a config is pure data", "remove the tag")

    def _alias(self, event: AliasEvent, line: int) -> YamlNode:
        if event.anchor not in self.anchors:
            self.fail(line, f"not YAML: *{event.anchor} is not defined above", f"define it with &{event.anchor}")
        node = self.anchors[event.anchor]
        if node is None:
            self.fail(line, f"*{event.anchor} contains itself", "remove the alias")
        return node

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
