"""`Bash` and `Python`: shell commands and programs in the episode's sandbox.

A shell's working directory and exported variables last from call to call. Each call is a shell of its own, so that a
hanging command ends alone; it begins where the last one ended.
"""

from __future__ import annotations

import asyncio
import posixpath
import secrets
import shlex
from dataclasses import replace
from typing import Any

from ajet.agents.tools.tool import (
    Arguments,
    OpenTool,
    StatelessTool,
    ToolContext,
    ToolResult,
    ToolSetupError,
    decode,
    shorten,
)
from ajet.environment.sandboxes import ExecResult, Sandbox

COMMAND_BYTES = 120_000
"""Linux takes no argument of 128 KiB."""
TOO_LONG = (
    f"the command was not run: it has more than {COMMAND_BYTES} bytes. Write long texts into a file first "
    "(file_editor, or several commands that append to one)"
)


class Bash:
    """The tool `bash`."""

    limits_itself = True

    def __init__(
        self,
        *,
        name: str = "bash",
        timeout: float = 60.0,
        output_chars: int = 16_000,
        cwd: str = "",
    ) -> None:
        """`timeout`: the longest that a command may run."""
        self.name = name
        self.description = (
            "Run a shell command and see what it prints, and its exit code. The working directory and exported "
            f"variables are kept from call to call. A command may take at most {timeout:g} seconds; put one that "
            "must go on in the background with `&` and send its output to a file."
        )
        self.parameters = {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The command, as in bash"},
                "timeout": {
                    "type": "number",
                    "exclusiveMinimum": 0,
                    "description": f"Seconds it may take, at most {timeout:g}",
                },
            },
            "required": ["command"],
            "additionalProperties": False,
        }
        self._timeout = timeout
        self._output_chars = output_chars
        self._cwd = cwd

    async def open(self, context: ToolContext) -> OpenTool:
        sandbox = need_sandbox(context, f"tool {self.name!r}")
        folder = posixpath.join(sandbox.workspace, self._cwd)
        return _OpenBash(sandbox, folder, self._timeout, self._output_chars)


def need_sandbox(context: ToolContext, who: str) -> Sandbox:
    """The episode's sandbox. Whatever runs code or touches files does so nowhere else."""
    if context.sandbox is None:
        raise ToolSetupError(
            f"{who} needs a sandbox: set ajet.rollout.sandbox, or --sandbox (bubblewrap, …), or give run_trajectory a "
            "context=ToolContext(sandbox=…)"
        )
    return context.sandbox


class _OpenBash:
    """One episode's shell."""

    def __init__(self, sandbox: Sandbox, folder: str, timeout: float, output_chars: int) -> None:
        self._sandbox = sandbox
        self._folder = folder
        self._timeout = timeout
        self._output_chars = output_chars
        self._state = f"/tmp/.shell-{secrets.token_hex(6)}"
        self._turn = asyncio.Lock()

    async def call(self, arguments: Arguments) -> ToolResult:
        if len(arguments["command"].encode("utf-8", "replace")) > COMMAND_BYTES:
            return ToolResult(TOO_LONG, success=False)
        timeout = min(float(arguments.get("timeout", self._timeout)), self._timeout)
        async with self._turn:
            result = await self._sandbox.exec(self._script(arguments["command"]), timeout=timeout)
            await self._remember()
        stopped = f"[stopped after {timeout:g} s; what it printed until then is above]"
        output = _shown(result, stopped, self._output_chars) or "[no output]"
        data = {**_data(result), "truncated": result.truncated, "cwd": self._folder}
        return ToolResult(output, result.exit_code == 0, data)

    def _script(self, command: str) -> list[str]:
        """The command, between what the last one left and what this one leaves. A `trap` keeps it: it may `exit`. It
        may also set a trap of its own, or a PATH without any program: so it is kept once more, by the shell alone."""
        state, home = self._state, shlex.quote(self._sandbox.workspace)
        keep = f"code=$?; pwd >| {state}; export -p >| {state}.env; exit $code"
        script = (
            f"[ -f {state}.env ] && . {state}.env 2>/dev/null; "
            f"cd {shlex.quote(self._folder)} 2>/dev/null || "
            f"{{ cd {home}; echo 'the working directory is gone; this is '$PWD >&2; }}; "
            f"trap {shlex.quote(keep)} EXIT; "
            # `eval` of the text as it is: a syntax error in it is the model's, and this script still runs to its end
            f'eval "$1"; {keep}'
        )
        shell = 'command -v bash >/dev/null && exec bash -c "$1" bash "$2"; exec sh -c "$1" sh "$2"'
        return ["/bin/sh", "-c", shell, "sh", script, command]

    async def _remember(self) -> None:
        """Begin the next command in the folder where this one ended."""
        try:
            folder = (await self._sandbox.read(self._state)).split(b"\n", 1)[0].decode("utf-8", "replace")
        except OSError:  # the time limit, or the command itself, ended the shell before it could say it
            return
        if folder.startswith("/"):
            self._folder = folder

    async def close(self) -> None:
        """The sandbox goes with the episode."""


def _shown(result: ExecResult, stopped: str, chars: int) -> str:
    """What the model sees of a program: what it printed, and how it ended. `stopped`: if its time was over."""
    texts = (decode(result.stdout), decode(result.stderr))
    parts = [shorten(text.rstrip("\n"), chars) for text in texts if text.strip()]
    if result.timed_out:
        parts.append(stopped)
    elif result.exit_code:
        parts.append(f"[exit code {result.exit_code}{MEANINGS.get(result.exit_code, '')}]")
    return "\n".join(parts)


def _data(result: ExecResult) -> dict[str, Any]:
    return {
        "stdout": decode(result.stdout),
        "stderr": decode(result.stderr),
        "exit_code": result.exit_code,
        "timed_out": result.timed_out,
    }


MEANINGS = {
    126: ": it can't be executed",
    127: ": command not found",
    137: ": killed, for example because it used too much memory or made too many files",
    139: ": it crashed",
}


class Python(StatelessTool):
    """The tool `python`: runs a program and returns what it prints."""

    limits_itself = True

    def __init__(
        self,
        *,
        name: str = "python",
        timeout: float = 30.0,
        output_chars: int = 16_000,
        interpreter: str = "python3",
    ) -> None:
        self.name = name
        self.description = (
            "Run a Python program and see what it prints. Each call is a new interpreter; files stay. "
            f"It may take at most {timeout:g} seconds."
        )
        self.parameters = {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program; print what you want to know"}},
            "required": ["code"],
            "additionalProperties": False,
        }
        self._timeout = timeout
        self._output_chars = output_chars
        self._interpreter = interpreter

    async def open(self, context: ToolContext) -> OpenTool:
        need_sandbox(context, f"tool {self.name!r}")  # at the start, not at the first call
        return await super().open(context)

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        sandbox = need_sandbox(context, f"tool {self.name!r}")
        file = f"/tmp/program-{secrets.token_hex(4)}.py"
        await sandbox.write(file, arguments["code"].encode("utf-8", "replace"))
        result = await sandbox.exec(
            [self._interpreter, file], timeout=self._timeout, env={"PYTHONDONTWRITEBYTECODE": "1"}
        )
        result = replace(result, stderr=result.stderr.replace(file.encode(), b"program.py"))
        output = _shown(result, f"[stopped after {self._timeout:g} s]", self._output_chars)
        return ToolResult(output or "[no output: print the result]", result.exit_code == 0, _data(result))
