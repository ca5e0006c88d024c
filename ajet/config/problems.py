"""From what is wrong to one readable message: place, key, what is allowed, and what was probably meant."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ajet.config.keys import GROUP, allowed, choices, fragment_at, keys_of, known_keys, nearest, where_it_belongs
from ajet.config.kinds import BackboneName
from ajet.config.root import AjetConfig
from ajet.config.section import OWN
from ajet.config.yaml_source import YamlNode
from ajet.schema.errors import ConfigError
from ajet.schema.printable import is_secret

REFERENCE = re.compile(r"\$\{oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)")
HIDDEN = "********"
SHOWN = 60
"""Characters of a wrong value."""
SHORTEST_HIDDEN = 4
"""Shorter values would be found in ordinary words."""
LONGEST_OVERRIDE = 300
"""Characters shown of one."""
MOST = 8
"""Most problems shown at a time: more don't help."""

KeyPath = tuple[Any, ...]


class Problem(NamedTuple):
    """One thing that is wrong."""

    path: KeyPath
    what: str
    fix: str


class Contradiction(NamedTuple):
    """Which keys contradict each other, what is wrong, and what to do."""

    keys: tuple[str, ...]
    """Below `ajet`, the most likely culprit first."""
    what: str
    fix: str


Condition = Callable[[AjetConfig], object]


class ContradictionRule(NamedTuple):
    """Settings that contradict each other wherever `when` is true."""

    keys: tuple[str, ...]
    """Below `ajet`, the most likely culprit first."""
    when: Condition
    what: str | Callable[[AjetConfig], str]
    """The message. `{rollout.gamma:g}` in it is this key's value; a function makes what needs more than that."""
    fix: str | Callable[[AjetConfig], str]
    on: tuple[BackboneName, ...] | None = None
    """The backbones for which this is a contradiction. None: all."""

    def found(self, ajet: AjetConfig) -> Contradiction:
        """What it says about this config, for which `when` is true."""
        what, fix = (
            text.format_map(dict(ajet)) if isinstance(text, str) else text(ajet) for text in (self.what, self.fix)
        )
        return Contradiction(self.keys, what, fix)


COMMAND_LINE = "command line"


class Override(NamedTuple):
    """One `key=value` argument."""

    text: str
    path: tuple[str, ...]
    value: Any
    source: str = COMMAND_LINE
    """Where the user wrote it."""


class Sources(NamedTuple):
    """Where values come from: the file and the overrides."""

    name: str
    root: YamlNode
    overrides: list[Override]

    def place(self, path: KeyPath) -> str:
        """`file.yaml:12`, or the argument that set this key."""
        for override in reversed(self.overrides):
            if path[: len(override.path)] == override.path:
                text, most = override.text, LONGEST_OVERRIDE
                text = text if len(text) <= most else f"{text[:most]}…"
                return f"{override.source} ({text})"
        return f"{self.name}:{self.root.line_of(path)}"

    def gives(self, path: KeyPath) -> bool:
        """Whether the user set this key, in the file or by an override."""
        if any(path[: len(override.path)] == override.path for override in self.overrides):
            return True
        node = self.root
        for part in path:
            if not node.reaches(part):
                return False
            node = node.value[part]
        return True


def config_error(sources: Sources, problems: Iterable[Problem]) -> ConfigError:
    """All problems in one error."""
    listed = sorted(problems, key=lambda problem: sources.root.line_of(problem.path))
    parts = []
    for problem in listed[:MOST]:
        key = f"{dotted(problem.path)}: " if problem.path else ""
        fix = "".join(f"\n    {line}" for line in problem.fix.splitlines())
        parts.append(f"{sources.place(problem.path)}: {key}{problem.what}{fix}")
    if len(listed) > MOST:
        parts.append(f"… and {len(listed) - MOST} more")
    return ConfigError(_without_secrets("\n".join(parts), sources))


def _without_secrets(text: str, sources: Sources) -> str:
    """A message in which what came from the environment is shown as the reference to it, and secrets not at all."""
    hidden: dict[str, str] = {}

    def look(key: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                look(str(name), inner)
        elif isinstance(value, list):
            for inner in value:
                look(key, inner)
        elif isinstance(value, str):
            names = REFERENCE.findall(value)
            hidden.update((os.environ[name], f"${{oc.env:{name}}}") for name in names if name in os.environ)
            if not names and is_secret(key, value):
                hidden[value] = HIDDEN

    look("", sources.root.plain())
    for override in sources.overrides:
        look(str(override.path[-1]), override.value)
    for value, instead in sorted(hidden.items(), key=lambda item: -len(item[0])):
        for form in (value, repr(value)[1:-1]):
            if len(form) >= SHORTEST_HIDDEN:
                text = text.replace(form, instead).replace(f"{form[: SHOWN - 4]}…", f"{instead}…")
    return text


def dotted(path: KeyPath) -> str:
    """A path as users write it."""
    return ".".join(str(part) for part in path)


def from_validation(error: ValidationError, tree: dict[str, Any]) -> list[Problem]:
    """Pydantic's findings, one problem per key."""
    found: dict[KeyPath, Problem] = {}
    for detail in error.errors(include_url=False):
        path = _existing(detail["loc"], tree)
        if detail["type"] == "extra_forbidden":
            found.setdefault(path, Problem(path, "unknown key", where_it_belongs(path)))
        elif detail["type"] == "invalid_key" or detail["loc"][-1] == "[key]":
            fix = "use letters, digits, `_`, `.` and `-`, and quote a number"
            found.setdefault(path, Problem(path, "can't be a name here", fix))
        elif path not in found or detail["type"] == OWN:
            found[path] = _wrong_value(path, detail, tree)
    # of a type's alternatives, the one that the user meant is that which has something wrong inside
    inside = {path[:end] for path in found for end in range(len(path))}
    return [problem for path, problem in found.items() if path not in inside]


def _existing(loc: tuple[int | str, ...], tree: Any) -> KeyPath:
    """The part of pydantic's location that is in the file (pydantic also names alternatives of a type)."""
    path: list[Any] = []
    for part in loc:
        inside = isinstance(tree, dict) and part in tree
        if inside or (isinstance(tree, list) and isinstance(part, int) and part < len(tree)):
            path.append(part)
            tree = tree[part]
    return tuple(path)


def _wrong_value(path: KeyPath, detail: ErrorDetails, tree: Any) -> Problem:
    value = tree
    for part in path:
        value = value[part]
    fragment = fragment_at(path) or {}
    hints = []
    near = nearest(value, choices(fragment)) if isinstance(value, str) else None
    if near is not None:
        hints.append(f"did you mean `{near}`?")
    expected = f"expected {allowed(fragment)}"
    if fragment.get("default") not in (None, "") and not isinstance(fragment["default"], dict | list):
        default = fragment["default"]
        expected += f"; default: {str(default).lower() if isinstance(default, bool) else default}"
    if keys := keys_of(path):
        expected = expected.replace(GROUP, f"{GROUP} ({', '.join(keys)})")
    hints.append(detail["msg"] if detail["type"] == OWN else expected)
    key = known_keys().get(path)
    if key is not None and key.doc:
        hints.append(key.doc)
    return Problem(path, f"{shown(value)} is not allowed", "\n".join(hints))


def shown(value: Any) -> str:
    """A value as an error message shows it: short, and quoted if it is text."""
    if isinstance(value, dict):
        return GROUP
    if isinstance(value, list) and len(value) > 6:
        return f"a list of {len(value)} values"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "…"
