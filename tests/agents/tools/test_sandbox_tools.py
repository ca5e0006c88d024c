"""bash, python, file_editor and search, in a real sandbox."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet.agents.tools import ToolContext, ToolResult, Toolset, ToolSetupError, make_tools
from ajet.environment.sandboxes import Sandbox, SandboxSettings, open_sandbox

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")

Call = Callable[..., Awaitable[ToolResult]]


SETTINGS = SandboxSettings(memory_mb=256, disk_mb=32, exec_seconds=30)


def using(
    specs: list[Any], use: Callable[[Call, Sandbox], Awaitable[None]], confined: SandboxSettings = SETTINGS
) -> None:
    async def main() -> None:
        async with (
            open_sandbox(confined) as sandbox,
            Toolset(make_tools(specs), ToolContext(sandbox=sandbox)) as toolset,
        ):

            async def call(name: str, **arguments: Any) -> ToolResult:
                return await toolset.call(name, arguments)

            await use(call, sandbox)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["bash", "python", "file_editor", "search"])
def test_without_a_sandbox_they_refuse(name: str) -> None:
    async def main() -> None:
        async with Toolset(make_tools([name])):
            pass

    with pytest.raises(ToolSetupError, match=f"tool '{name}' needs a sandbox: set ajet.rollout.sandbox"):
        asyncio.run(main())


# ------------------------------------------------------------ bash


def test_bash_keeps_folder_and_variables() -> None:
    async def use(call: Call, sandbox: Sandbox) -> None:
        async def bash(command: str) -> str:
            return (await call("bash", command=command)).output

        assert await bash("mkdir -p 'a b' && cd 'a b' && export X='1 2'; Y=3") == "[no output]"
        assert await bash('pwd; echo "$X$Y"') == "/workspace/a b\n1 2"
        assert await bash("cd ..; exit 4") == "[exit code 4]"
        assert await bash("pwd") == "/workspace"
        assert "syntax error" in await bash("if then")
        assert await bash("echo fine") == "fine"
        assert "command not found" in await bash("no-such-program")
        await bash("mkdir gone; cd gone; rmdir ../gone")
        assert await bash("pwd") == "/workspace\nthe working directory is gone; this is /workspace"
        assert await bash("pwd") == "/workspace"

    using(["bash"], use)


def test_bash_goes_on_after_a_trap_or_a_path_without_programs() -> None:
    async def use(call: Call, sandbox: Sandbox) -> None:
        async def bash(command: str) -> str:
            return (await call("bash", command=command)).output

        assert await bash("mkdir a; cd a; export X=1; trap 'echo bye' EXIT; set -C") == "bye"
        assert await bash("pwd; echo $X") == "/workspace/a\n1", "its own trap loses neither folder nor variables"
        assert await bash("export PATH=/nowhere; cd ..") == "[no output]"
        assert await bash("pwd") == "/workspace", "nothing but what the shell has itself is needed"
        assert "more than 120000 bytes" in await bash("echo " + "x" * 130_000)

    using(["bash"], use)


def test_bash_says_what_went_wrong() -> None:
    async def use(call: Call, sandbox: Sandbox) -> None:
        result = await call("bash", command="echo out; echo err >&2; false")
        assert result.output == "out\nerr\n[exit code 1]" and not result.success
        assert result.data["stdout"] == "out\n" and result.data["exit_code"] == 1
        result = await call("bash", command="echo begun; cd /tmp; sleep 60", timeout=1)
        assert result.output.startswith("begun\n[stopped after 1 s") and not result.success
        result = await call("bash", command="head -c 100000000 /dev/zero | tr '\\0' a")
        assert len(result.output) < 20_000 and "left out" in result.output
        assert (await call("bash", command="head -c 1000 /dev/zero")).output == "[1000 bytes of binary data]"
        assert (await call("bash", command="printf '\\377x'")).output == "\ufffdx"
        assert not (await call("bash", command="true", timeout=0)).success
        assert "NUL" in (await call("bash", command="echo \0")).output

    using(["bash"], use)


# ------------------------------------------------------------ python


@pytest.mark.slow
def test_python_runs_programs() -> None:
    async def use(call: Call, sandbox: Sandbox) -> None:
        assert (await call("python", code="print(6*7)")).output == "42"
        failed = await call("python", code="x = 1\nraise ValueError('bad')")
        assert not failed.success and "line 2" in failed.output and failed.output.endswith("[exit code 1]")
        assert "print the result" in (await call("python", code="6*7")).output
        endless = await call("python", code="while True: pass")
        assert endless.output == "[stopped after 2 s]"

    using([{"python": {"timeout": 2}}], use)


# ------------------------------------------------------------ file editor


def test_editing() -> None:
    async def use(call: Call, sandbox: Sandbox) -> None:
        async def edit(command: str, path: str = "x.py", **arguments: Any) -> str:
            return (await call("file_editor", command=command, path=path, **arguments)).output

        assert "created /workspace/x.py" in await edit("create", file_text="a\nb\nc")
        assert "exists already" in await edit("create", file_text="")
        assert await edit("view") == "     1\ta\n     2\tb\n     3\tc"
        assert await edit("view", view_range=[2, -1]) == "     2\tb\n     3\tc"
        assert "lines 1 to 3" in await edit("view", view_range=[5, 6])
        assert "     2\tB" in await edit("str_replace", old_str="b", new_str="B")
        assert "does not occur" in await edit("str_replace", old_str="b")
        assert "needs old_str" in await edit("str_replace")
        await edit("insert", insert_line=3, insert_text="d")
        assert await sandbox.read("x.py") == b"a\nB\nc\nd", "it had no newline at the end, and has none"
        await edit("insert", insert_line=0, insert_text="top")
        assert "has 5 lines; 9 is beyond" in await edit("insert", insert_line=9, insert_text="x")
        for expected in (b"a\nB\nc\nd", b"a\nB\nc", b"a\nb\nc"):
            await edit("undo_edit")
            assert await sandbox.read("x.py") == expected
        assert "is gone again" in await edit("undo_edit")
        assert "no change of yours" in await edit("undo_edit")
        assert "there is no file" in await edit("view")
        await sandbox.write("twice", b"aaa")
        assert "several times" in await edit("str_replace", "twice", old_str="aa", new_str="b")
        await sandbox.write("binary", b"\0\1")
        assert "binary file" in await edit("view", "binary")
        await sandbox.write("folder/inner/deep/x", b"")
        assert (
            await edit("view", "folder")
            == "/workspace/folder/\n/workspace/folder/inner/\n/workspace/folder/inner/deep/"
        )
        assert "Read-only" in await edit("create", "/usr/x", file_text="x")
        assert "is not one of" in await edit("delete")

    using(["file_editor"], use)


def test_what_is_not_edited_keeps_its_bytes() -> None:
    async def use(call: Call, sandbox: Sandbox) -> None:
        content = b"\tone\r\n\xff\xfe two\x0b\xe2\x80\xa8\r\nthree  "
        await sandbox.write("x", content)
        assert (await call("file_editor", command="str_replace", path="x", old_str="one", new_str="1")).success
        assert await sandbox.read("x") == content.replace(b"one", b"1")
        assert (await call("file_editor", command="insert", path="x", insert_line=1, insert_text="new\r\n")).success
        assert await sandbox.read("x") == content.replace(b"one", b"1").replace(b"1\r\n", b"1\r\nnew\r\n")
        assert "surrogate" in (await call("file_editor", command="create", path="y", file_text="\ud800")).output

    using(["file_editor"], use)


def test_lines_that_end_with_crlf_stay_so() -> None:
    async def use(call: Call, sandbox: Sandbox) -> None:
        await sandbox.write("x", b"a\r\nb\r\nc\r\n")
        edited = await call("file_editor", command="str_replace", path="x", old_str="a\nb", new_str="1\n2\n3")
        assert edited.success, edited.output
        await call("file_editor", command="insert", path="x", insert_line=4, insert_text="d")
        assert await sandbox.read("x") == b"1\r\n2\r\n3\r\nc\r\nd\r\n"

    using(["file_editor"], use)


def test_undo_loses_no_change_of_others() -> None:
    async def use(call: Call, sandbox: Sandbox) -> None:
        await call("file_editor", command="create", path="x", file_text="a\n")
        await sandbox.exec("echo b >> x")
        taken_back = await call("file_editor", command="undo_edit", path="x")
        assert not taken_back.success and "changed by something else" in taken_back.output
        assert await sandbox.read("x") == b"a\nb\n"

    using(["file_editor"], use)


def test_a_hidden_folder_can_be_viewed() -> None:
    async def use(call: Call, sandbox: Sandbox) -> None:
        await sandbox.write(".github/ci.yml", b"")
        await sandbox.write(".github/.secret", b"")
        shown = (await call("file_editor", command="view", path=".github")).output
        assert shown == "/workspace/.github/\n/workspace/.github/ci.yml"
        assert (await call("file_editor", command="view", path=".")).output == "/workspace/"

    using(["file_editor"], use)


def test_only_below_the_root() -> None:
    async def use(call: Call, sandbox: Sandbox) -> None:
        await sandbox.exec("mkdir in; ln -s /tmp in/out; echo x > /tmp/x")
        for path in ("../tmp/x", "/tmp/x", "in/out/x", "inside", "in/../../tmp/x"):
            assert "only files below /workspace/in" in (await call("file_editor", command="view", path=path)).output
        assert (await call("file_editor", command="create", path="in/y", file_text="")).success

    using([{"file_editor": {"root": "in"}}], use)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1), st.data())
@settings(max_examples=25, deadline=None)
def test_any_edit_can_be_taken_back(text: str, data: st.DataObject) -> None:
    old = data.draw(st.integers(0, len(text) - 1).map(lambda at: text[at : at + 5]))
    new = data.draw(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20))

    async def use(call: Call, sandbox: Sandbox) -> None:
        await sandbox.write("x", text.encode())
        result = await call("file_editor", command="str_replace", path="x", old_str=old, new_str=new)
        if result.success:
            if "\r\n" in text:  # what is written may get its line ends
                return
            assert await sandbox.read("x") == text.replace(old, new, 1).encode()
            await call("file_editor", command="undo_edit", path="x")
        assert await sandbox.read("x") == text.encode()

    using(["file_editor"], use)


# ------------------------------------------------------------ search


@pytest.fixture(params=["ripgrep", "GNU grep", "busybox"])
def programs(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder for PATH with one way to search."""
    names = {"ripgrep": ["rg", "find"], "GNU grep": ["grep", "find", "readlink", "test"], "busybox": ["busybox"]}
    for name in names[request.param]:
        if (program := shutil.which(name)) is None:
            pytest.skip(f"needs {name}")
        (tmp_path / name).symlink_to(program)
    if request.param == "busybox":
        for name in ("grep", "find", "readlink", "test"):
            (tmp_path / name).symlink_to(tmp_path / "busybox")
    tmp_path.chmod(0o755)
    return str(tmp_path)


def with_programs(folder: str) -> SandboxSettings:
    return SandboxSettings(memory_mb=256, disk_mb=32, read_only=(folder,), environment={"PATH": folder})


def test_searching(programs: str) -> None:
    async def use(call: Call, sandbox: Sandbox) -> None:
        async def search(**arguments: Any) -> str:
            return (await call("search", **arguments)).output

        await sandbox.write("src/a.py", b"def f(x):\n    return x\nF(1)\n")
        await sandbox.write("src/b.txt", b"f(x) again\n")
        await sandbox.write("node_modules/f.js", b"f(x)\n")
        assert await search(pattern="f(x)") == "/workspace/src/a.py:1:def f(x):\n/workspace/src/b.txt:1:f(x) again"
        assert await search(pattern="f(x)", file_pattern="*.py") == "/workspace/src/a.py:1:def f(x):"
        assert await search(pattern=r"^f\(", regex=True) == "/workspace/src/b.txt:1:f(x) again"
        assert "a.py:3:F(1)" in await search(pattern="f(", case_sensitive=False)
        assert "a.py-2-    return x" in await search(pattern="def", context_lines=1)
        assert await search(pattern="absent") == "No line matches in /workspace."
        assert "plain text" in await search(pattern="(", regex=True)
        for long in ({"pattern": "[" * 3_000_000}, {"pattern": "x", "file_pattern": "[" * 3_000_000}):
            assert await search(**long, regex=True) == "a pattern may have at most 4000 characters"
        assert "o such file" in await search(pattern="x", path="nowhere")
        assert await search(pattern="$(touch /tmp/x); `id`", path="src") == "No line matches in /workspace/src."
        assert await search(pattern="--version") == "No line matches in /workspace."
        assert await search(pattern="a.p", target="files") == "/workspace/src/a.py"
        assert await search(pattern="*.TXT", target="files", case_sensitive=False) == "/workspace/src/b.txt"
        await sandbox.write("src/sub/c+.py", b"TWO 2\n")
        await sandbox.write("src/sub/deep/d.py", b"two 2\n")
        two = "/workspace/src/sub/c+.py:1:TWO 2"
        assert await search(pattern="2", file_pattern="sub/*.py") == two
        assert await search(pattern="2", file_pattern="/workspace/src/sub/*.py") == two
        assert await search(pattern="2", file_pattern="[!d]+.{txt,py}", path="src") == two
        assert await search(pattern="TWO", file_pattern="src/**/*.p?") == two
        assert await search(pattern="f(x)", file_pattern="*.{js,txt}") == "/workspace/src/b.txt:1:f(x) again"
        assert await search(pattern=r"^\w+\s\d$", regex=True, file_pattern="c*") == two
        ignoring = await search(pattern="(?i)two", regex=True, file_pattern="c*")
        assert ignoring == two or ("busybox" in programs and "grep knows no '(?'" in ignoring)
        assert await search(pattern="f(x)", file_extensions=["py", ".js"]) == "/workspace/src/a.py:1:def f(x):"
        assert await search(pattern="f(x)", file_extensions=["txt"]) == "/workspace/src/b.txt:1:f(x) again"
        assert "without file_pattern" in await search(pattern="x", file_extensions=["py"], file_pattern="a*")
        found = (await call("search", pattern="F(", case_sensitive=False, context_lines=1, path="src/a.py")).data
        assert [(each["line"], each["column"]) for each in found["matches"]] == [(1, 5), (3, 1)]
        await sandbox.write("many", b"line\n" * 1000)
        assert (await search(pattern="line")).endswith("[900 more lines: narrow the search]")
        await sandbox.write("long", b"needle" + b"x" * 100_000)
        assert len(await search(pattern="needle")) < 3000

    using(["search"], use, with_programs(programs))


def test_a_regular_expression_that_ripgrep_takes_runs_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "rg").write_text(f"#!/bin/sh\necho '/workspace/x:1:{'a' * 60}b a'\n")
    (tmp_path / "rg").chmod(0o755)

    async def use(call: Call, sandbox: Sandbox) -> None:
        found = await call("search", pattern="(a+)+$", regex=True)  # it would take Python years
        assert [(each["line"], each["column"]) for each in found.data["matches"]] == [(1, None)]

    using(["search"], use, SandboxSettings(kind="none", network="host", environment={"PATH": str(tmp_path)}))


def test_a_folder_is_shown_with_any_find(programs: str) -> None:
    async def use(call: Call, sandbox: Sandbox) -> None:
        await sandbox.write("src/sub/a.py", b"")
        shown = await call("file_editor", command="view", path="src")
        assert shown.output == "/workspace/src/\n/workspace/src/sub/\n/workspace/src/sub/a.py"

    using(["file_editor"], use, with_programs(programs))


def test_a_folder_that_cant_be_listed_is_no_empty_one(tmp_path: Path) -> None:
    async def use(call: Call, sandbox: Sandbox) -> None:
        shown = await call("file_editor", command="view", path=".")
        assert not shown.success and "can't be listed: find: " in shown.output

    using(["file_editor"], use, with_programs(str(tmp_path)))


def test_a_search_says_what_it_left_out() -> None:
    async def use(call: Call, sandbox: Sandbox) -> None:
        async def search(**arguments: Any) -> str:
            return (await call("search", **arguments)).output

        await sandbox.exec("mkdir -p src/sub locked; touch src/sub/m.py; echo needle > src/x; chmod 000 locked")
        assert await search(pattern="sub/m.py", target="files", path="src") == "/workspace/src/sub/m.py"
        for target in ("text", "files"):
            said = await search(pattern="absent", target=target)
            assert "matches in /workspace." in said and "can't be read" in said
        assert (await search(pattern="needle")).splitlines()[0] == "/workspace/src/x:1:needle"
        await sandbox.exec("yes line | head -c 3000000 > many")
        assert "some lines are missing" in await search(pattern="line")

    using(["search"], use)


def test_a_search_that_is_stopped_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from ajet.agents.tools import search as module

    async def use(call: Call, sandbox: Sandbox) -> None:
        await sandbox.write("x", b"needle\n")
        execute = type(sandbox).exec

        async def slow(self: Sandbox, command: Any, **options: Any) -> Any:
            """The program itself, that finds one thing and then goes on for ever."""
            if "needle" in command:
                command = ["sh", "-c", "echo /workspace/x:1:needle; sleep 600"]
            return await execute(self, command, **options)

        monkeypatch.setattr(type(sandbox), "exec", slow)
        monkeypatch.setattr(module, "TIMEOUT_S", 0.5)
        said = (await call("search", pattern="needle")).output
        assert said.startswith("/workspace/x:1:needle\n[stopped after 0.5 s: not everything was searched")

    using(["search"], use)
