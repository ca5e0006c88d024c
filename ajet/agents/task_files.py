"""What a task brings into its sandbox.

A task's metadata may hold `folder` (a folder of this machine, copied into the workspace), `files` (path → text),
`test_files` (the same) and `test_command`. `task_tests.py` runs the tests that decide.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ajet.environment.sandboxes.sandbox import ExecResult, Sandbox
from ajet.schema.errors import TaskDataError
from ajet.schema.user_code import find_named, likely_places

NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}
OUTPUT_CHARS = 6000
"""Of the tests' output, as a model is told: its end says what failed."""
LARGEST_FOLDER = 512 << 20


async def bring_files(sandbox: Sandbox, metadata: Mapping[str, Any], base_dirs: Sequence[str | Path] = ()) -> None:
    """Put the task's folder, files and tests into the workspace."""
    if metadata.get("folder"):
        packed = await asyncio.to_thread(_packed, _found(metadata["folder"], base_dirs))
        result = await sandbox.exec(["tar", "-xf", "-"], stdin=packed)
        if result.exit_code:
            raise TaskDataError(f"the task's `folder` can't be copied into the sandbox: {said(result)}")
    await write_files(sandbox, metadata, "files")
    await write_files(sandbox, metadata, "test_files")


async def run_command(sandbox: Sandbox, command: str, seconds: float | None = None) -> ExecResult:
    """Run the tests, without `seconds` for as long as the sandbox lets a command run. Python must keep no bytecode: an
    edit of equal length within a second would go unnoticed."""
    return await sandbox.exec(command, timeout=seconds, env=NO_BYTECODE)


async def write_files(sandbox: Sandbox, metadata: Mapping[str, Any], key: str) -> None:
    """Write the files that a task brings."""
    for path, text in files_of(metadata, key).items():
        await sandbox.write(path, text.encode())


def files_of(metadata: Mapping[str, Any], key: str) -> Mapping[str, str]:
    """The files that a task brings, by their paths."""
    files = metadata.get(key) or {}
    if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
        raise TaskDataError(f"a task's `{key}` must map paths to texts, not {files!r:.100}")
    return {str(path): text for path, text in files.items()}


def module_names(metadata: Mapping[str, Any], base_dirs: Sequence[str | Path] = ()) -> set[str]:
    """The modules that the task's folder and files bring, by their first names."""
    folder = metadata.get("folder")
    top = _found(folder, base_dirs) if folder else None
    paths = [*map(Path, files_of(metadata, "files"))]
    if top is not None:
        paths += [path.relative_to(top) for pattern in ("*", "src/*") for path in top.glob(pattern)]
    firsts = [path.parts[1] if path.parts[0] == "src" and path.parts[1:] else path.parts[0] for path in paths]
    return {name for name in (Path(first).stem for first in firsts) if name.isidentifier()}


def said(result: ExecResult) -> str:
    """What a command printed, and how it ended."""
    text = b"\n".join(part for part in (result.stdout, result.stderr) if part).decode(errors="replace").strip()
    if len(text) > OUTPUT_CHARS:
        text = f"…{text[-OUTPUT_CHARS:]}"
    ended = "timed out" if result.timed_out else f"exit code {result.exit_code}"
    return f"{text}\n({ended})" if text else f"({ended})"


def _found(folder: Any, base_dirs: Sequence[str | Path]) -> Path:
    if not isinstance(folder, str):
        raise TaskDataError(f"a task's `folder` must be the path of a folder, not {folder!r:.100}")
    if (found := find_named(folder, base_dirs, Path.is_dir)) is not None:
        return found
    raise TaskDataError(
        f"a task's `folder`: there is no folder {' or '.join(map(str, likely_places(folder, base_dirs)))}"
    )


def _packed(folder: Path) -> bytes:
    """The folder's content. Who owns a file here means nothing inside."""
    packed = io.BytesIO()

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        if packed.tell() + member.size > LARGEST_FOLDER:
            raise TaskDataError(f"a task's `folder`: {folder} is larger than {LARGEST_FOLDER >> 20} MB")
        return member

    with tarfile.open(fileobj=packed, mode="w") as archive:
        for place in sorted(folder.iterdir()):
            archive.add(place, place.name, filter=plain)
    return packed.getvalue()
