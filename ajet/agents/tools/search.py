"""`SearchFiles`: text and file names in the episode's sandbox, by ripgrep where it is installed, else by grep and find.

Patterns and paths are arguments of a program and never part of a shell line. grep and find are asked for nothing that
busybox's don't know, except what was tried first.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from ajet.agents.tools.bash import need_sandbox
from ajet.agents.tools.tool import Arguments, OpenTool, ToolContext, ToolResult, decode, shorten
from ajet.environment.sandboxes import ExecResult, Sandbox

SKIPPED = (".git", "node_modules", "__pycache__", ".venv", "venv", ".mypy_cache", ".pytest_cache", ".tox")
TIMEOUT_S = 30.0
LINE_CHARS = 400
MAX_CONTEXT = 20
PATTERN_CHARS = 4000
"""Some patterns take a time that is quadratic in their length to be understood."""


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
                "file_extensions": {
                    "type": "array",
                    "items": {"type": "string", "pattern": r"^\.?[\w-]+(\.[\w-]+)*$"},
                    "description": "Only files with one of these endings, for example [py, txt]",
                },
                "context_lines": {"type": "integer", "minimum": 0, "maximum": MAX_CONTEXT},
            },
            "required": ["pattern"],
            "additionalProperties": False,
        }
        self._max_results = max_results
        self._output_chars = output_chars

    async def open(self, context: ToolContext) -> OpenTool:
        return _OpenSearch(need_sandbox(context, f"tool {self.name!r}"), self._max_results, self._output_chars)


class _OpenSearch:
    def __init__(self, sandbox: Sandbox, max_results: int, output_chars: int) -> None:
        self._sandbox = sandbox
        self._max_results = max_results
        self._output_chars = output_chars
        self._program: _Program | None = None

    async def call(self, arguments: Arguments) -> ToolResult:
        path = posixpath.normpath(posixpath.join(self._sandbox.workspace, arguments.get("path", ".")))
        if "\0" in path + arguments["pattern"]:
            return ToolResult("NUL characters can't be searched for", success=False)
        if max(len(arguments["pattern"]), len(arguments.get("file_pattern", ""))) > PATTERN_CHARS:
            return ToolResult(f"a pattern may have at most {PATTERN_CHARS} characters", success=False)
        if endings := [ending.lstrip(".") for ending in arguments.get("file_extensions", ())]:
            if arguments.get("file_pattern") or arguments.get("target") == "files":
                return ToolResult("file_extensions goes with a search for text, without file_pattern", success=False)
            arguments = {
                **arguments,
                "file_pattern": f"*.{{{','.join(endings)}}}" if endings[1:] else f"*.{endings[0]}",
            }
        if arguments.get("target") == "files":
            return await self._files(arguments, path)
        if self._program is None:
            self._program = await self._best_program()
        pattern: str = arguments["pattern"]
        if self._program == "grep" and arguments.get("regex"):
            pattern = pattern.replace(r"\d", "[0-9]")
            if unknown := _BEYOND_GREP.search(pattern):
                return ToolResult(
                    f"grep knows no {unknown[0]!r} in a regular expression, and this sandbox has neither ripgrep nor "
                    "GNU grep\nWrite it as POSIX's grep -E takes it, or set regex to false.",
                    success=False,
                )
        command = (_ripgrep if self._program == "rg" else _grep)({**arguments, "pattern": pattern}, path, self._program)
        result = await self._sandbox.exec(command, timeout=TIMEOUT_S, cwd="/")
        if not result.stdout and (result.timed_out or result.stderr) and not _only_unreadable(result, path):
            return _failed(result, arguments, path)
        lines = decode(result.stdout).splitlines()
        if not arguments.get("context_lines"):
            lines.sort(key=lambda line: line.partition(":")[0])  # grep goes through a folder in any order
        answer = self._answer(result, lines, f"No line matches in {path}.")
        answer.data["matches"] = list(_matches(lines[: self._max_results], arguments))
        return answer

    async def _best_program(self) -> _Program:
        if (await self._sandbox.exec(["rg", "--version"], timeout=TIMEOUT_S)).exit_code == 0:
            return "rg"
        tried = await self._sandbox.exec(["grep", "-I", "-P", "-e", "x", "/dev/null"], timeout=TIMEOUT_S)
        return "gnu grep" if tried.exit_code == 1 else "grep"

    async def _files(self, arguments: Arguments, path: str) -> ToolResult:
        name: str = arguments["pattern"]
        if not any(sign in name for sign in "*?["):
            name = f"*{name}*"
        whole = "/" in name  # a folder with it: `-name` looks at the last part alone
        test = f"-{'' if arguments.get('case_sensitive', True) else 'i'}{'path' if whole else 'name'}"
        name = f"*/{name}" if whole and not name.startswith(("*", "/")) else name
        command = [*_find(path), test, name, "-print"]
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


def _matches(lines: Sequence[str], arguments: Arguments) -> Iterator[dict[str, Any]]:
    """Where the lines match. Of a regular expression, no column is known: it runs in the sandbox alone, since a model's
    could take Python for ever."""
    wanted = re.compile(re.escape(arguments["pattern"]), 0 if arguments.get("case_sensitive", True) else re.I)
    for line in lines:
        if place := re.match(r"(.+?):(\d+):(.*)", line, re.S):  # what surrounds a match has dashes in place of colons
            found = None if arguments.get("regex") else wanted.search(place[3])
            column = None if found is None else found.start() + 1
            yield {"file": place[1], "line": int(place[2]), "column": column, "text": place[3]}


_Program = Literal["rg", "gnu grep", "grep"]
_BEYOND_GREP = re.compile(r"\(\?|\\[^\W_wWsSbB]|\[[^]]*\\")
"""What ripgrep and GNU's `grep -P` take, but `grep -E` takes for something else: groups with options, escaped letters,
and escapes in brackets."""


def _ripgrep(arguments: Arguments, path: str, _: _Program) -> list[str]:
    names = arguments.get("file_pattern", "").lstrip("/")
    return [
        *("rg", "--no-config", "--line-number", "--with-filename", "--no-heading", "--color=never", "--sort=path"),
        *("--hidden", "--no-ignore", "--max-columns=2000", "--max-columns-preview"),
        *([f"--glob=**/{names}"] if names else []),
        *(argument for folder in SKIPPED for argument in ("--glob", f"!**/{folder}/**")),
        *([] if arguments.get("regex") else ["--fixed-strings"]),
        *([] if arguments.get("case_sensitive", True) else ["--ignore-case"]),
        *([f"--context={arguments['context_lines']}"] if arguments.get("context_lines") else []),
        *("--regexp", arguments["pattern"], "--", path),
    ]


def _grep(arguments: Arguments, path: str, program: _Program) -> list[str]:
    names = arguments.get("file_pattern", "").lstrip("/")
    gnu = program == "gnu grep"
    return [
        *_find(path),
        *(["-regex", f".*/{_regex(names)}"] if names else []),
        *("-exec", "grep", "-n", "-H", *(["-I"] if gnu else [])),  # -I: no binary files
        ("-P" if gnu else "-E") if arguments.get("regex") else "-F",
        *([] if arguments.get("case_sensitive", True) else ["-i"]),
        *(["-C", str(arguments["context_lines"])] if arguments.get("context_lines") else []),
        *("-e", arguments["pattern"], "--", "{}", "+"),
    ]


def _find(path: str) -> list[str]:
    """The files below a folder, but for `SKIPPED`; tests and an action follow."""
    skipped = [part for folder in SKIPPED for part in ("-name", folder, "-o")][:-1]
    return ["find", path, "-type", "d", "(", *skipped, ")", "-prune", "-o", "-type", "f"]


_GLOB = {"**/": r"\(.*/\)*", "**": ".*", "*": "[^/]*", "?": "[^/]", "{": r"\(", "}": r"\)", ",": r"\|"}


def _regex(glob: str) -> str:
    """A glob, as ripgrep reads it, for find's `-regex`: what GNU's and busybox's read alike."""
    found, depth = "", 0
    for part in re.findall(r"\*\*/|\*\*|\[!?[^]]+\]|.", glob, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(part, 0)
        if part[0] == "[" and len(part) > 1:
            found += part.replace("[!", "[^")
        elif part in _GLOB and (part != "," or depth):
            found += _GLOB[part]
        else:
            found += f"[{part}]" if part in ".+$" else "\\" + part if part in "[]^\\" else part
    return found


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
    elif arguments.get("regex") and "o such file" not in said:
        said += "\nSet regex to false to search for it as plain text."
    return ToolResult(said or f"the search in {path} failed", success=False)
