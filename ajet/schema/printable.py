"""What may be shown: text made safe for a terminal or for storage, and which names and values are secrets."""

from __future__ import annotations

import re
from typing import Any

_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters other than tabs and line breaks, and characters that reorder or hide text. The viewer shows the
same ones by name."""


def printable(text: str) -> str:
    """The text with such characters escaped: it can't move the cursor, nor look like other text."""
    return _ODD.sub(_escaped, text)


def one_line(text: str, most: int) -> str:
    """The text on one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def encodable(text: str) -> str:
    """The text with lone surrogates escaped, which UTF-8 can't encode."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def encodable_values(value: Any) -> Any:
    """`encodable`, for all texts in plain data, names included."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {encodable_values(key): encodable_values(item) for key, item in value.items()}
    return [encodable_values(item) for item in value] if isinstance(value, list) else value


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_SECRET_KEY = re.compile(
    r"(^|[^a-z])([a-z]*api_?key|access_?key(_?id)?|private_?key|secrets?(_?key)?|pass(word|wd|phrase)|pwd|token"
    r"|auth|authorization|credentials?|bearer|cookies?|connection_?string|webhook(_?url)?)(_?[0-9]+)?$"
)
_PERHAPS_SECRET_KEY = re.compile(r"(^|[^a-z])(key|sas|dsn|pass|pw|pin|sig|signature|session_?id)(_?[0-9]+)?$")
_LIKE_A_SECRET = re.compile(r"(?=\S*[0-9])(?=\S*[A-Za-z])\S{8,}")
_SECRET_ENVIRONMENT = re.compile(
    r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PWD|PASSPHRASE|CREDENTIALS?|COOKIE|SAS|DSN|CONNECTION_?STRING|WEBHOOK(_?URL)?)"
    r"(_?[0-9]+)?$"
)
_WORKING_FOLDERS = ("PWD", "OLDPWD")


def is_secret_key(key: str) -> bool:
    """Whether all values under this key are secret. Those of `max_tokens` or `stop_token_ids` are not."""
    return _SECRET_KEY.search(_snake(key)) is not None


def is_secret(key: str, value: str) -> bool:
    """Whether this value under this key is secret. `OPENAI_KEY` may hold a secret, `prompt_key` names a column."""
    if is_secret_key(key):
        return True
    return _PERHAPS_SECRET_KEY.search(_snake(key)) is not None and _LIKE_A_SECRET.fullmatch(value) is not None


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable of this name holds a secret."""
    return name not in _WORKING_FOLDERS and _SECRET_ENVIRONMENT.search(name.upper()) is not None


def _snake(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).replace("-", "_").lower()
