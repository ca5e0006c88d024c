"""Text from elsewhere: `printable`, as it may be shown on a terminal, and `encodable`, as it may be stored.

`fail` shows an error on the terminal, in the form that all commands use.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from ajet.schema.errors import EXIT_USER_ERROR

_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters but tabs and line breaks, and characters that reorder or hide text. The viewer shows the same ones
by name."""


def printable(text: str) -> str:
    """The text with such characters escaped: it can't move the cursor, nor look like other text."""
    return _ODD.sub(_escaped, text)


def encodable(text: str) -> str:
    """The text with halves of surrogate pairs escaped, which no UTF-8 can hold."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def encodable_values(value: Any) -> Any:
    """`encodable`, for all texts in plain data, names included."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {encodable_values(key): encodable_values(item) for key, item in value.items()}
    return [encodable_values(item) for item in value] if isinstance(value, list) else value


def fail(message: str, code: int = EXIT_USER_ERROR) -> int:
    """Print an error to stderr. Returns `code`."""
    message = printable(message)
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    print(f"\033[1;31merror:\033[0m {message}" if colour else f"error: {message}", file=sys.stderr)
    return code


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
