"""Logs of a run: `run.log` as JSON lines, short lines on the terminal; `Masker` takes the secrets out.

Every part logs with `logging.getLogger(__name__)`. `AJET_LOG_LEVEL` (default INFO) sets what the terminal shows; the
file holds at least INFO.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from ajet.schema.printable import encodable, is_secret, is_secret_variable, printable

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


ROOT_LOGGER = "ajet"
TRACEBACK = "traceback"
"""Name of a record's `extra`: the text of a traceback, of an exception that was caught elsewhere."""
ONLY_TO_FILE = "only_to_file"
"""Name of a record's `extra`: the terminal doesn't show the record."""
LOST = "lost"
"""Name of a record's `extra`: records of the run are lost, and it must not end as if they were written."""
LEVEL_VARIABLE = "AJET_LOG_LEVEL"
_FILE_BYTES = 20 * 1024 * 1024
_FILES = 5
_ALIKE = 3
_TEXTS_KEPT = 10_000
_SHOWN_AGAIN = frozenset(10**power for power in range(1, 9))


# ---------------------------------------------------------------- secrets


class Masker:
    """Masks a run's secrets: those in the environment and those in its config."""

    def __init__(self, *sources: Any) -> None:
        known = {value for name, value in os.environ.items() if is_secret_variable(name)}
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
            return {
                self.text(name) if isinstance(name, str) else name: self.value(item, str(name), levels - 1)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple | set | frozenset):
            return [self.value(item, key, levels - 1) for item in value]
        if isinstance(value, str):
            return MASK if value and is_secret(key, value) and not _is_reference(value) else self.text(value)
        return value


def _is_reference(value: str) -> bool:
    """`${oc.env:X}` names a secret without holding it."""
    return value.startswith("${") and value.endswith("}")


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


# ---------------------------------------------------------------- logs


def level_from_environment() -> int:
    """The level in `AJET_LOG_LEVEL`, a name or a number. INFO if it is unset or unknown."""
    asked = os.environ.get(LEVEL_VARIABLE, "").strip().upper()
    if asked.isdecimal():
        return int(asked)
    return logging.getLevelNamesMapping().get(asked, logging.INFO)


def log_to_terminal(*, quiet: bool = False) -> _TerminalHandler:
    """Show records on stderr, or only errors if `quiet`: until a second call replaces the first, or in a `with`."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _TerminalHandler)]:
        root.removeHandler(handler)
    terminal = _TerminalHandler()
    terminal.setLevel(logging.ERROR if quiet else level_from_environment())
    terminal.setFormatter(_HumanFormatter())
    root.addHandler(terminal)
    _let_through()
    return terminal


def _mask_terminal(masker: Masker) -> None:
    """Mask the secrets of a run's config on the terminal, too."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _TerminalHandler) and isinstance(handler.formatter, _HumanFormatter):
            handler.formatter.masker = masker


def _let_through() -> None:
    """The handlers are on the root logger, so the user's own `basicConfig` doesn't duplicate each line; other libraries
    keep the root's level (warnings and errors)."""
    logging.getLogger(ROOT_LOGGER).setLevel(min(logging.INFO, level_from_environment()))


class FileLog(RotatingFileHandler):
    """Writes records to a file as JSON lines, until closed. While the disk is full, lines are lost; it warns once."""

    def __init__(self, path: Path, masker: Masker | None = None) -> None:
        super().__init__(path, maxBytes=_FILE_BYTES, backupCount=_FILES - 1, encoding="utf-8")
        self._warned = False
        self.setLevel(min(logging.INFO, level_from_environment()))
        self.setFormatter(_JsonFormatter(masker or Masker()))
        if masker is not None:
            _mask_terminal(masker)
        logging.getLogger().addHandler(self)
        _let_through()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._warn(error)
        else:
            super().handleError(record)

    def close(self) -> None:
        logging.getLogger().removeHandler(self)
        try:
            super().close()
        except OSError as error:  # of what was still to be written
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        print(f"warning: {self.baseFilename} can't be written ({error.strerror}): lines are missing", file=sys.stderr)


class _TerminalHandler(logging.StreamHandler[Any]):
    """Looks up stderr for each record: a live display or a test may have replaced it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.addFilter(_Repeats())

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


class _Repeats(logging.Filter):
    """Lets a warning through once, then at the 10th, 100th … time. Those of one kind, whose text differs, three times.
    Likewise errors of other libraries, which may come with each line of a tool. The file holds all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: Counter[tuple[str, str]] = Counter()
        self._kinds: Counter[tuple[str, str]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, ONLY_TO_FILE, False):
            return False
        ours = record.name.partition(".")[0] == "ajet"
        if record.levelno < logging.WARNING or (ours and record.levelno > logging.WARNING):
            return True
        kind, text = (record.name, str(record.msg)), (record.name, record.getMessage())
        if not self._texts[text]:
            self._kinds[kind] += 1
        if len(self._texts) < _TEXTS_KEPT or text in self._texts:
            self._texts[text] += 1
        same, alike = self._texts[text], self._kinds[kind]
        if same > 1:
            record.repeated = same
            return same in _SHOWN_AGAIN
        record.repeated = alike if alike > _ALIKE else 0
        return alike <= _ALIKE or alike in _SHOWN_AGAIN


class _JsonFormatter(logging.Formatter):
    def __init__(self, masker: Masker) -> None:
        super().__init__()
        self._masker = masker

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        elif traceback := getattr(record, TRACEBACK, ""):
            entry["traceback"] = traceback
        return encodable(json.dumps(self._masker.value(entry), default=str, ensure_ascii=False))


class _HumanFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__()
        self.masker = Masker()

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        if repeated := getattr(record, "repeated", 0):
            text += f" ({repeated:,} such warnings so far)"
        if record.exc_info and record.levelno >= logging.ERROR:
            text += "\n" + self.formatException(record.exc_info)
        return printable(self.masker.text(text))
