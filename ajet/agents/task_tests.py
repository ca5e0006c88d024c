"""`judge_by_tests`: runs the task's tests on an agent's result, outside the agent's sandbox.

The tests come from the task, never from the agent's folder, and run in a separate sandbox that holds nothing from the
agent. The result's modules are imported in another one (`apart.py`). A result that the agent made untestable, or that
ends its process, has failed; a sandbox that can't be created is a `SandboxError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ajet.environment.sandboxes import (
    ExecResult,
    Input,
    Result,
    Sandbox,
    SandboxError,
    UnusableResultError,
    fresh_sandbox,
)
from ajet.schema.errors import TaskDataError
from ajet.schema.user_code import find_named, likely_places

NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}
OUTPUT_CHARS = 6000
"""How much of the tests' output a model is shown: the end, which says what failed."""
LARGEST_FOLDER = 512 << 20


async def bring_files(sandbox: Sandbox, metadata: Mapping[str, Any], base_dirs: Sequence[str | Path] = ()) -> None:
    """Put the task's folder, files and tests into the workspace."""
    if metadata.get("folder"):
        packed = await asyncio.to_thread(packed_folder, _found(metadata["folder"], base_dirs))
        result = await sandbox.exec(["tar", "-xf", "-"], stdin=packed)
        if result.exit_code:
            raise TaskDataError(f"the task's `folder` can't be copied into the sandbox: {said(result)}")
    await write_files(sandbox, metadata, "files")
    await write_files(sandbox, metadata, "test_files")


async def run_command(sandbox: Sandbox, command: str, seconds: float | None = None) -> ExecResult:
    """Run the tests, for at most `seconds` or the sandbox's own limit. Python writes no bytecode, as an edit of equal
    length within a second would go unnoticed."""
    return await sandbox.exec(command, timeout=seconds, env=NO_BYTECODE)


async def write_files(sandbox: Sandbox, metadata: Mapping[str, Any], key: str) -> None:
    """Write the files that a task brings."""
    for path, text in files_of(metadata, key).items():
        await sandbox.write(path, text.encode())


def files_of(metadata: Mapping[str, Any], key: str) -> Mapping[str, str]:
    """The files that a task brings, by path."""
    files = metadata.get(key) or {}
    if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
        raise TaskDataError(f"a task's `{key}` must map paths to texts, not {files!r:.100}")
    return {str(path): text for path, text in files.items()}


def module_names(metadata: Mapping[str, Any], base_dirs: Sequence[str | Path] = ()) -> set[str]:
    """The top-level names of the modules in the task's folder and files."""
    folder = metadata.get("folder")
    top = _found(folder, base_dirs) if folder else None
    paths = [*map(Path, files_of(metadata, "files"))]
    if top is not None:
        paths += [path.relative_to(top) for pattern in ("*", "src/*") for path in top.glob(pattern)]
    firsts = [path.parts[1] if path.parts[0] == "src" and path.parts[1:] else path.parts[0] for path in paths]
    return {name for name in (Path(first).stem for first in firsts) if name.isidentifier()}


def said(result: ExecResult) -> str:
    """A command's output, and how it ended."""
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


def packed_folder(folder: Path) -> bytes:
    """The folder's content as an archive. File owners are dropped, as they mean nothing in the sandbox."""
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


ResultAs = Literal["modules", "files"]
"""`modules`: the tests import the result, which runs in a separate process. `files`: a copy of the result lies in the
tests' folder, for tests that read files or aren't Python; code of the result that they run can interfere with them."""

OURS = ".ajet"
"""A folder in the tests' sandbox."""
APART = Path(__file__).with_name("apart.py")
MOST_ANSWERED = 16 << 20
"""Bytes that the result's process may answer in all."""
NOT_JUDGED = 1
IMPORT = b'{"ask": "import"'
"""How the tests' process asks for a module that there is."""
_TESTS = f"exec 8<&0 9>&1 </dev/null >{OURS}/output 2>&1\n"
_SHOW = ["tail", "-c", "20000", f"{OURS}/output"]
_SERVE = ["/bin/sh", "-c", 'exec python3 -c "$1" 2>/dev/null', "sh", APART.read_text()]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of the tests."""

    exit_code: int
    output: str
    why: str = ""
    """Why the result failed, regardless of the tests."""

    @property
    def passed(self) -> bool:
        """Whether the task is done."""
        return self.exit_code == 0 and not self.why

    def facts(self) -> dict[str, Any]:
        """The verdict as plain data, for the episode's metadata."""
        return {"exit_code": self.exit_code, "output": self.output, **({"why": self.why} if self.why else {})}


async def judge_by_tests(
    sandbox: Sandbox,
    metadata: Mapping[str, Any],
    command: str,
    seconds: float | None = None,
    *,
    result_as: str = "modules",
    base_dirs: Sequence[str | Path] = (),
) -> Verdict:
    """Run the tests on what the agent left in its sandbox. `metadata` is the task's; its own `result_as` counts."""
    chosen = metadata.get("result_as", result_as)
    if chosen not in get_args(ResultAs):
        raise TaskDataError(f"`result_as` must be one of {', '.join(get_args(ResultAs))}, not {chosen!r:.100}")
    try:
        result = await Result.of(sandbox, without=files_of(metadata, "test_files"))
        async with fresh_sandbox(sandbox) as copy:
            if chosen == "files":
                await write_files(copy, metadata, "test_files")
            await result.put(copy)
            if chosen == "files":
                ran = await run_command(copy, command, seconds)
                return Verdict(ran.exit_code, said(ran))
            names = module_names(metadata, base_dirs)
            async with fresh_sandbox(sandbox) as place:
                await write_files(place, metadata, "test_files")
                return await _apart(place, copy, command, seconds, names)
    except UnusableResultError as error:
        return Verdict(NOT_JUDGED, "", str(error))


async def _apart(tests: Sandbox, result: Sandbox, command: str, seconds: float | None, names: set[str]) -> Verdict:
    """Run the tests in one sandbox, and the result's modules in another."""
    install = f"import apart\napart.install({tests.workspace!r}, {sorted(names)!r})\n"
    await tests.write(f"{OURS}/sitecustomize.py", install.encode())
    await tests.write(f"{OURS}/apart.py", APART.read_bytes())
    own = tests.settings.environment.get("PYTHONPATH")
    path = f"{tests.workspace}/{OURS}" + (f":{own}" if own else "")
    questions, answers = Input(), Input()
    asked = imported = False

    def ask(piece: bytes) -> None:
        nonlocal asked, imported
        asked, imported = True, imported or IMPORT in piece
        questions.write(piece)

    async with _serving(result, questions, answers) as serving:
        variables = {**NO_BYTECODE, "PYTHONPATH": path}
        ran = await tests.exec(_TESTS + command, timeout=seconds, env=variables, stdin=answers, on_output=ask)
        ended = await _why_ended(serving)
    shown = await tests.exec(_SHOW)
    output = said(ExecResult(ran.exit_code, shown.stdout, b"", ran.seconds, ran.timed_out))
    if not asked and not ran.timed_out:
        raise TaskDataError(
            f"the tests ({command!r:.200}) imported nothing of what the agent wrote, so they say nothing about it. "
            "They run apart from it, with the task's `test_files` and Python 3.8 or later, without its options -I, -E "
            f"and -S. For tests that read files, or are no Python, set `result_as: files`. They printed: {output}"
        )
    return Verdict(ran.exit_code, output, ended or ("" if imported else "no module of the result was imported"))


@contextlib.asynccontextmanager
async def _serving(result: Sandbox, questions: Input, answers: Input) -> AsyncIterator[asyncio.Task[ExecResult]]:
    """The process that imports the result, for as long as the tests ask it."""
    answered = 0

    def answer(piece: bytes) -> None:
        nonlocal answered
        answered += len(piece)
        if answered > MOST_ANSWERED:
            raise UnusableResultError(f"the result answered more than {MOST_ANSWERED >> 20} MB")
        answers.write(piece)

    serving = asyncio.create_task(result.exec(_SERVE, env=NO_BYTECODE, stdin=questions, on_output=answer))
    serving.add_done_callback(lambda _: answers.close())
    try:
        yield serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def _why_ended(serving: asyncio.Task[ExecResult]) -> str:
    """Why the result's process ended before the tests did; empty if it did not."""
    if not serving.done():
        return ""
    try:
        ran = await serving
    except (UnusableResultError, SandboxError) as error:
        return str(error)
    how = "it ran too long" if ran.timed_out else f"exit code {ran.exit_code}"
    return f"the result's process ended before the tests did ({how})"
