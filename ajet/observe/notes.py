"""`Notes`: what people wrote about a run and its episodes, and their tags, in `notes.json` of its folder.

The file is replaced as a whole, so it is never half written; writers of several processes wait for each other.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ajet.observe.line_file import read_regular
from ajet.schema.errors import UserError

FILE = "notes.json"
LONGEST_NOTE = 20_000
MOST_TAGS = 20
LONGEST_TAG = 40


class NotesError(UserError):
    """A note that can't be read or kept. The message says why."""


@dataclass(frozen=True, slots=True)
class Note:
    """What was written about one thing."""

    note: str = ""
    tags: tuple[str, ...] = ()
    edited: float = 0.0
    """Unix time."""


@dataclass(frozen=True, slots=True)
class NotesFile:
    """The content of `notes.json`."""

    run: Note = Note()
    episodes: dict[str, Note] = field(default_factory=dict)
    """By episode id."""

    def tagged(self, tag: str) -> tuple[str, ...]:
        """The episodes with this tag; with any note or tag, if it is ''."""
        return tuple(name for name, note in self.episodes.items() if not tag or tag in note.tags)


class Notes:
    """The notes in one experiment folder. Any thread and process may call any method."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / FILE

    def read(self) -> NotesFile:
        """Read the file; without one, there are no notes."""
        try:
            return msgspec.json.decode(read_regular(self._file).encode(), type=NotesFile)
        except FileNotFoundError:
            return NotesFile()
        except (msgspec.DecodeError, OSError) as error:
            raise NotesError(f"{self._file}: {error}. Repair it, or move it away.") from error

    def write(self, note: str, tags: list[str], episode: str = "") -> Note:
        """Keep a note about an episode, or about the run if none is named. An empty note without tags removes it."""
        kept = Note(_checked(note), _tags(tags), round(time.time(), 3))
        try:
            with self._alone():
                everything = self.read()
                episodes = {name: one for name, one in everything.episodes.items() if name != episode}
                if episode and (kept.note or kept.tags):
                    episodes[episode] = kept
                self._replace(NotesFile(everything.run if episode else kept, episodes))
        except OSError as error:
            raise NotesError(f"the note was not kept: {self._folder} can't be written to: {error.strerror}") from error
        return kept

    @contextmanager
    def _alone(self) -> Iterator[None]:
        handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _replace(self, everything: NotesFile) -> None:
        scratch = self._file.with_suffix(".tmp")
        scratch.unlink(missing_ok=True)  # left by a kill, or somebody's link to elsewhere
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w", encoding="utf-8") as file:
            json.dump(asdict(everything), file, ensure_ascii=True, indent=1)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self._file)


def _checked(note: Any) -> str:
    if not isinstance(note, str) or len(note) > LONGEST_NOTE:
        raise NotesError(f"a note must be text of at most {LONGEST_NOTE:,} characters")
    return note.strip()


def _tags(tags: Any) -> tuple[str, ...]:
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise NotesError("tags must be a list of texts")
    plain = tuple(dict.fromkeys(" ".join(tag.split()) for tag in tags if tag.strip()))
    if len(plain) > MOST_TAGS or any(len(tag) > LONGEST_TAG or "," in tag for tag in plain):
        raise NotesError(f"at most {MOST_TAGS} tags, each of at most {LONGEST_TAG} characters and without a comma")
    return plain
