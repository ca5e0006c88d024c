"""Reading and writing files by a POSIX shell and the usual small programs, where there is nothing else inside.

`read_line` and `write_line` are commands; `content_of` and `written` understand what they did.
"""

from __future__ import annotations

import os
import posixpath

from ajet.environment.sandboxes.sandbox import ExecResult

FILE_S = 60.0
LARGEST_READ = 256 << 20

_READ = (
    'if [ -d "$1" ]; then exit 73; elif [ ! -e "$1" ]; then exit 72; '
    'elif [ ! -f "$1" ] || [ ! -r "$1" ]; then exit 74; fi; exec head -c "$2" -- "$1"'
)
_WRITE = (
    'p=$(readlink -f -- "$1" 2>/dev/null || printf %s "$1"); [ -d "$p" ] && exit 73; d=$(dirname -- "$p"); '
    'mkdir -p -- "$d" || exit 75; [ -e "$p" ] && [ ! -w "$p" ] && exit 74; '
    't=$(mktemp "$d/.new.XXXXXX") || exit 75; m=644; [ -e "$p" ] && m=$(stat -c %a -- "$p"); '
    'if cat > "$t" && chmod "$m" "$t" && mv -f -- "$t" "$p"; then exit 0; fi; rm -f -- "$t"; exit 75'
)
_ERRORS: dict[int, tuple[type[OSError], int]] = {
    72: (FileNotFoundError, 2),
    73: (IsADirectoryError, 21),
    74: (PermissionError, 13),
}
_SAID = {"Read-only": 30, "No space": 28, "Permission": 13, "Not a directory": 20}
"""What a shell says about a failed write, as error numbers."""


def read_line(workspace: str, path: str) -> list[str]:
    """A command that prints a file. Raises FileNotFoundError for what can't be a path."""
    return ["/bin/sh", "-c", _READ, "sh", _place(workspace, path), str(LARGEST_READ + 1)]


def content_of(result: ExecResult, path: str) -> bytes:
    """What `read_line` printed. Raises OSError."""
    written(result, path)
    if len(result.stdout) > LARGEST_READ:
        raise OSError(27, os.strerror(27), path)
    return result.stdout


def write_line(workspace: str, path: str) -> list[str]:
    """A command that makes a file of its standard input: whole, or not at all."""
    return ["/bin/sh", "-c", _WRITE, "sh", _place(workspace, path)]


def written(result: ExecResult, path: str) -> None:
    """Raises the OSError that one of these commands met."""
    if result.timed_out:
        raise OSError(110, f"took longer than {FILE_S:g} s", path)
    if result.exit_code == 0:
        return
    said = result.stderr.decode(errors="replace")
    kind, number = _ERRORS.get(result.exit_code, (OSError, 5))
    if kind is OSError:
        number = next((number for words, number in _SAID.items() if words in said), 5)
    raise kind(number, os.strerror(number), path)


def _place(workspace: str, path: str) -> str:
    if not path or "\0" in path:
        raise FileNotFoundError(2, "no such file", path)
    return posixpath.join(workspace, path)
