"""What a sandbox promises, in each way that it can be made."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ajet
from ajet.environment.sandboxes import (
    Sandbox,
    SandboxError,
    SandboxSettings,
    bubblewrap,
    bubblewrap_arguments,
    check_sandbox,
    open_sandbox,
)
from ajet.environment.sandboxes.cgroups import Cgroup, _parents, sweep
from ajet.environment.sandboxes.forwarder import MOST_CONNECTIONS, Forwarder
from ajet.environment.sandboxes.sandbox import Input
from support.bubblewrap_here import needs_bubblewrap

pytestmark = needs_bubblewrap
SMALL = SandboxSettings(memory_mb=128, disk_mb=8, processes=24, exec_seconds=20, output_bytes=20_000)
CGROUP: dict[str, Any] = {"memory_mb": 64, "processes": 8, "cpus": 1.0}
T = TypeVar("T")


def within(use: Callable[[Sandbox], Awaitable[T]], given_settings: SandboxSettings = SMALL, **options: Any) -> T:
    async def main() -> T:
        async with open_sandbox(given_settings, **options) as sandbox:
            return await use(sandbox)

    return asyncio.run(main())


def processes_with(mark: str) -> list[int]:
    """Processes of this machine, sandboxes included, whose command line holds the mark."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in place.read_bytes():
                found.append(int(place.parent.name))
    return found


def gone(mark: str) -> bool:
    give_up = time.monotonic() + 20
    while processes_with(mark):
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def appear(mark: str) -> None:
    """Wait for a process with this mark: a shell that has started it may answer before the program runs."""
    give_up = time.monotonic() + 20
    while not processes_with(mark):
        assert time.monotonic() < give_up, f"no process with {mark!r} appeared"
        time.sleep(0.02)


@pytest.fixture
def mark() -> str:
    return f"97{time.monotonic_ns()}"


def test_commands_run_in_the_workspace(mode: str) -> None:
    async def use(sandbox: Sandbox) -> None:
        result = await sandbox.exec("pwd; echo err >&2; exit 3")
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"/workspace\n", b"err\n")
        assert (await sandbox.exec(["printf", "%s", "a b;$HOME"])).stdout == b"a b;$HOME"
        assert (await sandbox.exec("cat", stdin=b"x" * 100_000)).truncated
        assert (await sandbox.exec("echo $HOME $X $PATH", env={"X": "7"})).stdout.startswith(b"/tmp 7 /usr/local")
        assert (await sandbox.exec("mkdir -p a/b && cd a/b && pwd")).stdout == b"/workspace/a/b\n"
        assert (await sandbox.exec("pwd", cwd="a")).stdout == b"/workspace/a\n"
        assert (
            await sandbox.exec("pwd", cwd="nowhere")
        ).stderr == b"cannot work in /workspace/nowhere: No such file or directory\n"
        assert (await sandbox.exec(["no-such-program"])).exit_code == 127
        assert (await sandbox.exec(["/etc/passwd"])).exit_code == 126
        assert (await sandbox.exec("kill -9 $$")).exit_code == 137
        assert set(sandbox.limits) >= {"memory", "processes", "network"}

    within(use)


def test_files_arrive_byte_for_byte(mode: str) -> None:
    async def use(sandbox: Sandbox) -> None:
        content = bytes(range(256)) * 1000
        await sandbox.write("deep/er/a b.bin", content)
        assert await sandbox.read("/workspace/deep/er/a b.bin") == content
        await sandbox.write("deep/er/a b.bin", b"")
        assert await sandbox.read("deep/er/a b.bin") == b""
        await sandbox.exec("printf x > run.sh; chmod 755 run.sh; ln -s run.sh link")
        await sandbox.write("link", b"y")
        assert (
            await sandbox.exec("stat -c %a:%F run.sh link; cat run.sh")
        ).stdout == b"755:regular file\n777:symbolic link\ny"
        for path, error in {
            "none": FileNotFoundError,
            "": FileNotFoundError,
            "deep": IsADirectoryError,
            "/dev/zero": PermissionError,
            "/proc/1/environ": PermissionError,
            "run.sh/x": FileNotFoundError,
        }.items():
            with pytest.raises(error):
                await sandbox.read(path)
        with pytest.raises(OSError, match="Read-only"):
            await sandbox.write("/usr/x", b"")
        with pytest.raises(IsADirectoryError):
            await sandbox.write("deep", b"")
        with pytest.raises(NotADirectoryError):
            await sandbox.write("run.sh/x", b"")
        with pytest.raises(OSError, match="too long"):
            await sandbox.write("x" * 256, b"")
        await sandbox.exec(
            "truncate -s 1T huge 2>/dev/null || dd if=/dev/zero of=huge bs=1 count=0 seek=7M; mkfifo pipe"
        )
        with pytest.raises(PermissionError):
            await sandbox.read("pipe")

    within(use)


@given(st.binary(max_size=3000))
@settings(max_examples=15, deadline=None)
def test_any_bytes_can_be_written(content: bytes) -> None:
    async def use(sandbox: Sandbox) -> bytes:
        await sandbox.write("x", content)
        return await sandbox.read("x")

    assert within(use) == content


def test_a_full_disk_loses_nothing(mode: str) -> None:
    async def use(sandbox: Sandbox) -> None:
        await sandbox.write("x", b"old")
        with pytest.raises(OSError, match="No space"):
            await sandbox.write("x", b"n" * (9 << 20))
        assert await sandbox.read("x") == b"old"
        assert (await sandbox.exec("ls -A")).stdout == b"x\n"

    within(use)


@pytest.mark.slow
def test_a_time_limit_ends_the_command_and_its_children(mode: str, mark: str) -> None:
    async def use(sandbox: Sandbox) -> None:
        await sandbox.exec(f"sleep {mark}1 >/dev/null 2>&1 &")
        line = f"echo begun; (setsid sleep {mark}2 &); sleep {mark}2 & sleep {mark}2"
        result = await sandbox.exec(line, timeout=4)
        assert result.exit_code == 124 and result.timed_out and result.stdout == b"begun\n"
        assert gone(f"{mark}2")
        appear(f"sleep\0{mark}1")  # what ran before goes on
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"

    within(use)
    assert gone(mark)


def test_cancelling_ends_the_command(mode: str, mark: str) -> None:
    async def use(sandbox: Sandbox) -> None:
        running = asyncio.create_task(sandbox.exec(f"sleep {mark}"))
        while not processes_with(mark):
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert gone(mark)
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"

    within(use)


def test_endless_output_is_read_and_cut() -> None:
    async def use(sandbox: Sandbox) -> None:
        result = await sandbox.exec("head -c 100000000 /dev/zero; echo end")
        assert result.truncated and result.exit_code == 0 and len(result.stdout) < 21_000
        assert result.stdout.endswith(b"end\n") and b"bytes left out" in result.stdout
        seen = bytearray()
        result = await sandbox.exec("echo one; echo two >&2", on_output=seen.extend)
        assert sorted(seen.split()) == [b"one", b"two"]

    within(use)


def test_a_background_process_keeps_no_one_waiting(mark: str) -> None:
    async def use(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(f"sleep {mark} & echo done")).stdout == b"done\n"

    within(use)
    assert gone(mark)


def test_what_a_command_leaves_behind_is_limited_too(mode: str) -> None:
    hog = "import os, time; held = b'x' * 70_000_000; time.sleep(1); open(str(os.getpid()), 'w').close(); time.sleep(9)"

    async def run() -> int:
        async with open_sandbox(SandboxSettings(memory_mb=100, disk_mb=8)) as sandbox:
            await sandbox.write("hog.py", hog.encode())
            await sandbox.exec("for one in 1 2 3 4; do setsid python3 hog.py >/dev/null 2>&1 & done")
            await asyncio.sleep(3)  # no command runs
            return len((await sandbox.exec("ls | grep -v hog")).stdout.split())

    assert asyncio.run(run()) <= 2


def test_background_processes_can_be_ended(mode: str, mark: str) -> None:
    async def use(sandbox: Sandbox) -> None:
        await sandbox.exec(f"echo kept > file; setsid sleep {mark} >/dev/null & sleep {mark} >/dev/null &")
        await sandbox.end_processes()
        assert gone(mark)
        assert await sandbox.read("file") == b"kept\n"

    within(use)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_node_finds_what_it_needs() -> None:
    async def use(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["node", "-e", "console.log(require('crypto').randomBytes(2).length)"])
        assert (result.stdout, result.stderr) == (b"2\n", b"")

    within(use, replace(SMALL, memory_mb=512, processes=64))


def test_what_the_callers_function_raises_ends_the_command() -> None:
    def fails(chunk: bytes) -> None:
        raise KeyError("mine")

    async def use(sandbox: Sandbox) -> None:
        with pytest.raises(KeyError, match="mine"):
            await sandbox.exec("yes", on_output=fails)

    within(use)


def test_input_that_is_written_while_the_command_runs() -> None:
    async def use(sandbox: Sandbox) -> None:
        written = Input()
        heard: list[bytes] = []

        def hear(piece: bytes) -> None:
            heard.append(piece)
            if len(heard) == 1:
                written.write(b"x" * (1 << 20))
                written.close()

        written.write(b"a\n")
        done = await sandbox.exec('read -r line; echo "$line"; wc -c', stdin=written, on_output=hear)
        assert (done.exit_code, done.stdout) == (0, b"a\n1048576\n")

    within(use)


def test_a_full_disk_takes_no_memory_from_processes(mode: str) -> None:
    async def use(sandbox: Sandbox) -> None:
        await sandbox.exec("for place in . /tmp /dev/shm; do cat /dev/zero > $place/zeros; done")
        done = await sandbox.exec(["python3", "-c", "print(len(bytearray(24 << 20)))"])
        assert (done.exit_code, done.stdout) == (0, b"25165824\n")

    within(use, SandboxSettings(memory_mb=48, disk_mb=48))


EMPTY_FILES = """
import os
for number in range(300_000):
    os.close(os.open(f"x{number}", os.O_CREAT | os.O_WRONLY))
"""


def test_empty_files_are_limited(mode: str) -> None:
    async def use(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["python3", "-c", EMPTY_FILES])
        assert result.exit_code in (1, 137), "ended by the limit, or told that there is no room"
        made = await sandbox.exec("find . -type f | wc -l; find . -delete")
        assert (made.exit_code, int(made.stdout) < 100_000) == (0, True)
        assert (await sandbox.exec("touch again; ls")).stdout == b"again\n"

    within(use, SandboxSettings(memory_mb=48, disk_mb=48))


AS_A_USER = """
import asyncio
from ajet.environment.sandboxes import SandboxSettings, open_sandbox

async def main():
    async with open_sandbox(SandboxSettings(memory_mb=64)) as sandbox:
        for name in ("INT", "HUP", "QUIT", "TERM", "KILL", "STOP", "USR1", "CHLD", "PIPE"):
            done = await sandbox.exec(f"kill -{name} 1; id -u")
            assert done.stdout == b"1000\\n", (name, done)

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="all other tests run as a user without privileges then")
def test_no_signal_ends_the_sandbox_of_a_user_without_privileges() -> None:
    line = ["unshare", "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-c", AS_A_USER]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_commands_run_side_by_side() -> None:
    async def use(sandbox: Sandbox) -> None:
        results = await asyncio.gather(*(sandbox.exec(f"echo {i}; cat", stdin=b"x" * i) for i in range(8)))
        assert [result.stdout for result in results] == [f"{i}\n{'x' * i}".encode() for i in range(8)]

    within(use)


def test_memory_is_limited(mode: str) -> None:
    async def use(sandbox: Sandbox) -> None:
        hungry = "b = []\nwhile True: b.append(bytearray(8 << 20))"
        result = await sandbox.exec(["python3", "-c", hungry])
        assert result.exit_code in (1, 137), "ended by the limit, or by Python as the limit was reached"
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"

    within(use)


@pytest.mark.slow
def test_processes_are_limited(mode: str) -> None:
    async def use(sandbox: Sandbox) -> None:
        result = await sandbox.exec("for i in $(seq 60); do sleep 5 & done 2>/dev/null; jobs -p | wc -l", timeout=4)
        assert result.exit_code != 0 or int(result.stdout) <= SMALL.processes
        await sandbox.end_processes()
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"

    within(use)


def test_a_file_that_can_not_be_written_for_too_many_processes_is_said(mode: str) -> None:
    async def use(sandbox: Sandbox) -> None:
        await sandbox.write("x", b"old")
        await sandbox.exec(["/bin/sh", "-c", "for i in $(seq 60); do sleep 60 >/dev/null 2>&1 & done"])
        with pytest.raises(BlockingIOError, match="temporarily unavailable"):
            await sandbox.write("x", b"new")
        assert await sandbox.read("x") == b"old"
        await sandbox.end_processes()
        await sandbox.write("x", b"new")
        assert await sandbox.read("x") == b"new"

    within(use)


def test_folders_can_be_shown_but_not_changed(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "x").write_text("seen")
    (tmp_path / "secret").write_text("hidden")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755)

    async def use(sandbox: Sandbox) -> None:
        assert await sandbox.read(f"{shown}/x") == b"seen"
        assert (await sandbox.exec(f"echo y > {shown}/x")).exit_code == 1
        assert (await sandbox.exec(f"cat {tmp_path}/secret")).exit_code == 1

    within(use, SandboxSettings(read_only=(str(shown),)))
    assert (shown / "x").read_text() == "seen"


def test_the_workspace_and_more_folders_can_be_elsewhere(mode: str) -> None:
    settings = SandboxSettings(memory_mb=64, disk_mb=4, workspace="/srv/my app", folders=("/tests", "/logs"))

    async def main() -> None:
        async with open_sandbox(settings) as sandbox:
            await sandbox.write("a/x", b"1")
            said = await sandbox.exec(
                "pwd; cat a/x; echo 2 > /tests/y && cat /tests/y; ls -A /logs; touch /srv/z", cwd=""
            )
            assert said.stdout == b"/srv/my app\n12\n" and b"Read-only" in said.stderr
            assert await sandbox.read("/tests/y") == b"2\n" and sandbox.workspace == "/srv/my app"
            full = await sandbox.exec("for i in 1 2; do head -c 3000000 /dev/zero > /logs/$i; done")
            assert b"No space" in full.stderr

    asyncio.run(main())


@pytest.mark.parametrize("workspace", ["/usr/src/app", "/etc", "/tmp", "app", "/a/../b", "/a:b"])
def test_a_workspace_that_cant_be_is_refused(workspace: str) -> None:
    with pytest.raises(SandboxError, match="sandbox workspace: "):
        check_sandbox(SandboxSettings(workspace=workspace))


def test_no_secret_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "sk-canary")

    async def use(sandbox: Sandbox) -> None:
        everything = await sandbox.exec("env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null")
        assert b"canary" not in everything.stdout and b"SHOWN=1" in everything.stdout

    within(use, SandboxSettings(environment={"SHOWN": "1"}))


def test_connections_to_the_gateway_are_bounded_and_further_ones_wait() -> None:
    async def run() -> None:
        reached = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal reached
            reached += 1
            writer.write(await reader.read())
            writer.close()

        gateway = await asyncio.start_server(answer, "127.0.0.1", 0)
        listener = socket.create_server(("127.0.0.1", 0))
        forwarder = Forwarder(f"http://127.0.0.1:{gateway.sockets[0].getsockname()[1]}/v1")
        await forwarder.serve(listener)
        opened = [await asyncio.open_connection(*listener.getsockname()) for _ in range(300)]
        while reached < MOST_CONNECTIONS:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        assert reached == MOST_CONNECTIONS
        for _, writer in opened:
            writer.write(b"served")
            writer.write_eof()
        answers = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in opened)), 30)
        assert answers == [b"served"] * 300
        for _, writer in opened:
            writer.close()
        forwarder.close()
        gateway.close()

    asyncio.run(run())


def test_only_the_gateway_is_reached() -> None:
    async def use_gateway() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.0 200 OK\r\n\r\nhello " + asked.split(b" ")[1])
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        other = await asyncio.start_server(answer, "127.0.0.1", 0)
        port, elsewhere = (each.sockets[0].getsockname()[1] for each in (server, other))
        ask = "import urllib.request as r, sys; print(r.urlopen(sys.argv[1], timeout=5).read().decode())"
        async with open_sandbox(SandboxSettings(network="gateway"), f"http://127.0.0.1:{port}/v1") as sandbox:
            assert sandbox.gateway_url == f"http://127.0.0.1:{port}/v1"
            result = await sandbox.exec(["python3", "-c", ask, f"{sandbox.gateway_url}/models"])
            assert result.stdout == b"hello /v1/models\n", result.stderr
            assert (await sandbox.exec(["python3", "-c", ask, f"http://127.0.0.1:{elsewhere}/"])).exit_code == 1
            assert (await sandbox.exec(["python3", "-c", ask, "http://192.0.2.1/"])).exit_code == 1
        server.close()
        other.close()

    asyncio.run(use_gateway())


@pytest.mark.parametrize("how", ["close", "kill from a thread", "first process"])
def test_a_closed_sandbox_says_so(how: str) -> None:
    async def main() -> None:
        sandbox = await open_sandbox(SMALL)
        running = asyncio.create_task(sandbox.exec("sleep 60"))
        await sandbox.exec("true")
        if how == "close":
            await sandbox.close()
        elif how == "kill from a thread":
            killer = threading.Thread(target=sandbox.kill)
            killer.start()
            await asyncio.to_thread(killer.join)
        else:
            process = sandbox._inner._process  # type: ignore[attr-defined]
            os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match=r"closed|ended"):
            await running
        with pytest.raises(SandboxError, match=r"closed|ended"):
            await sandbox.exec("true")
        await sandbox.close()
        await sandbox.close()

    asyncio.run(main())


def test_a_lifetime_ends_it(mark: str) -> None:
    async def use(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxError, match="lifetime_seconds"):
            await sandbox.exec(f"sleep {mark}")

    within(use, SandboxSettings(lifetime_seconds=0.5))
    assert gone(mark)


OWNER = """
import asyncio, sys
from ajet.environment.sandboxes import open_sandbox

async def main():
    sandbox = await open_sandbox()
    await sandbox.exec(f"setsid sleep {sys.argv[1]} >/dev/null 2>&1 &")
    print("ready", flush=True)
    await sandbox.exec(f"sleep {sys.argv[1]}")

asyncio.run(main())
"""


def test_nothing_is_left_when_the_owner_is_killed(mark: str) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, mark], stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
            appear(f"sleep\0{mark}")
        finally:
            owner.kill()
    assert gone(mark)
    sweep()
    assert not [folder for parent in _parents().values() for folder in parent.glob(f"ajet-sandbox-{owner.pid}-*")]


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="no '/no/where' here"):
        within(lambda sandbox: sandbox.exec("true"), SandboxSettings(read_only=("/no/where",)))
    with pytest.raises(SandboxError, match="there is no gateway here"):
        within(lambda sandbox: sandbox.exec("true"), SandboxSettings(network="gateway"))
    bubblewrap.probe.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        within(lambda sandbox: sandbox.exec("true"))
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho no permission to make namespaces >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.raises(SandboxError, match="this machine refuses it: no permission to make namespaces"):
        within(lambda sandbox: sandbox.exec("true"))
    monkeypatch.setattr(bubblewrap_arguments, "PROBE_S", 0.05)
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    with pytest.raises(SandboxError, match=r"bwrap can't be used: .*timed out"):
        within(lambda sandbox: sandbox.exec("true"))
    (tmp_path / "bwrap").write_text("#!/no/shell\n")
    with pytest.raises(SandboxError, match=r"bwrap can't be used: .*No such file"):
        within(lambda sandbox: sandbox.exec("true"))
    bubblewrap.probe.cache_clear()


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "chroot"},
        {"network": "all"},
        {"memory_mb": 0},
        {"cpus": float("nan")},
        {"exec_seconds": -1},
        {"environment": {"A=B": "x"}},
        {"read_only": ("relative",)},
        {"read_only": ("/",)},
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(SandboxError, match=f"sandbox {next(iter(wrong))}"):
        SandboxSettings(**wrong)


def test_no_cgroup_is_left(mode: str) -> None:
    before = {folder for parent in _parents().values() for folder in parent.glob("ajet-sandbox-*")}
    within(lambda sandbox: sandbox.exec("true"))
    after = {folder for parent in _parents().values() for folder in parent.glob(f"ajet-sandbox-{os.getpid()}-*")}
    assert not after - before


def test_cgroups_of_killed_owners_are_removed() -> None:
    owner = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from ajet.environment.sandboxes.cgroups import Cgroup; print(Cgroup.create(**{CGROUP}).files)",
        ],
        env={**os.environ, "PYTHONPATH": str(Path(ajet.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    if "None" in owner.stderr:
        pytest.skip("cgroups can't be written here")
    left = [Path(file).parent for file in ast.literal_eval(owner.stdout)]
    own = Cgroup.create(**CGROUP)
    assert own is not None and left
    others = [folder.with_name(f"ajet-sandbox-{os.getpid()}-of-another-form") for folder in dict.fromkeys(left)]
    for folder in others:
        folder.mkdir()
    sweep()
    assert not any(folder.exists() for folder in left)
    assert all(Path(file).exists() for file in own.files)
    own.remove()
    for folder in others:
        folder.rmdir()
