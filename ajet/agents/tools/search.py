"""`SearchFiles`: text and file names in the episode's sandbox, by ripgrep where it is installed, else by grep and find.

Patterns and paths are arguments of a program and never part of a shell line.
"""

from __future__ import annotations

import posixpath

from ajet.agents.tools.bash import need_sandbox
from ajet.agents.tools.tool import Arguments, OpenTool, ToolContext, ToolResult, decode, shorten
from ajet.environment.sandboxes import ExecResult, Sandbox

SKIPPED = (".git", "node_modules", "__pycache__", ".venv", "venv", ".mypy_cache", ".pytest_cache", ".tox")
TIMEOUT_S = 30.0
LINE_CHARS = 400
MAX_CONTEXT = 20


class SearchFiles:
    """The tool."""

    def __init__(self, *, name: str = "search", max_results: int = 100, output_chars: int = 16_000) -> None:
        self.name = name
        self.description = (
            "Find text in files, or files by name. `target: text` (the default) shows matching lines with their "
            "file and line number; `target: files` lists files whose name matches, with * and ? as wildcards."
        )
        self.parameters = {
            "type": "object",
            "properties": {
                "pattern": {"type": "string", "minLength": 1, "description": "The text, or the file name"},
                "path": {"type": "string", "description": "A folder or file; default: the workspace"},
                "target": {"type": "string", "enum": ["text", "files"]},
                "regex": {"type": "boolean", "description": "The pattern is a regular expression; default: plain text"},
                "case_sensitive": {"type": "boolean", "description": "Default: true"},
                "file_pattern": {"type": "string", "description": "Only files with such names, for example *.py"},
                "context_lines": {"type": "integer", "minimum": 0, "maximum": MAX_CONTEXT},
            },
            "required": ["pattern"],
            "additionalProperties": False,
        }
        self._max_results = max_results
        self._output_chars = output_chars

    async def open(self, context: ToolContext) -> OpenTool:
        return _OpenSearch(need_sandbox(context, self.name), self._max_results, self._output_chars)


class _OpenSearch:
    def __init__(self, sandbox: Sandbox, max_results: int, output_chars: int) -> None:
        self._sandbox = sandbox
        self._max_results = max_results
        self._output_chars = output_chars
        self._ripgrep: bool | None = None

    async def call(self, arguments: Arguments) -> ToolResult:
        path = posixpath.normpath(posixpath.join(self._sandbox.workspace, arguments.get("path", ".")))
        if "\0" in path + arguments["pattern"]:
            return ToolResult("NUL characters can't be searched for", success=False)
        if self._ripgrep is None:
            self._ripgrep = (await self._sandbox.exec(["rg", "--version"], timeout=TIMEOUT_S)).exit_code == 0
        if arguments.get("target") == "files":
            return await self._files(arguments, path)
        command = _ripgrep(arguments, path) if self._ripgrep else _grep(arguments, path)
        result = await self._sandbox.exec(command, timeout=TIMEOUT_S)
        if result.exit_code > 1 and not result.stdout and not _only_unreadable(result, path):
            return _failed(result, arguments, path)
        lines = decode(result.stdout).splitlines()
        if not arguments.get("context_lines"):
            lines.sort(key=lambda line: line.partition(":")[0])  # grep goes through a folder in any order
        return self._answer(result, lines, f"No line matches in {path}.")

    async def _files(self, arguments: Arguments, path: str) -> ToolResult:
        name: str = arguments["pattern"]
        if not any(sign in name for sign in "*?["):
            name = f"*{name}*"
        whole = "/" in name  # a folder with it: `-name` looks at the last part alone
        test = f"-{'' if arguments.get('case_sensitive', True) else 'i'}{'path' if whole else 'name'}"
        name = f"*/{name}" if whole and not name.startswith(("*", "/")) else name
        skipped = [part for folder in SKIPPED for part in ("-name", folder, "-o")][:-1]
        command = ["find", path, "-type", "d", "(", *skipped, ")", "-prune", "-o", "-type", "f", test, name, "-print"]
        result = await self._sandbox.exec(command, timeout=TIMEOUT_S)
        if result.exit_code and not result.stdout and not _only_unreadable(result, path):
            return _failed(result, arguments, path)
        return self._answer(result, sorted(decode(result.stdout).splitlines()), f"No file matches in {path}.")

    def _answer(self, result: ExecResult, lines: list[str], nothing: str) -> ToolResult:
        shown = [line if len(line) <= LINE_CHARS else f"{line[:LINE_CHARS]} …" for line in lines[: self._max_results]]
        more = len(lines) - len(shown)
        if more:
            shown.append(f"[{more} more lines: narrow the search]")
        if result.timed_out:
            shown.append(f"[stopped after {TIMEOUT_S:g} s: not everything was searched; name a smaller folder]")
        elif result.truncated:
            shown.append("[there was more than can be read, and some lines are missing: narrow the search]")
        elif "Permission denied" in decode(result.stderr):
            shown += [*([] if lines else [nothing]), "[some files or folders can't be read, and were left out]"]
        data = {"lines": lines[: self._max_results], "total": len(lines)}
        return ToolResult(shorten("\n".join(shown) or nothing, self._output_chars), data=data)

    async def close(self) -> None:
        """The sandbox goes with the episode."""


def _ripgrep(arguments: Arguments, path: str) -> list[str]:
    return [
        *("rg", "--no-config", "--line-number", "--with-filename", "--no-heading", "--color=never", "--sort=path"),
        *("--hidden", "--no-ignore", "--max-columns=2000", "--max-columns-preview"),
        *(argument for folder in SKIPPED for argument in ("--glob", f"!**/{folder}/**")),
        *([f"--glob={arguments['file_pattern']}"] if "file_pattern" in arguments else []),
        *([] if arguments.get("regex") else ["--fixed-strings"]),
        *([] if arguments.get("case_sensitive", True) else ["--ignore-case"]),
        *([f"--context={arguments['context_lines']}"] if arguments.get("context_lines") else []),
        *("--regexp", arguments["pattern"], "--", path),
    ]


def _grep(arguments: Arguments, path: str) -> list[str]:
    return [
        *("grep", "--recursive", "--line-number", "--with-filename", "--binary-files=without-match", "--color=never"),
        *(f"--exclude-dir={folder}" for folder in SKIPPED),
        *([f"--include={arguments['file_pattern']}"] if "file_pattern" in arguments else []),
        "--extended-regexp" if arguments.get("regex") else "--fixed-strings",
        *([] if arguments.get("case_sensitive", True) else ["--ignore-case"]),
        *([f"--context={arguments['context_lines']}"] if arguments.get("context_lines") else []),
        *("--regexp", arguments["pattern"], "--", path),
    ]


def _only_unreadable(result: ExecResult, path: str) -> bool:
    """Whether all that went wrong are files below `path` that this user may not read."""
    problems = decode(result.stderr).strip().splitlines()
    return (
        not result.timed_out
        and bool(problems)
        and all("Permission denied" in line and f"{path.rstrip('/')}/" in line for line in problems)
    )


def _failed(result: ExecResult, arguments: Arguments, path: str) -> ToolResult:
    said = decode(result.stderr).strip()
    if result.timed_out:
        said = f"the search took longer than {TIMEOUT_S:g} s: name a smaller folder"
    elif "regex" in said or "regular expression" in said or "Unmatched" in said:
        said += "\nSet regex to false to search for it as plain text."
    return ToolResult(said or f"the search in {path} failed", success=False)
