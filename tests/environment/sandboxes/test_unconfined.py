"""Kind `none`: nothing is confined, and it says so."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

import pytest

from ajet.environment.sandboxes import (
    Sandbox,
    SandboxError,
    SandboxSettings,
    check_sandbox,
    fresh_copy,
    of_task,
    open_sandbox,
)
from ajet.schema.errors import TaskDataError
from support.waiting import wait_until

SETTINGS = SandboxSettings(kind="none", network="host", exec_seconds=20)


def test_it_works_like_the_others() -> None:
    async def main() -> str:
        async with open_sandbox(SETTINGS) as sandbox:
            await use(sandbox)
            return sandbox.workspace

    async def use(sandbox: Sandbox) -> None:
        result = await sandbox.exec("pwd; echo err >&2; exit 3")
        assert (result.exit_code, result.stdout.decode(), result.stderr) == (3, f"{sandbox.workspace}\n", b"err\n")
        await sandbox.write("a/x", b"\0")
        assert await sandbox.read("a/x") == b"\0" and (await sandbox.exec("cat", stdin=b"in", cwd="a")).stdout == b"in"
        assert (await sandbox.exec(["no-such-program"])).exit_code == 127
        assert (await sandbox.exec("sleep 60", timeout=0.2)).exit_code == 124
        assert (await sandbox.exec("kill -9 $$")).exit_code == 137
        with pytest.raises(PermissionError):
            await sandbox.read("/dev/zero")
        assert sandbox.limits["network"] == sandbox.limits["memory"] == "not limited"

    workspace = asyncio.run(main())
    assert workspace and not Path(workspace).exists()


def test_commands_that_cant_be_started_leave_nothing_open() -> None:
    async def main() -> tuple[int, int]:
        async with open_sandbox(SETTINGS) as sandbox:
            await sandbox.exec(["no-such-program"])
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(20):
                assert (await sandbox.exec(["no-such-program"])).exit_code == 127
            return before, len(os.listdir("/proc/self/fd"))

    before, after = asyncio.run(main())
    assert after <= before


def test_one_that_is_ready_just_as_its_opening_is_cancelled_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def main() -> None:
        opening = asyncio.ensure_future(open_sandbox(SETTINGS))
        await asyncio.sleep(0)
        wait_until(lambda: any(tmp_path.iterdir()))  # and this loop knows nothing of it
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled()

    asyncio.run(main())
    wait_until(lambda: not any(tmp_path.iterdir()))


def test_what_the_callers_function_raises_counts_after_the_command_has_ended() -> None:
    def fails(chunk: bytes) -> None:
        time.sleep(0.3)
        raise KeyError("mine")

    async def main() -> None:
        async with open_sandbox(SETTINGS) as sandbox:
            await sandbox.exec("echo one", on_output=fails)

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(main())


def test_a_result_has_each_name_of_a_file_but_no_links_to_others() -> None:
    async def main() -> str:
        async with open_sandbox(SETTINGS) as sandbox:
            await sandbox.exec("echo 1 > first; chmod +x first; ln first second; ln -s first third; ln third fourth")
            async with fresh_copy(sandbox) as copy:
                return (await copy.exec("cat first second; ls; test -x second && echo runs")).stdout.decode()

    assert asyncio.run(main()).split() == ["1", "1", "first", "second", "runs"]


def test_a_copy_leaves_behind_what_it_is_told_to() -> None:
    async def main() -> str:
        async with open_sandbox(SETTINGS) as sandbox:
            await sandbox.exec("mkdir tests; touch tests/t.py left")
            async with fresh_copy(sandbox, without=["tests"]) as copy:
                return (await copy.exec("ls")).stdout.decode()

    assert asyncio.run(main()) == "left\n"


def test_background_processes_can_be_ended() -> None:
    async def main() -> None:
        async with open_sandbox(SETTINGS) as sandbox:
            await sandbox.exec("sleep 60 >/dev/null 2>&1 & echo $! > number")
            number = int(await sandbox.read("number"))
            await sandbox.end_processes()
            async with asyncio.timeout(20):
                while _runs(number):
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_it_must_be_asked_for_knowingly() -> None:
    async def main() -> None:
        await open_sandbox(SandboxSettings(kind="none"))

    with pytest.raises(SandboxError, match="set network: host"):
        asyncio.run(main())


def test_a_task_may_change_its_sandbox_but_not_what_confines_it() -> None:
    asked = {"image": "x:1", "memory_mb": 64, "workspace": "/app"}
    changed = of_task(SandboxSettings(), {"sandbox": asked})
    assert (changed.image, changed.memory_mb, changed.workspace, changed.cpus) == ("x:1", 64, "/app", 1.0)
    assert of_task(SETTINGS, {}) is SETTINGS
    for wrong, said in (
        ({"network": "host"}, "a task's `sandbox` may have cpus, .*, not 'network'"),
        ("docker", "not 'docker'"),
        ({"memory_mb": 1}, "a task's `sandbox`: sandbox memory_mb: 1 is too little"),
        ({"cpus": "two"}, "a task's `sandbox`: "),
    ):
        with pytest.raises(TaskDataError, match=said):
            of_task(SandboxSettings(), {"sandbox": wrong})
    with pytest.raises(SandboxError, match="kind none can't make a workspace elsewhere"):
        check_sandbox(of_task(SETTINGS, {"sandbox": {"workspace": "/app"}}))
