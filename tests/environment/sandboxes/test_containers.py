"""Docker and Podman, with an image made of this machine's own busybox."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ajet.config import make_config
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import ScriptedEngine
from ajet.environment.sandboxes import Sandbox, SandboxError, SandboxSettings, check_sandbox, forwarder, open_sandbox
from ajet.environment.sandboxes.cgroups import container_profile
from ajet.environment.sandboxes.container import sweep
from ajet.schema.task import Task
from ajet.task_runner.environments import find_sandbox
from ajet.task_runner.runtime import Runtime
from support import TESTS

IMAGE = "ajet-test:busybox"


def settings_of(kind: str, **more: Any) -> SandboxSettings:
    options = {"runtime": "runc"} if kind == "podman" and shutil.which("runc") else {}
    image = f"localhost/{IMAGE}" if kind == "podman" else IMAGE
    return SandboxSettings(kind=kind, image=image, options=options, memory_mb=64, disk_mb=8, processes=24, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["docker", "podman"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A kind whose program works here."""
    name: str = request.param
    busybox = shutil.which("busybox")
    if shutil.which(name) is None or busybox is None:
        pytest.skip(f"needs {name} and busybox")
    if subprocess.run([name, "info"], capture_output=True, check=False).returncode:
        pytest.skip(f"{name} does not work here")
    root = tmp_path_factory.mktemp("image")
    root.chmod(0o755)  # it becomes the image's /
    (root / "bin").mkdir()
    for applet in subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split():
        os.symlink("busybox", root / "bin" / applet)
    (root / "bin" / "busybox").unlink(missing_ok=True)
    shutil.copy(busybox, root / "bin" / "busybox")
    packed = subprocess.run(["tar", "-C", str(root), "-cf", "-", "."], capture_output=True, check=True).stdout
    image = f"localhost/{IMAGE}" if name == "podman" else IMAGE
    subprocess.run([name, "import", "-", image], input=packed, capture_output=True, check=True)
    try:
        asyncio.run(use_once(name))
    except SandboxError as error:
        pytest.skip(f"{name} can't run a container here: {error}")
    return name


async def use_once(kind: str) -> None:
    async with open_sandbox(settings_of(kind)) as sandbox:
        await sandbox.exec("true")


def containers(kind: str, owner: int) -> list[str]:
    listed = subprocess.run(
        [kind, "ps", "-a", "--filter", "label=ajet.sandbox=1", "--format", "{{.Labels}}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in listed.stdout.splitlines() if f'"process": {owner}' in line or f"process:{owner}" in line]


def test_commands_and_files(kind: str) -> None:
    async def use(sandbox: Sandbox) -> None:
        result = await sandbox.exec("id -u; pwd; echo err >&2; exit 3")
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"1000\n/workspace\n", b"err\n")
        await sandbox.write("a b/x", b"\0\xff" * 5000)
        assert await sandbox.read("a b/x") == b"\0\xff" * 5000
        assert (await sandbox.exec(["cat", "-"], stdin=b"in", cwd="a b", env={"X": "1"})).stdout == b"in"
        with pytest.raises(FileNotFoundError):
            await sandbox.read("none")
        with pytest.raises(IsADirectoryError):
            await sandbox.read("a b")
        with pytest.raises(PermissionError):
            await sandbox.read("/dev/zero")
        with pytest.raises(OSError, match="No space"):
            await sandbox.write("big", b"x" * (9 << 20))
        result = await sandbox.exec("sleep 61 & sleep 61", timeout=2)
        assert result.timed_out and result.exit_code == 124
        assert b"sleep 61" not in (await sandbox.exec("ps")).stdout
        assert (await sandbox.exec("kill -9 1; touch /x /etc/x; cat /proc/1/environ; ip link set lo down")).exit_code

    async def main() -> None:
        async with open_sandbox(settings_of(kind)) as sandbox:
            await use(sandbox)

    asyncio.run(main())
    assert not containers(kind, os.getpid())


def test_a_workspace_begins_with_the_files_of_the_image(kind: str, tmp_path: Path) -> None:
    (tmp_path / "app" / "sub").mkdir(parents=True)
    (tmp_path / "app" / "sub" / "x").write_text("in the image")
    settings = settings_of(kind)
    dockerfile = tmp_path / "Dockerfile"
    image = "ajet-test:app" if kind == "docker" else "localhost/ajet-test:app"
    dockerfile.write_text(f"FROM {settings.image}\nCOPY app /app\n")
    subprocess.run([kind, "build", "-q", "-t", image, str(tmp_path)], capture_output=True, check=True)

    async def main(workspace: str) -> bytes:
        changed = dataclasses.replace(settings, image=image, workspace=workspace, folders=("/logs",))
        async with open_sandbox(changed) as sandbox:
            ran = await sandbox.exec("pwd; cat sub/x; echo 1 > sub/x && echo 2 > /logs/y && cat sub/x /logs/y")
            return ran.stdout

    assert asyncio.run(main("/app")) == b"/app\nin the image1\n2\n"
    assert asyncio.run(main("/elsewhere")) == b"/elsewhere\n"


def test_an_image_that_a_user_cannot_use_is_refused(kind: str, tmp_path: Path) -> None:
    image = "ajet-test:closed" if kind == "docker" else "localhost/ajet-test:closed"
    (tmp_path / "root" / "bin").mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", tmp_path / "root/bin/sh")
    (tmp_path / "root" / "bin").chmod(0o700)
    packed = subprocess.run(["tar", "-C", str(tmp_path / "root"), "-cf", "-", "."], capture_output=True, check=True)
    subprocess.run([kind, "import", "-", image], input=packed.stdout, capture_output=True, check=True)
    settings = dataclasses.replace(settings_of(kind), image=image)
    with pytest.raises(SandboxError, match=r"the user 1000:1000 can't run /bin/sh(.|\n)*options: \{user"):
        check_sandbox(settings)
    check_sandbox(settings_of(kind))


def test_an_image_whose_workspace_cannot_be_written_is_refused(kind: str, tmp_path: Path) -> None:
    image = "ajet-test:owned" if kind == "docker" else "localhost/ajet-test:owned"
    for folder in (tmp_path / "root", tmp_path / "root" / "bin", tmp_path / "root" / "workspace"):
        folder.mkdir(mode=0o755)
    shutil.copy(shutil.which("busybox") or "", tmp_path / "root/bin/sh")

    def import_image() -> None:
        packed = subprocess.run(["tar", "-C", str(tmp_path / "root"), "-cf", "-", "."], capture_output=True, check=True)
        subprocess.run([kind, "import", "-", image], input=packed.stdout, capture_output=True, check=True)

    import_image()
    settings = dataclasses.replace(settings_of(kind), image=image)
    with pytest.raises(SandboxError, match=r"has a folder /workspace in which the user 1000:1000 can't write\n.*chmod"):
        check_sandbox(settings)
    (tmp_path / "root" / "workspace").chmod(0o777)
    import_image()
    check_sandbox(settings)


def test_only_the_gateway_is_reached(kind: str) -> None:
    if shutil.which("nsenter") is None:
        pytest.skip("needs nsenter")

    async def main() -> bytes:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.0 200 OK\r\n\r\nhello")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        async with open_sandbox(settings_of(kind, network="gateway"), url) as sandbox:
            result = await sandbox.exec(["wget", "-qO-", f"{sandbox.gateway_url}/models"])
        server.close()
        return result.stdout

    assert asyncio.run(main()) == b"hello"


ASKS = (
    'wget -qO- --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" --post-data '
    '"{\\"model\\": \\"$AJET_MODEL\\", \\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"$(cat)\\"}]}" '
    '"$OPENAI_BASE_URL/chat/completions" > reply; echo N = 2 > n.py; grep -o "the answer" reply'
)


def test_a_program_is_the_agent_of_an_episode(kind: str) -> None:
    """`rollout.agent: {type: cli}` in a container: its program reaches the gateway, and its calls are recorded."""
    if shutil.which("nsenter") is None:
        pytest.skip("needs nsenter")
    settings = settings_of(kind)
    sandbox = {"kind": kind, "image": settings.image, "options": settings.options, "memory_mb": 64, "disk_mb": 8}
    config = make_config({"rollout.agent": {"type": "cli", "command": ASKS}, "rollout.sandbox": sandbox})
    engine = ScriptedEngine(["the answer"], lambda: ModelSource.resolve("tiny:qwen2-0.3m").tokenizer())
    check = {"files": {"n.py": "N = 1\n"}, "test_command": 'grep "N = 2" n.py', "result_as": "files"}
    assert find_sandbox(config) is not None
    with Runtime(config, make_engine=lambda _: engine) as runtime:
        task = Task(task_id="t", main_query="Make N two.", metadata=check)
        episode = runtime.run(runtime.pool.run_episode(task))
    assert episode.failure is None, episode.failure
    assert (episode.reward, episode.metadata["final_answer"]) == (1.0, "the answer")
    (call,) = episode.tree.calls
    assert call.drop is None and episode.tree.trained_tokens == episode.tree.sampled_tokens > 0
    assert "Make N two." in str(call.new_messages)


OWNER = """
import asyncio, sys
from test_containers import open_sandbox, settings_of

async def main():
    sandbox = await open_sandbox(settings_of(sys.argv[1]))
    print("ready", flush=True)
    await sandbox.exec("sleep 100")

asyncio.run(main())
"""


def test_nothing_is_left_when_the_owner_is_killed(kind: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    owner = subprocess.Popen([sys.executable, "-c", OWNER, kind], stdout=subprocess.PIPE, env=environment)
    assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
    owner.kill()
    owner.wait()
    owner.stdout.close()
    give_up = time.monotonic() + 30
    while containers(kind, owner.pid) and time.monotonic() < give_up:
        sweep(kind)
        time.sleep(0.1)
    assert not containers(kind, owner.pid)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="there is no `podman` here"):
        check_sandbox(SandboxSettings(kind="podman", image="x"))
    program = tmp_path / "podman"
    program.write_text(
        '#!/bin/sh\n[ "$1" = image ] && exit 1\n'
        '[ "$1" = info ] && [ -e $0.dead ] && { echo dead >&2; exit 1; }\nexit 0\n'
    )
    program.chmod(0o755)
    with pytest.raises(SandboxError, match="needs an image"):
        check_sandbox(SandboxSettings(kind="podman"))
    with pytest.raises(SandboxError, match="podman pull x"):
        check_sandbox(SandboxSettings(kind="podman", image="x"))
    (tmp_path / "podman.dead").touch()
    with pytest.raises(SandboxError, match="`podman info` failed: dead"):
        check_sandbox(SandboxSettings(kind="podman", image="x"))
    with pytest.raises(SandboxError, match="kubernetes needs an image"):
        check_sandbox(SandboxSettings(kind="kubernetes"))


def test_a_program_that_vanishes_is_said_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program = tmp_path / "podman"
    program.write_text('#!/bin/sh\n[ "$2" = --interactive ] || exit 0\necho ready\nexec cat >/dev/null\n')
    program.chmod(0o755)

    async def main() -> None:
        async with open_sandbox(SandboxSettings(kind="podman", image="x")) as sandbox:
            monkeypatch.setenv("PATH", str(tmp_path))
            program.unlink()
            with pytest.raises(SandboxError, match=r"podman exec can't be started: .*No such file"):
                await sandbox.exec("true")
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(20):
                with pytest.raises(SandboxError):
                    await sandbox.exec("true")
            assert len(os.listdir("/proc/self/fd")) <= before

    asyncio.run(main())


def test_a_network_that_cant_be_entered_in_time_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nsenter").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "nsenter").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(forwarder, "ENTER_S", 0.05)
    with pytest.raises(SandboxError, match=r"network can't be entered: .*timed out"):
        forwarder.listen_inside(os.getpid(), 8080)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(SandboxError, match=r"network can't be entered: .*No such file"):
        forwarder.listen_inside(os.getpid(), 8080)


def test_the_filter_is_bubblewraps() -> None:
    profile = container_profile()
    refused = {name for rule in profile["syscalls"] for name in rule["names"] if not rule["args"]}
    assert {"unshare", "mount", "ptrace", "bpf", "keyctl", "clone3"} <= refused
    sockets = {rule["args"][0]["value"] for rule in profile["syscalls"] if "socket" in rule["names"]}
    assert 40 in sockets and not {1, 2, 10} & sockets, "no vsock; UNIX, IPv4 and IPv6"
