"""`ContainerSandbox`: a Docker or Podman container, through the program of that name.

The container's first process reads from us and ends when we do: what an owner that was killed left behind ends by
itself. Containers also carry labels that name their owner and their deadline, by which `sweep` removes what a dead
daemon or machine left. The image needs a POSIX shell and the usual small programs (busybox has them).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import posixpath
import secrets
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence

from ajet.environment.sandboxes.cgroups import container_profile, is_gone, owner
from ajet.environment.sandboxes.forwarder import NETWORKS, Forwarder, listen_inside
from ajet.environment.sandboxes.sandbox import (
    FILE_S,
    PATH,
    WORKSPACE,
    Confined,
    ExecResult,
    Execution,
    SandboxError,
    SandboxSettings,
    Streams,
    within,
)

START_S = 120.0
COMMAND_S = 30.0
"""How long the program itself may take to answer."""
LABEL = "ajet.sandbox"

_FIRST = "echo ready; while read -r line; do (:); done"
"""Process 1: its shell frees processes that have ended whenever it is sent a line, and exits with its input."""
_ENTER = (
    'cd -- "$1" 2>/dev/null || { echo "cannot work in $1: No such file or directory" >&2; exit 1; }; shift; exec "$@"'
)


class ContainerSandbox(Confined):
    """Kinds `docker` and `podman`."""

    @staticmethod
    def check(settings: SandboxSettings) -> None:
        """Raises `SandboxError` if this container can't be made here."""
        kind = settings.kind
        if shutil.which(kind) is None:
            raise SandboxError(f"sandbox kind {kind}: there is no `{kind}` here: install it, or choose another kind")
        if not settings.image:
            raise SandboxError(f"sandbox kind {kind} needs an image, for example image: python:3.11-slim")
        _answer(settings, ["info", "--format", "{{json .}}"])
        try:
            _answer(settings, ["image", "inspect", "--format", "{{.Id}}", settings.image])
        except SandboxError:
            raise SandboxError(
                f"sandbox image: {kind} has no image {settings.image!r} on this machine: {kind} pull {settings.image}"
            ) from None
        user = _user(settings)
        as_user = ["--rm", "--pull", "never", "--network", "none", "--cap-drop", "ALL", "--user", user]
        line = ["run", *as_user, *_ulimits(settings), *_folders(settings), "--entrypoint", "/bin/sh", settings.image]
        try:
            said = _answer(settings, [*line, "-c", f"test -w {settings.workspace} || echo closed"])
        except SandboxError as error:
            raise SandboxError(
                f"sandbox image: in a container of {settings.image!r}, the user {user} can't run /bin/sh: {error}\n"
                "    check the permissions of the image's folders, or name another user: options: {user: …}"
            ) from None
        if said == "closed" and settings.workspace == WORKSPACE:
            folder = settings.workspace
            raise SandboxError(
                f"sandbox image: {settings.image!r} has a folder {folder} in which the user {user} can't write\n"
                f"    remove it from the image, or `RUN chmod 777 {folder}`, or name its owner: options: {{user: …}}"
            )

    def __init__(self, settings: SandboxSettings, gateway_url: str | None = None) -> None:
        super().__init__(settings)
        self._program = settings.kind
        self._name = ""
        self._forwarder = Forwarder.of(settings, gateway_url)
        self.gateway_url = self._forwarder.url if self._forwarder else None
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = threading.Lock()
        self._expiry: asyncio.TimerHandle | None = None
        self._closed_because = "the sandbox is closed"

    @property
    def limits(self) -> Mapping[str, str]:
        own = f"{self._program}'s"
        return {
            "memory": f"cgroup, {own}",
            "processes": f"cgroup, {own}",
            "cpus": f"cgroup, {own}",
            "disk": "size of the file system in memory",
            "time": "watched by the owner",
            "lifetime": "watched by the owner",
            "network": NETWORKS[self.settings.network],
            "system calls": "seccomp",
        }

    async def start(self) -> None:
        """Make it. Raises `SandboxError`."""
        try:
            await asyncio.to_thread(self.check, self.settings)
            await asyncio.to_thread(sweep, self._program)
            self._name = f"ajet-{secrets.token_hex(8)}"
            with tempfile.NamedTemporaryFile("w", suffix=".json") as profile:
                json.dump(container_profile(), profile)
                profile.flush()
                line = [*_command(self.settings), *run_arguments(self.settings, self._name, profile.name)]
                self._process = process = subprocess.Popen(
                    line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
                )
                assert process.stdout is not None and process.stderr is not None
                said = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START_S)
            if said != b"ready\n":
                process.kill()
                error = (await asyncio.to_thread(process.stderr.read)).decode(errors="replace").strip()[-500:]
                raise SandboxError(f"{self._program} could not start the container: {error}")
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(self.settings.lifetime_seconds, self._expire)
            if self.workspace != WORKSPACE:
                await self._bring_files_of_image()
            if self._forwarder is not None:
                await self._forwarder.serve(await asyncio.to_thread(self._listener, self._forwarder.port))
        except TimeoutError:
            await self.close()
            raise SandboxError(f"{self._program} did not start the container within {START_S:g} s") from None
        except BaseException:
            await self.close()
            raise

    def _listener(self, port: int) -> socket.socket:
        """A socket in the container's network."""
        inspected = _answer(self.settings, ["inspect", "--format", "{{.State.Pid}}", self._name])
        return listen_inside(int(inspected), port)

    async def _bring_files_of_image(self) -> None:
        """Copy what the image has in the workspace, which the folder in memory hides."""
        packed = await asyncio.to_thread(_files_of_image, self.settings)
        ran = await self.run(Execution(["tar", "-xf", "-"], FILE_S, 4096, stdin=packed))
        if packed and ran.exit_code:
            said = ran.stderr.decode(errors="replace").strip()[-500:]
            raise SandboxError(f"the files of the image's {self.workspace} can't be copied: {said}")

    def _expire(self) -> None:
        self._closed_because = "the sandbox reached its lifetime_seconds and was closed"
        threading.Thread(target=self.kill, name="ajet-sandbox-end", daemon=True).start()

    # ------------------------------------------------------------ commands and files

    async def run(self, asked: Execution) -> ExecResult:
        container = self._live()
        streams = Streams(asked)
        theirs_in, theirs_out, theirs_err = streams.theirs
        folder = posixpath.join(self.workspace, asked.folder)
        variables = [part for name, value in asked.env.items() for part in ("--env", f"{name}={value}")]
        user = _user(self.settings)
        try:
            try:
                process = await asyncio.create_subprocess_exec(
                    *_command(self.settings),
                    *("exec", "--interactive", "--user", user, *variables, self._name),
                    *("/bin/sh", "-c", _ENTER, "sh", folder, *asked.arguments),
                    stdin=theirs_in,
                    stdout=theirs_out,
                    stderr=theirs_err,
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxError(f"{self._program} exec can't be started: {error}") from None
            streams.begin()
            code, timed_out = await within(asked.seconds, process.wait(), lambda: self._end_all(process))
        finally:
            streams.close()
        if container.poll() is not None:
            raise SandboxError(self._closed_because if not self._process else "the container ended")
        with contextlib.suppress(OSError):
            assert container.stdin is not None
            os.write(container.stdin.fileno(), b"\n")  # its first process frees what has ended
        return streams.result(code, timed_out)

    async def _end_all(self, process: asyncio.subprocess.Process) -> None:
        """End everything in the container but its first process: nothing tells which command started what."""
        with contextlib.suppress(SandboxError):
            await asyncio.to_thread(
                _answer,
                self.settings,
                ["exec", "--user", _user(self.settings), self._name, "/bin/sh", "-c", "kill -9 -1"],
                may_fail=True,
            )
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def _live(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise SandboxError(self._closed_because)
        return self._process

    # ------------------------------------------------------------ ends

    async def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        if self._forwarder is not None:
            self._forwarder.close()
        await super().close()

    def kill(self) -> None:
        with self._ending:
            process, self._process = self._process, None
            if process is None:
                return
            at_once = ["--time", "0"] if self._program == "podman" else []
            with contextlib.suppress(SandboxError):
                _answer(self.settings, ["rm", "--force", *at_once, self._name], may_fail=True)
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()


def run_arguments(settings: SandboxSettings, name: str, profile: str) -> list[str]:
    """How the container is made: no privilege, no network, a read-only root, files in memory."""
    memory = f"{settings.memory_with_files_mb}m"
    # a folder of the image's, such as root's /app, is opened to the user that commands run as
    opened = f"chmod 777 {shlex.quote(settings.workspace)} 2>/dev/null; " * (settings.workspace != WORKSPACE)
    first = opened + _FIRST
    labels = {
        LABEL: "1",
        f"{LABEL}.owner": json.dumps(owner()),
        f"{LABEL}.expires": str(int(time.time() + settings.lifetime_seconds) + 60),
    }
    variables = {"PATH": PATH, "HOME": "/tmp", "LANG": "C.UTF-8", **settings.environment}
    return [
        *("run", "--interactive", "--rm", "--pull", "never", "--name", name, "--hostname", "sandbox"),
        *(part for key, value in labels.items() for part in ("--label", f"{key}={value}")),
        *("--network", "host" if settings.network == "host" else "none"),
        *(["--http-proxy=false", "--read-only-tmpfs=false"] if settings.kind == "podman" else []),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only", "--user", "0:0"),
        *("--security-opt", f"seccomp={profile}"),
        *_folders(settings),
        *("--memory", memory, "--memory-swap", memory, "--cpus", str(settings.cpus)),
        *("--pids-limit", str(settings.processes + 8)),
        *_ulimits(settings),
        *(part for folder in settings.read_only for part in ("--volume", f"{folder}:{folder}:ro")),
        *(part for key, value in variables.items() for part in ("--env", f"{key}={value}")),
        *("--entrypoint", "/bin/sh", str(settings.image), "-c", first),
    ]


def _folders(settings: SandboxSettings) -> list[str]:
    """Where files can be written. A folder of that name in the image lends its owner and mode to the one in memory."""
    bare = ",notmpcopyup" * (settings.kind == "podman")  # else Podman fills it from the image, with root's files
    size = f"rw,exec,size={settings.disk_mb}m"
    places = [f"{folder}:{size},mode=0777{bare * (folder != WORKSPACE)}" for folder in settings.writable]
    places.append(f"/tmp:{size},mode=1777")
    return [part for place in places for part in ("--tmpfs", place)]


def _ulimits(settings: SandboxSettings) -> list[str]:
    limits = {"nofile": 1024, "core": 0, "nproc": settings.processes, "fsize": settings.disk_mb << 20}
    return [part for name, limit in limits.items() for part in ("--ulimit", f"{name}={limit}:{limit}")]


def sweep(program: str) -> None:
    """Remove containers whose owner on this machine is dead, or whose deadline is over."""
    settings = SandboxSettings(kind=program)
    listed = _answer(settings, ["ps", "--all", "--quiet", "--filter", f"label={LABEL}=1"], may_fail=True).split()
    for container in listed:
        labels = _answer(settings, ["inspect", "--format", "{{json .Config.Labels}}", container], may_fail=True)
        try:
            found = json.loads(labels)
            made_by, expires = json.loads(found[f"{LABEL}.owner"]), int(found[f"{LABEL}.expires"])
            gone = is_gone(made_by)
        except (ValueError, KeyError, TypeError):
            continue  # it is being removed
        if gone or time.time() > expires:
            _answer(settings, ["rm", "--force", container], may_fail=True)


def _user(settings: SandboxSettings) -> str:
    """Whom commands run as. The first process is another user, without privileges: they can't look into it."""
    return str(settings.options.get("user", "1000:1000"))


def _command(settings: SandboxSettings) -> list[str]:
    """The program, and the OCI runtime if the settings name one."""
    runtime = settings.options.get("runtime")
    return [settings.kind, *(["--runtime", str(runtime)] if runtime and settings.kind == "podman" else [])]


def _answer(settings: SandboxSettings, arguments: Sequence[str], *, may_fail: bool = False) -> str:
    """What the program prints. Raises `SandboxError`."""
    line = [*_command(settings), *arguments]
    try:
        done = subprocess.run(line, capture_output=True, timeout=COMMAND_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{settings.kind} {arguments[0]}: {error}") from None
    if done.returncode and not may_fail:
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise SandboxError(f"sandbox kind {settings.kind}: `{settings.kind} {arguments[0]}` failed: {said}")
    return done.stdout.decode(errors="replace").strip()


def _files_of_image(settings: SandboxSettings) -> bytes:
    """The content of the image's folder of the workspace's name, as an archive; empty if it has none."""
    made = _answer(settings, ["create", "--pull", "never", "--entrypoint", "/bin/sh", str(settings.image)])
    try:
        line = [*_command(settings), "cp", f"{made}:{settings.workspace}/.", "-"]
        done = subprocess.run(line, capture_output=True, timeout=START_S, check=False, stdin=subprocess.DEVNULL)
    finally:
        _answer(settings, ["rm", "--force", made], may_fail=True)
    said = done.stderr.decode(errors="replace").strip()[-500:]
    if done.returncode and not any(words in said.lower() for words in ("could not find", "no such file")):
        raise SandboxError(f"sandbox image: the files of {settings.workspace} in {settings.image!r}: {said}")
    return b"" if done.returncode else done.stdout
