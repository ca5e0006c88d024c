"""Files of a run's folder: they outlive a kill and a full disk, and are read with care, as a folder can be anybody's.

A `LineFile` grows by whole lines; what could not be written is written later. A line that a kill or a full disk cut off
stays alone: the next one begins on a line of its own. `whole_record` reads one. `EventLog` writes the events of a run,
and `read_events` reads them.
`Notes`, what people wrote about a run and its episodes, is replaced as a whole, so it is never half written; writers of
several processes wait for each other.
"""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import msgspec

from ajet.observe.logs import LOST, Masker
from ajet.schema.errors import UserError
from ajet.schema.files import write_whole

log = logging.getLogger(__name__)

MOST_WAITING = 10_000
"""Lines that wait for room on the disk; further ones are lost."""
MOST_BYTES = 64 * 2**20
"""The size limit of a file that is read whole. Configs, notes and states are thousands of times smaller."""


class UnreadableFileError(UserError, OSError):
    """A file of a run's folder that no run writes: a link, a pipe, a device, or far too large."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file: no link is followed, and no pipe is waited for. Raises `FileNotFoundError` and
    `UnreadableFileError`."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableFileError(f"{path} can't be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UnreadableFileError(f"{path} is not a regular file, which a run would have written: move it away")
    return os.fdopen(handle, "rb")


def make_empty(path: Path) -> None:
    """Make a database's file, if there is none, as the umask says. SQLite would let only its owner write, and in a
    group's folder nobody else could go on with the run."""
    with suppress(OSError):  # it is there; whatever else is wrong, SQLite says
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))


def open_text(path: Path) -> TextIO:
    """The same, as text. What isn't UTF-8 is replaced."""
    return io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace", newline="\n")


def read_regular(path: Path) -> str:
    """The text of a regular file, of a bounded size."""
    with open_text(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise UnreadableFileError(f"{path} has {size:,} bytes, and at most {MOST_BYTES:,} are read: move it away")
        return file.read()


class LineFile:
    """Appends lines, for one thread at a time. The file is opened for each line, so it may be replaced meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[str] = []

    def write(self, line: str) -> None:
        """Append a line, which ends in a line break. It is in the file when this returns, unless the disk is full."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(line)
        self._flush()

    def close(self) -> None:
        if self._waiting:
            self._flush()
        if self._waiting:
            log.error("%s lacks its last %d lines", self._path, len(self._waiting), extra={LOST: True})

    def _flush(self) -> None:
        text = "".join(self._waiting).encode()
        try:
            append_whole(self._path, text)
        except OSError as error:
            log.warning("%s can't be written (%s): trying again later", self._path, error.strerror)
        else:
            self._waiting.clear()


def append_whole(path: Path, text: bytes) -> None:
    """Append all of the lines, or nothing. Raises OSError."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            text = b"\n" + text
        try:
            written = os.write(handle, text)
            while written < len(text):
                written += os.write(handle, text[written:])
        except OSError:
            os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)


class EventLog:
    """`events.jsonl`: what happened to a run (started, resumed, checkpoint, ended …), one JSON object per line.

    Any thread may write; each event is in the file when `write` returns.
    """

    def __init__(self, path: Path, masker: Masker | None = None) -> None:
        self._file = LineFile(path)
        self._lock = threading.Lock()
        self._masker = masker or Masker()

    def write(self, kind: str, **fields: Any) -> None:
        """Append an event. Secrets in its fields are masked."""
        record = {"time": round(time.time(), 3), "event": kind, **self._masker.value(fields)}
        with self._lock:
            self._file.write(json.dumps(record, default=str) + "\n")

    def close(self) -> None:
        with self._lock:
            self._file.close()


def whole_record(line: str) -> dict[str, Any] | None:
    """The JSON object on a line, or None if the line was cut off or is still being written."""
    if not line.endswith("\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def numbered_records(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The number, from 1, and the JSON object of each line, without a last line that is still being written. None: the
    line holds no object."""
    if path.exists():
        with open_text(path) as file:
            for number, line in enumerate(file, 1):
                if line.endswith("\n"):
                    yield number, whole_record(line)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events in a file."""
    return [event for _, event in numbered_records(path) if event is not None]


def is_complete(folder: Path) -> bool:
    """Whether a run came to its end."""
    events = read_events(folder / "events.jsonl")
    return bool(events) and events[-1].get("status") == "completed"


def was_cut_off(folder: Path) -> bool:
    """Whether the run that goes on in this folder was killed or interrupted before, or failed."""
    events = read_events(folder / "events.jsonl")
    bounds = [event for event in events if event["event"] in ("started", "resumed", "ended")]
    return len(bounds) > 1 and bounds[-2].get("status") != "completed"  # the last: the present start


NOTES_FILE = "notes.json"
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
    """What people wrote about a run and its episodes, and their tags. Any thread and process may call any method."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / NOTES_FILE

    def read(self) -> NotesFile:
        """Read the file; without one, there are no notes."""
        try:
            return msgspec.json.decode(read_regular(self._file).encode(), type=NotesFile)
        except FileNotFoundError:
            return NotesFile()
        except (msgspec.DecodeError, RecursionError, OSError) as error:
            raise NotesError(f"{self._file}: {error}. Repair it, or move it away.") from error

    def write(self, note: str, tags: list[str], episode: str = "") -> Note:
        """Keep a note about an episode, or about the run if none is named. An empty note without tags removes it."""
        if len(note) > LONGEST_NOTE:
            raise NotesError(f"a note must be text of at most {LONGEST_NOTE:,} characters")
        kept = Note(note.strip(), _tags(tags), round(time.time(), 3))
        try:
            with self._alone():
                everything = self.read()
                episodes = {name: one for name, one in everything.episodes.items() if name != episode}
                if episode and (kept.note or kept.tags):
                    episodes[episode] = kept
                notes = NotesFile(everything.run if episode else kept, episodes)
                write_whole(self._file, json.dumps(asdict(notes), indent=1), durable=True)
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


def _tags(tags: list[str]) -> tuple[str, ...]:
    plain = tuple(dict.fromkeys(" ".join(tag.split()) for tag in tags if tag.strip()))
    if len(plain) > MOST_TAGS or any(len(tag) > LONGEST_TAG or "," in tag for tag in plain):
        raise NotesError(f"at most {MOST_TAGS} tags, each of at most {LONGEST_TAG} characters and without a comma")
    return plain
