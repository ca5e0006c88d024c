"""The `${…}` interpolations of a config's tree, resolved. What refers to itself or multiplies is refused."""

from __future__ import annotations

import re
from typing import Any

from ajet.config.yaml_source import MAX_BYTES, MAX_VALUES
from ajet.schema.errors import AjetError

INNERMOST = re.compile(r"\$\{([^${}]*)\}")
OPENING = re.compile(r"(\\*)\$\{")
"""The beginning of an interpolation. A backslash before it makes it plain text, and two of them are one."""
COMPUTED = re.compile(r"\$\{[^{}:]*\$\{")
CYCLE = "the interpolation refers to itself: remove the cycle"


class InterpolationProblem(AjetError):
    """A value whose interpolation can't be resolved."""

    def __init__(self, path: tuple[Any, ...], message: str) -> None:
        super().__init__(message)
        self.path = path


def is_interpolated(value: Any) -> bool:
    """Whether any text in `value` contains an interpolation, or is `???`, to be filled in."""
    if isinstance(value, dict):
        return any(is_interpolated(inner) for inner in value.values())
    if isinstance(value, list):
        return any(is_interpolated(inner) for inner in value)
    return isinstance(value, str) and ("${" in value or value == "???")


def literal(value: Any) -> Any:
    """Plain data as a config has to hold it, so that no `${…}` in its texts is taken for an interpolation."""
    if isinstance(value, str):
        return OPENING.sub(r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: literal(inner) for key, inner in value.items()}
    return [literal(inner) for inner in value] if isinstance(value, list) else value


def resolve(tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` with every interpolation replaced by what it refers to."""
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError, MissingMandatoryValue, OmegaConfBaseException

    try:
        _Sizes(tree).of(())
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        path = _path(tree, str(error.full_key or ""))
        message = str(error.msg or error).splitlines()[0]
        message = message.removeprefix("KeyError raised while resolving interpolation: ").strip('"')
        if isinstance(error, MissingMandatoryValue):
            message = "`???` marks a value that must be given: set it here or on the command line"
        elif isinstance(error, GrammarParseError):
            message = f"not a valid interpolation: {message}"
        raise InterpolationProblem(path, message) from None
    except RecursionError:
        raise InterpolationProblem((), "one interpolation refers to the next, too many times") from None
    assert isinstance(resolved, dict)
    return {**resolved}  # keys that are no names are refused later, with their line


def _path(tree: Any, dotted: str) -> tuple[Any, ...]:
    """OmegaConf's `a.b[0].c` as a path."""
    parts: list[Any] = []
    for part in re.findall(r"[^.\[\]]+", dotted):
        parts.append(int(part) if isinstance(_at(tree, parts), list) and part.isdigit() else part)
    return tuple(parts)


def _at(tree: Any, path: list[Any]) -> Any:
    for part in path:
        if (isinstance(tree, dict) and part in tree) or (
            isinstance(tree, list) and isinstance(part, int) and part < len(tree)
        ):
            tree = tree[part]
        else:
            return None
    return tree


class _Sizes:
    """How much text and how many values each place holds after its references are replaced."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree = tree
        self.known: dict[tuple[Any, ...], tuple[int, int] | None] = {}

    def of(self, path: tuple[Any, ...]) -> tuple[int, int]:
        """(characters, values) of the value at `path`; None while it is being counted."""
        if path in self.known:
            known = self.known[path]
            if known is None:
                raise InterpolationProblem(path, CYCLE)
            return known
        self.known[path] = None
        value = _at(self.tree, list(path))
        inner: list[tuple[int, int]] = []
        if isinstance(value, dict):
            inner = [self.of((*path, key)) for key in value]
        elif isinstance(value, list):
            inner = [self.of((*path, index)) for index in range(len(value))]
        elif isinstance(value, str):
            if COMPUTED.search(value):
                raise InterpolationProblem(path, "a key inside `${…}` can't be computed by another `${…}`")
            inner = [self.of(target) for target in self._targets(value, path)]
        own = len(value) if isinstance(value, str) else 1
        size = (own + sum(chars for chars, _ in inner), 1 + sum(values for _, values in inner))
        if size[0] > MAX_BYTES or size[1] > MAX_VALUES:
            raise InterpolationProblem(path, "its interpolations multiply into something far too large")
        self.known[path] = size
        return size

    def _targets(self, text: str, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """The places that a text refers to."""
        targets = []
        text = OPENING.sub(lambda opening: "" if len(opening[1]) % 2 else opening[0], text)
        while match := INNERMOST.search(text):
            reference = match.group(1).strip()
            text = text[: match.start()] + text[match.end() :]
            if ":" in reference or not reference:
                continue
            names = reference.lstrip(".")
            dots = len(reference) - len(names)
            base = path[: len(path) - dots] if dots else ()
            target = (*base, *_path(_at(self.tree, list(base)), names))
            if target == path[: len(target)]:
                raise InterpolationProblem(path, CYCLE)
            targets.append(target)
        return targets
