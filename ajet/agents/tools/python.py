"""`Python`: runs a program in the episode's sandbox and returns what it prints."""

from __future__ import annotations

import secrets

from ajet.agents.tools.bash import need_sandbox
from ajet.agents.tools.tool import Arguments, OpenTool, ToolContext, ToolResult, decode, shorten
from ajet.environment.sandboxes import Sandbox


class Python:
    """The tool."""

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
        return _OpenPython(need_sandbox(context, self.name), self._interpreter, self._timeout, self._output_chars)


class _OpenPython:
    def __init__(self, sandbox: Sandbox, interpreter: str, timeout: float, output_chars: int) -> None:
        self._sandbox = sandbox
        self._interpreter = interpreter
        self._timeout = timeout
        self._output_chars = output_chars

    async def call(self, arguments: Arguments) -> ToolResult:
        file = f"/tmp/program-{secrets.token_hex(4)}.py"
        await self._sandbox.write(file, arguments["code"].encode("utf-8", "replace"))
        result = await self._sandbox.exec(
            [self._interpreter, file], timeout=self._timeout, env={"PYTHONDONTWRITEBYTECODE": "1"}
        )
        stdout, stderr = decode(result.stdout), decode(result.stderr).replace(file, "program.py")
        parts = [shorten(text.rstrip("\n"), self._output_chars) for text in (stdout, stderr) if text.strip()]
        if result.timed_out:
            parts.append(f"[stopped after {self._timeout:g} s]")
        elif result.exit_code:
            parts.append(f"[exit code {result.exit_code}]")
        data = {"stdout": stdout, "stderr": stderr, "exit_code": result.exit_code, "timed_out": result.timed_out}
        return ToolResult("\n".join(parts) or "[no output: print the result]", result.exit_code == 0, data)

    async def close(self) -> None:
        """The sandbox goes with the episode."""
