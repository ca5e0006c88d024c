"""`AnswerCache`: what a helper model answered, on disk, by the content of the question. For any thread and process.

A file that is damaged is moved aside and said so; the answers are asked for again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ajet.schema.chat import Message

log = logging.getLogger("ajet.helper")

BUSY_S = 30.0
"""How long to wait for another process that is writing."""


class AnswerCache:
    """One SQLite file. It is made with its folder when the first answer is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    @staticmethod
    def key(model: str, messages: Sequence[Message], sampling: dict[str, Any], draw: int = 0) -> str:
        """Of one question: whatever may change the answer is part of it. `draw` tells equal questions apart."""
        said = json.dumps([model, list(messages), sampling, draw], sort_keys=True, ensure_ascii=False, default=repr)
        return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()

    def get(self, key: str) -> str | None:
        """The answer to a question; None if it was never kept."""
        with self._lock:
            if self._connection is None and not self.path.exists():
                return None
            try:
                row = self._open().execute("SELECT text FROM answer WHERE key = ?", (key,)).fetchone()
            except sqlite3.DatabaseError as error:
                self._set_aside(error)
                return None
        return None if row is None else str(row[0])

    def put(self, key: str, text: str) -> None:
        """Keep an answer."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        with self._lock:
            for last in (False, True):
                try:
                    with self._open() as connection:
                        connection.execute("INSERT OR REPLACE INTO answer VALUES (?, ?, ?)", (key, text, time.time()))
                    return
                except sqlite3.DatabaseError as error:
                    if last:
                        raise
                    self._set_aside(error)

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.path, timeout=BUSY_S, check_same_thread=False)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("CREATE TABLE IF NOT EXISTS answer (key TEXT PRIMARY KEY, text TEXT, kept REAL)")
            self._connection = connection
        return self._connection

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        """Move a damaged file away. Anything else (a full disk, a lock held too long) is raised."""
        if isinstance(error, sqlite3.OperationalError):
            raise error
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        aside = self.path.with_suffix(".damaged")
        self.path.replace(aside)
        for suffix in ("-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        log.warning("%s is damaged (%s): moved to %s; its answers are asked for again", self.path, error, aside)
