"""`fill`: puts an episode's values where a text names them in braces: `{prompt}`, `{base_url}`, …

Only the names given are replaced, each once and in one pass: other braces (JSON, TOML, a shell's) stay as they are, and
a value that itself holds `{api_key}` isn't read again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping


def fill(text: str, values: Mapping[str, str], quote: Callable[[str], str] = str) -> str:
    """The text with its values, each as `quote` writes it."""
    names = "|".join(map(re.escape, values))
    return re.sub(r"\{(" + names + r")\}", lambda found: quote(values[found[1]]), text)


def names(text: str, name: str) -> bool:
    """Whether the text has a place for this value."""
    return f"{{{name}}}" in text
