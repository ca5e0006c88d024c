"""`judge_by_tests`: the task's tests decide about what an agent left, where the agent was not.

The tests come from the task, never from the agent's folder, and run in a sandbox of their own, which holds nothing of
the agent's. The result's modules are imported in another one (`apart.py`). What can't be judged through the agent's own
doing, or ends the result's process, has failed; a sandbox that can't be made is a `SandboxError`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ajet.agents.task_files import NO_BYTECODE, files_of, module_names, run_command, said, write_files
from ajet.sandbox import ExecResult, Result, Sandbox, SandboxError, UnusableResultError
from ajet.sandbox.result import fresh_sandbox
from ajet.sandbox.streams import Input
from ajet.schema.errors import TaskDataError

ResultAs = Literal["modules", "files"]
"""`modules`: the tests import the result, which runs in a process of its own. `files`: a copy of it lies in the tests'
folder, for tests that read files or are no Python; whatever of it they run may meddle with them."""

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
    """What the tests said."""

    exit_code: int
    output: str
    why: str = ""
    """Why the result failed, whatever the tests said."""

    @property
    def passed(self) -> bool:
        """Whether the task is done."""
        return self.exit_code == 0 and not self.why

    def facts(self) -> dict[str, Any]:
        """For the episode's metadata."""
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
    """Run the tests in one sandbox, and the result's modules in the other."""
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
