"""The one place that decides what is secret and masks it before it reaches a file, a tracker or a terminal.

Secrets are string values under keys such as `api_key`, `password` or `token`, the values of environment variables with
such names wherever they appear, and text shaped like a well-known credential.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "********"

_SECRET_KEY = re.compile(
    r"(^|[^a-z])(api_?key|access_?key(_?id)?|private_?key|secret(_?key)?|pass(word|wd|phrase)|token|auth|authorization"
    r"|credentials?|bearer|cookie)$"
)
_SECRET_ENVIRONMENT = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")
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


def is_secret_key(key: str) -> bool:
    """Whether values under this key are secret. Those of `max_tokens` or `stop_token_ids` are not."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).replace("-", "_").lower()
    return _SECRET_KEY.search(snake) is not None


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

    def value(self, value: Any, key: str = "") -> Any:
        """`value` (any nesting of mappings and lists) with every secret in it masked."""
        if isinstance(value, Mapping):
            return {name: self.value(item, str(name)) for name, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.value(item, key) for item in value]
        if isinstance(value, str):
            return MASK if value and is_secret_key(key) and not _is_reference(value) else self.text(value)
        return value


def _is_reference(value: str) -> bool:
    """`${oc.env:X}` names a secret without holding it."""
    return value.startswith("${") and value.endswith("}")


def _environment_secrets() -> Iterator[str]:
    for name, value in os.environ.items():
        if _SECRET_ENVIRONMENT.search(name.upper()):
            yield value


def _secret_values(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _secret_values(item, str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secret_values(item, key)
    elif isinstance(value, str) and is_secret_key(key) and not _is_reference(value):
        yield value
        yield from value.splitlines()
