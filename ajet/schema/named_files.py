"""Where a file or folder is that a YAML names: one rule for data, code and folders.

A relative name is looked up in the working directory, then in the YAML's folder, then in the folders above that. So a
repository's YAML, which names its files from the repository's root, runs from anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path


def find_named(
    name: str | Path, base_dirs: Sequence[str | Path] = (), is_there: Callable[[Path], bool] = Path.exists
) -> Path | None:
    """The absolute path of what `name` refers to, or None. `base_dirs`: the YAML's folder, if there is one."""
    for candidate in (*likely_places(name, base_dirs), *_above(name, base_dirs)):
        if holds(is_there, candidate):
            return candidate.resolve()
    return None


def likely_places(name: str | Path, base_dirs: Sequence[str | Path] = ()) -> list[Path]:
    """Where a name is looked up first. Messages about a missing file speak of these."""
    given = Path(name).expanduser()
    return list(dict.fromkeys(Path(base).resolve() / given for base in (Path.cwd(), *base_dirs)))


def looked_in(name: str | Path, base_dirs: Sequence[str | Path] = ()) -> str:
    """The folders of `likely_places`, for a message."""
    return " and ".join(dict.fromkeys(str(place.parent) for place in likely_places(name, base_dirs)))


def folders_above(base_dirs: Sequence[str | Path]) -> list[Path]:
    """The folders above `base_dirs`, nearest first."""
    return list(dict.fromkeys(folder for base in base_dirs for folder in Path(base).resolve().parents))


def holds(check: Callable[[Path], bool], path: Path) -> bool:
    """`check(path)`; a path that no file can have isn't there."""
    try:
        return check(path)
    except (OSError, ValueError):  # too long, a NUL in it, or in a folder that may not be entered
        return False


def _above(name: str | Path, base_dirs: Sequence[str | Path]) -> list[Path]:
    given = Path(name).expanduser()
    return [] if given.is_absolute() else [folder / given for folder in folders_above(base_dirs)]
