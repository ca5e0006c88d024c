"""The one place that decides what is secret and masks it before it reaches a file, a tracker or a terminal.

Secrets are string values under keys such as `api_key`, `password` or `token` (`ajet.schema.printable`), the values
of environment variables with such names wherever they appear, and text shaped like a well-known credential.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ajet.schema.printable import is_secret, is_secret_variable

MASK = "********"
TOO_DEEP = "(nested too deeply)"

_SHAPES = re.compile(
    r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic and others
    r"|\bhf_[A-Za-z0-9]{20,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{16,}=*"
    r"|(?<=://)[^\s/:@]+:[^\s/@]+(?=@)"  # user:password in a URL
)
_SHORTEST = 8
"""Shorter values are not searched for in text: they would mask ordinary words."""


MOST_LEVELS = 64
"""Deeper nesting, or a value that holds itself, is replaced by a word."""


class Masker:
    """Masks a run's secrets: those in the environment and those in its config."""

    def __init__(self, *sources: Any) -> None:
        known = set(_environment_secrets())
        for source in sources:
            known.update(_secret_values(source))
        self._known = sorted((value for value in known if len(value) >= _SHORTEST), key=len, reverse=True)

    def text(self, text: str) -> str:
        """`text` with every secret in it masked."""
        for value in self._known:
            if value in text:
                text = text.replace(value, MASK)
        return _SHAPES.sub(MASK, text)

    def value(self, value: Any, key: str = "", levels: int = MOST_LEVELS) -> Any:
        """`value` (any nesting of mappings and lists) with every secret in it masked."""
        if isinstance(value, Mapping | list | tuple | set | frozenset) and not levels:
            return TOO_DEEP
        if isinstance(value, Mapping):
            return {_masked_name(self, name): self.value(item, str(name), levels - 1) for name, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.value(item, key, levels - 1) for item in value]
        if isinstance(value, str):
            return MASK if value and is_secret(key, value) and not _is_reference(value) else self.text(value)
        return value


def _masked_name(masker: Masker, name: Any) -> Any:
    return masker.text(name) if isinstance(name, str) else name


def _is_reference(value: str) -> bool:
    """`${oc.env:X}` names a secret without holding it."""
    return value.startswith("${") and value.endswith("}")


def _environment_secrets() -> Iterator[str]:
    for name, value in os.environ.items():
        if is_secret_variable(name):
            yield value


def _secret_values(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _secret_values(item, str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secret_values(item, key)
    elif isinstance(value, str) and is_secret(key, value) and not _is_reference(value):
        yield value
        yield from value.splitlines()
