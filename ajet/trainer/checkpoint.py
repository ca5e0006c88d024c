"""Checkpoints that are complete or absent, and hold no pickle: safetensors and JSON.

    step_20/
      hf/              what `transformers.from_pretrained` and vLLM load
      adapter/         LoRA only: the adapter alone
      optimizer.safetensors  rng.safetensors  state.json
      COMPLETE         written last: every file with its size and SHA-256

A checkpoint is written aside, synced, and renamed. One that is incomplete, or whose files don't match the marker, is
never used: the one before it is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ajet.schema.errors import UserError

log = logging.getLogger("ajet.trainer")

MARKER = "COMPLETE"
PREFIX = "step_"
_CHUNK = 1 << 20


class CheckpointError(UserError):
    """A checkpoint that was asked for by name and can't be used."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    state: dict[str, Any]
    """The content of `state.json`."""


class CheckpointFolder:
    """The checkpoints of one experiment."""

    def __init__(self, root: Path, *, keep: int = 3, keep_best: bool = True) -> None:
        self.root = root
        self.keep = keep
        self.keep_best = keep_best

    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Checkpoint | None:
        """Let `write(folder)` fill a new checkpoint, and make it durable. None (and a warning) if the disk refuses.

        `state` must be JSON; its `score`, if it has one, decides which checkpoint is the best.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        draft = self.root / f".{PREFIX}{step}.{os.getpid()}"
        final = self.root / f"{PREFIX}{step}"
        try:
            draft.mkdir()
            write(draft)
            (draft / "state.json").write_text(json.dumps({"step": step, **state}, indent=1))
            seal(draft)
            if final.exists():
                shutil.rmtree(final)  # of the same step, from before a resume
            draft.rename(final)
            _sync(self.root)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            log.warning("checkpoint of step %d could not be written (%s); the one before it stays in use", step, error)
            return None
        self._prune()
        return Checkpoint(final, step, {"step": step, **state})

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint. Damaged ones are named and passed over."""
        for path in self._folders():
            try:
                return load(path)
            except CheckpointError as error:
                log.warning("%s; the one before it is used", error)
        return None

    def best(self) -> Path | None:
        """The checkpoint with the highest score; of equals the newest."""
        scored = [(score, path) for path in self._folders() if (score := _score(path)) is not None]
        return max(scored, key=lambda pair: (pair[0], step_of(pair[1])))[1] if scored else None

    def point(self, link: Path, checkpoint: Checkpoint) -> None:
        """Make `link` (a symbolic link) lead to the checkpoint's Hugging Face folder, in one move."""
        draft = link.with_name(f".{link.name}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        draft.symlink_to(os.path.relpath(checkpoint.path / "hf", link.parent), target_is_directory=True)
        draft.replace(link)

    def _folders(self) -> list[Path]:
        """Newest first. A folder without a marker is no checkpoint."""
        if not self.root.is_dir():
            return []
        found = [path for path in self.root.iterdir() if step_of(path) >= 0 and (path / MARKER).is_file()]
        return sorted(found, key=step_of, reverse=True)

    def _prune(self) -> None:
        folders = self._folders()
        best = self.best() if self.keep_best else None
        for path in folders[self.keep :]:
            if path != best:
                (path / MARKER).unlink()  # first: a half-removed folder must not look complete
                shutil.rmtree(path)

    def _sweep(self) -> None:
        """Remove what processes that are gone left half-written."""
        for path in self.root.iterdir():
            unsealed = step_of(path) >= 0 and not (path / MARKER).is_file()
            if path.is_dir() and (path.name.startswith(f".{PREFIX}") or unsealed):
                shutil.rmtree(path, ignore_errors=True)


def step_of(path: Path) -> int:
    """The step in a checkpoint folder's name; -1 for anything else."""
    number = path.name.removeprefix(PREFIX)
    return int(number) if path.name.startswith(PREFIX) and number.isdecimal() else -1


def load(path: Path) -> Checkpoint:
    """Read a checkpoint's state after checking every file against the marker."""
    try:
        listed: dict[str, list[Any]] = json.loads((path / MARKER).read_text())
        for name, (size, digest) in listed.items():
            file = path / name
            if file.stat().st_size != size or _digest(file) != digest:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} is not what was written")
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
        return Checkpoint(path, int(state["step"]), state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {path} is incomplete or unreadable: {error}") from error


def seal(folder: Path) -> None:
    """Sync every file and directory, then write the marker."""
    listed = {}
    for file in sorted(_files(folder)):
        listed[str(file.relative_to(folder))] = [file.stat().st_size, _digest(file)]
        _sync(file)
    for directory in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _sync(directory)
    marker = folder / MARKER
    marker.write_text(json.dumps(listed, indent=1))
    _sync(marker)
    _sync(folder)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path.name != MARKER)


def _digest(file: Path) -> str:
    total = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            total.update(chunk)
    return total.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _score(path: Path) -> float | None:
    try:
        score = json.loads((path / "state.json").read_text()).get("score")
    except (OSError, ValueError):
        return None
    return float(score) if score is not None else None
