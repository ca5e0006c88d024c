"""`FileEditor`: view, create and edit text files in the episode's sandbox, byte for byte, with undo.

What is not edited keeps every byte: line ends, tabs, a missing newline at the end, and even bytes that are no UTF-8
(they survive an edit elsewhere in the file). Where all lines end with CRLF, so do those that are written. A file is
replaced whole or not at all.
"""

from __future__ import annotations

import asyncio
import posixpath
from typing import NamedTuple

from ajet.agents.tools.bash import need_sandbox
from ajet.agents.tools.tool import Arguments, OpenTool, ToolContext, ToolResult, shorten
from ajet.environment.sandboxes import Sandbox

NEEDS = {
    "view": (),
    "create": ("file_text",),
    "str_replace": ("old_str",),
    "insert": ("insert_line", "insert_text"),
    "undo_edit": (),
}
"""The commands, and the arguments that each needs besides the path."""
AROUND = 4
"""Lines shown before and after an edit."""
UNDO_STEPS = 50
LISTED = 400
"""Entries of a folder that are shown."""


class EditError(ValueError):
    """An edit that can't be made as asked. The message is for the model."""


class FileEditor:
    """The tool."""

    def __init__(
        self, *, name: str = "file_editor", max_file_kb: int = 1024, output_chars: int = 16_000, root: str | None = None
    ) -> None:
        """`root`: the only folder whose files may be touched (None: the sandbox's own rights decide)."""
        self.name = name
        self.description = (
            "View, create and edit text files. `view` shows a file with line numbers, or a folder; `create` writes a "
            "new file; `str_replace` replaces `old_str`, which must occur exactly once, by `new_str`; `insert` puts "
            "`insert_text` after line `insert_line` (0: at the beginning); `undo_edit` takes back the last change of "
            "a file."
        )
        self.parameters = {
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": list(NEEDS)},
                "path": {"type": "string", "description": "The file, absolute or from the workspace"},
                "file_text": {"type": "string", "description": "create: the whole text"},
                "old_str": {
                    "type": "string",
                    "description": "str_replace: the exact text, with enough lines around it",
                },
                "new_str": {
                    "type": "string",
                    "description": "str_replace: what stands there instead; default: nothing",
                },
                "insert_line": {"type": "integer", "minimum": 0, "description": "insert: after which line"},
                "insert_text": {"type": "string", "description": "insert: the lines"},
                "view_range": {
                    "type": "array",
                    "items": {"type": "integer"},
                    "minItems": 2,
                    "maxItems": 2,
                    "description": "view: first and last line; -1: to the end",
                },
            },
            "required": ["command", "path"],
            "additionalProperties": False,
        }
        self._max_bytes = max_file_kb << 10
        self._output_chars = output_chars
        self._root = root

    async def open(self, context: ToolContext) -> OpenTool:
        sandbox = need_sandbox(context, f"tool {self.name!r}")
        return _OpenEditor(sandbox, self._root, self._max_bytes, self._output_chars)


class _Change(NamedTuple):
    """What an edit did to a file."""

    before: str | None
    """None: there was no file."""
    after: bytes


class _OpenEditor:
    """One episode's editor, with what it has changed."""

    def __init__(self, sandbox: Sandbox, root: str | None, max_bytes: int, output_chars: int) -> None:
        self._sandbox = sandbox
        self._root = None if root is None else posixpath.normpath(posixpath.join(sandbox.workspace, root))
        self._max_bytes = max_bytes
        self._output_chars = output_chars
        self._undo: dict[str, list[_Change]] = {}
        """Changes by path, latest last."""
        self._turn = asyncio.Lock()

    async def call(self, arguments: Arguments) -> ToolResult:
        command = arguments["command"]
        missing = [name for name in NEEDS[command] if name not in arguments]
        if missing:
            return ToolResult(f"{command} needs {', '.join(missing)}", success=False)
        try:
            path = await self._path(arguments["path"])
            async with self._turn:
                text = await getattr(self, f"_{command}")(path, arguments)
        except EditError as error:
            return ToolResult(str(error), success=False)
        except OSError as error:
            return ToolResult(f"{arguments['path']}: {error.strerror or error}", success=False)
        return ToolResult(shorten(text, self._output_chars), data={"path": path})

    async def close(self) -> None:
        """The sandbox goes with the episode."""

    async def _path(self, given: str) -> str:
        path = posixpath.normpath(posixpath.join(self._sandbox.workspace, given))
        if not given.strip() or "\0" in given:
            raise EditError("path: name a file")
        if self._root is not None:
            real = await self._real(path)
            if not (real == self._root or real.startswith(self._root.rstrip("/") + "/")):
                raise EditError(f"{given}: only files below {self._root} may be touched")
        return path

    async def _real(self, path: str) -> str:
        """Where a path leads, also if it or its folders don't exist yet."""
        result = await self._sandbox.exec(["readlink", "-f", "--", path])
        if result.exit_code == 0:
            return result.stdout.decode("utf-8", "replace").removesuffix("\n")
        if path == "/" or (await self._sandbox.exec(["test", "-L", path])).exit_code == 0:
            raise EditError(f"{path} leads to no file")
        folder, name = posixpath.split(path)
        return posixpath.join(await self._real(folder), name)

    # ------------------------------------------------------------ commands

    async def _view(self, path: str, arguments: Arguments) -> str:
        try:
            text = await self._text(path)
        except IsADirectoryError:
            return await self._folder(path)
        lines = text.split("\n")
        if lines[-1] == "" and len(lines) > 1:
            lines.pop()  # a newline ends the last line; it doesn't begin another
        first, last = arguments.get("view_range", (1, -1))
        last = len(lines) if last == -1 else last
        if not 1 <= first <= len(lines) or not first <= last:
            raise EditError(f"view_range: {path} has lines 1 to {len(lines)}; [{first}, {last}] is none of it")
        return _numbered(lines[first - 1 : last], first)

    async def _create(self, path: str, arguments: Arguments) -> str:
        if await self._content(path) is not None:
            raise EditError(f"{path} exists already: edit it with str_replace or insert, or choose another path")
        await self._write(path, arguments["file_text"], None)
        return f"created {path} ({len(arguments['file_text'])} characters)"

    async def _str_replace(self, path: str, arguments: Arguments) -> str:
        text = await self._text(path)
        old, new = arguments["old_str"], _with_ends_of(text, arguments.get("new_str", ""))
        if old not in text:
            old = _with_ends_of(text, old)
        if not old:
            raise EditError("old_str is empty: give the text to replace, or use insert")
        count = text.count(old)
        if count == 0:
            raise EditError(f"old_str does not occur in {path}. It must match exactly, spaces included")
        if count > 1 or text.find(old, text.find(old) + 1) >= 0:
            raise EditError(f"old_str occurs several times in {path}: include more lines around it")
        start = text.index(old)
        await self._write(path, text[:start] + new + text[start + len(old) :], text)
        return f"{path} now reads:\n{_around(text[:start] + new + text[start + len(old) :], start, len(new))}"

    async def _insert(self, path: str, arguments: Arguments) -> str:
        text = await self._text(path)
        lines = _split(text)
        end = "\r\n" if _all_crlf(text) else "\n"
        line, added = arguments["insert_line"], _with_ends_of(text, arguments["insert_text"])
        if line > len(lines):
            raise EditError(f"insert_line: {path} has {len(lines)} lines; {line} is beyond them")
        before, after = "".join(lines[:line]), "".join(lines[line:])
        if before and not before.endswith("\n"):  # the last line has no newline: it gets one, the new end has none
            before, added = before + end, added.removesuffix(end)
        elif added and not added.endswith("\n"):
            added += end
        await self._write(path, before + added + after, text)
        return f"{path} now reads:\n{_around(before + added + after, len(before), len(added))}"

    async def _undo_edit(self, path: str, arguments: Arguments) -> str:
        if not self._undo.get(path):
            raise EditError(f"{path}: there is no change of yours to take back")
        earlier, after = self._undo[path][-1]
        if await self._content(path) != after:
            raise EditError(
                f"{path} was changed by something else since your last change, which can't be taken back without "
                "losing that: edit it instead"
            )
        if earlier is None:
            await self._sandbox.exec(["rm", "-f", "--", path])
            self._undo[path].pop()
            return f"{path} is gone again: it was created by the change that was taken back"
        await self._sandbox.write(path, _bytes(earlier))
        self._undo[path].pop()
        return f"took back the last change of {path}"

    # ------------------------------------------------------------ files

    async def _text(self, path: str) -> str:
        content = await self._content(path)
        if content is None:
            raise EditError(f"there is no file {path}: `view` its folder to see what there is")
        if len(content) > self._max_bytes:
            raise EditError(f"{path} has {len(content)} bytes, more than {self._max_bytes}: use another tool")
        if b"\0" in content:
            raise EditError(f"{path} is a binary file")
        return content.decode("utf-8", "surrogateescape")

    async def _content(self, path: str) -> bytes | None:
        """None: there is no file."""
        try:
            return await self._sandbox.read(path)
        except FileNotFoundError:
            return None

    async def _write(self, path: str, text: str, before: str | None) -> None:
        content = _bytes(text)
        if len(content) > self._max_bytes:
            raise EditError(f"{path} would have {len(content)} bytes; at most {self._max_bytes} are allowed")
        await self._sandbox.write(path, content)
        history = self._undo.setdefault(path, [])
        history.append(_Change(before, content))
        del history[:-UNDO_STEPS]

    async def _folder(self, path: str) -> str:
        """Two levels of a folder, without what is hidden."""
        line = ["find", path, "-mindepth", "1", "-maxdepth", "2", "-name", ".*", "-prune", "-o"]
        folders = await self._sandbox.exec([*line, "-type", "d", "-print"], timeout=20)
        others = await self._sandbox.exec([*line, "!", "-type", "d", "-print"], timeout=20)
        if folders.exit_code and not folders.stdout + others.stdout:
            raise EditError(f"{path} can't be listed: {folders.stderr.decode('utf-8', 'replace').strip()}")
        entries = sorted(
            [f"{name}/" for name in folders.stdout.decode("utf-8", "replace").splitlines()]
            + others.stdout.decode("utf-8", "replace").splitlines()
        )
        more = [f"… and {len(entries) - LISTED} more"] if len(entries) > LISTED else []
        return "\n".join([path.rstrip("/") + "/", *entries[:LISTED], *more])


def _bytes(text: str) -> bytes:
    """Text from a file, with its bytes that are no UTF-8 as they were; text from a model, without half characters."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise EditError("the text holds half of a surrogate pair, which no file can hold") from error


def _all_crlf(text: str) -> bool:
    return 0 < text.count("\n") == text.count("\r\n")


def _with_ends_of(text: str, written: str) -> str:
    """What a model wrote, with the line ends of `text`: it sees no difference, and writes none."""
    return written.replace("\n", "\r\n") if _all_crlf(text) and "\r" not in written else written


def _split(text: str) -> list[str]:
    """Lines with their ends; only `\\n` ends one."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _numbered(lines: list[str], first: int) -> str:
    shown = (line.encode("utf-8", "replace").decode() for line in lines)
    return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(shown, first))


def _around(text: str, start: int, length: int) -> str:
    """The lines of a change, and some around them."""
    lines = text.split("\n")
    first = max(0, text.count("\n", 0, start) - AROUND)
    last = text.count("\n", 0, start + length) + AROUND + 1
    return _numbered(lines[first:last], first + 1)
