"""Which names are those of secrets: of keys in a config or in data, and of environment variables."""

from __future__ import annotations

import re

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
