"""`rollout.num_repeat=8` on the command line: keys in full or short form, values as YAML reads them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ajet.config.nearest import nearest
from ajet.config.root import AjetConfig, Config
from ajet.config.suggest import known_keys, where_it_belongs
from ajet.config.yaml_source import parse_value
from ajet.schema.errors import ConfigError

OVERRIDE = re.compile(r"^(?P<new>\+{0,2})(?P<key>[^=\s]+)=(?P<value>.*)$", re.DOTALL)
IGNORED = ("hydra", "defaults")


class Override(NamedTuple):
    """One `key=value` argument."""

    text: str
    path: tuple[str, ...]
    value: Any


def looks_like_override(argument: str) -> bool:
    """Whether an argument has the form `key=value`."""
    return not argument.startswith("-") and OVERRIDE.match(argument) is not None


def parse_override(text: str, tree: dict[str, Any]) -> Override:
    """Read one argument. `tree` is the YAML: the user's own blocks are known from it."""
    match = OVERRIDE.match(text)
    if match is None or not all(match["key"].split(".")):
        raise ConfigError(f"command line: {text!r} is no override\n    write `key=value`, e.g. rollout.num_repeat=8")
    path = _full_path(text, tuple(match["key"].split(".")), bool(match["new"]), tree)
    return Override(text, path, _value(text, match["value"]))


def _value(text: str, value: str) -> Any:
    if value.lstrip().startswith("!!"):
        raise ConfigError(f"command line: {text}: tags are not allowed\n    give the plain value")
    try:
        parsed = parse_value(value, "value")
    except ConfigError:
        if value.lstrip()[:1] in "[{":  # meant as a list or mapping: text would only fail later, less clearly
            raise ConfigError(f"command line: {text}: not a YAML value\n    close its quotes and brackets") from None
        return value
    return value if isinstance(parsed, dict) and not value.lstrip().startswith("{") else parsed


def _full_path(text: str, path: tuple[str, ...], new: bool, tree: dict[str, Any]) -> tuple[str, ...]:
    """`rollout.x` means `ajet.rollout.x`; other first names are top-level blocks."""
    first = path[0]
    if first in Config.model_fields or first in IGNORED:
        return path
    if first in AjetConfig.model_fields and (("ajet", *path) in known_keys() or first not in tree):
        return ("ajet", *path)
    if first in tree or new:
        return path
    own = [name for name in tree if name not in Config.model_fields and name not in IGNORED]
    near = nearest(first, [*AjetConfig.model_fields, *map(str, own)], cutoff=0.75)
    if near in own:
        hint = f"\ndid you mean `{near}`?"
    elif near is not None:
        hint = f"\ndid you mean `{'.'.join((near, *path[1:]))}`?"
    else:
        hint = "\n" + where_it_belongs(("ajet", *path))
    hint += f"\n(a new block of your own: +{text})"
    raise ConfigError(f"command line: {text}: unknown key `{'.'.join(path)}`" + hint.replace("\n", "\n    "))


def apply_overrides(tree: dict[str, Any], overrides: list[Override]) -> None:
    """Set each override's value in `tree`."""
    for override in overrides:
        place = tree
        for depth, part in enumerate(override.path[:-1], start=1):
            inner = place.get(part)
            if inner is None:
                inner = place[part] = {}
            if not isinstance(inner, dict):
                above = ".".join(override.path[:depth])
                raise ConfigError(f"command line: {override.text}: `{above}` is {inner!r} and has no keys under it")
            place = inner
        place[override.path[-1]] = override.value
