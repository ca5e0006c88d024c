"""`BubblewrapSandbox`: namespaces, a read-only root, a workspace in memory, no network. No image, and no privilege.

Inside, `inside.py` is process 1; it starts commands on request. Everything ends with it, and it ends when its owner
closes the channel or dies. Used on the sandboxes' thread only: the kernel ends bubblewrap with the thread
that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping

from ajet.environment.sandboxes.bubblewrap_arguments import (
    FIRST,
    Control,
    InitAnswer,
    check_writable,
    command_line,
    first_program,
    next_uid,
    path_inside,
    probe,
    shown,
    texts,
)
from ajet.environment.sandboxes.cgroups import Cgroup, seccomp_filter
from ajet.environment.sandboxes.forwarder import NETWORKS, Forwarder
from ajet.environment.sandboxes.sandbox import (
    Confined,
    ExecResult,
    Execution,
    SandboxError,
    SandboxSettings,
    Streams,
    within,
)

START_S = 60.0
END_S = 5.0
"""How long the kernel may take to end a sandbox's processes."""
_JOIN = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo 0 > "$1" || exit 125; shift; n=$((n-1)); done; exec "$@"'
"""Moves itself into the cgroups, and becomes bubblewrap: no process of the sandbox is ever outside."""


class BubblewrapSandbox(Confined):
    """Kind `bubblewrap`."""

    shell = "/bin/bash"

    @staticmethod
    def check(settings: SandboxSettings) -> None:
        """Raises `SandboxError` if bubblewrap can't make this sandbox here."""
        probe()
        shown(settings.read_only)
        check_writable(settings)

    def __init__(self, settings: SandboxSettings, gateway_url: str | None = None) -> None:
        check_writable(settings)
        super().__init__(settings)
        self._forwarder = Forwarder.of(settings, gateway_url)
        self.gateway_url = self._forwarder.url if self._forwarder else None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Control | None = None
        self._cgroup: Cgroup | None = None
        self._said = -1
        self._limits: dict[str, str] = {}
        self._ending = threading.Lock()

    @property
    def limits(self) -> Mapping[str, str]:
        return self._limits

    async def start(self) -> None:
        """Make it. Raises `SandboxError`."""
        try:
            async with asyncio.timeout(START_S):
                await self._start()
        except TimeoutError:
            await self.close()
            raise SandboxError(f"the sandbox did not start within {START_S:g} s") from None
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        settings = self.settings
        mode = await asyncio.to_thread(probe)
        cgroup = Cgroup.create(
            memory_mb=settings.memory_with_files_mb, processes=settings.processes + 4, cpus=settings.cpus
        )
        self._cgroup = cgroup
        uid = next_uid() if mode == "root" else -1
        filter_ = seccomp_filter(counted_by_cgroup=cgroup is not None)
        self._limits = _limits(settings, mode, cgroup is not None, filter_ is not None)
        with contextlib.ExitStack() as opened:
            contents = {path: text.encode() for path, text in texts(mode, uid, settings.network).items()}
            contents[FIRST] = first_program()
            files = {path: _text_file(opened, content) for path, content in contents.items()}
            filter_file = None if filter_ is None else _text_file(opened, filter_)
            line = command_line(settings, mode=mode, uid=uid, files=files, filter_=filter_file, watch=cgroup is None)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.callback(theirs.close)
            self._said, said = os.pipe()
            os.set_blocking(self._said, False)
            opened.callback(os.close, said)
            self._control = Control(ours, self._why)
            self._process = subprocess.Popen(
                _with_control(line, theirs.fileno(), cgroup),
                env={"PATH": os.environ.get("PATH", os.defpath)},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                pass_fds=[theirs.fileno(), *files.values(), *([filter_file] if filter_file is not None else [])],
                start_new_session=True,
            )
        await self._control.ready()
        if self._forwarder is not None:
            await self._open_gateway(self._forwarder)

    async def _open_gateway(self, forwarder: Forwarder) -> None:
        _, waiting = await self._live().begin("listen", [str(forwarder.port)], [])
        answer = await waiting
        if answer.descriptor is None:
            raise SandboxError(f"network: gateway: no socket inside: error {answer.value}")
        await forwarder.serve(socket.socket(fileno=answer.descriptor))

    # ------------------------------------------------------------ commands and files

    async def run(self, asked: Execution) -> ExecResult:
        control = self._live()
        folder = os.path.join(self.workspace, asked.folder)
        places = {"PATH": path_inside(), "HOME": "/tmp", "LANG": "C.UTF-8"}
        variables = {**places, **self.settings.environment, **asked.env}
        arguments, assigned = asked.arguments, [f"{name}={value}" for name, value in variables.items()]
        streams = Streams(asked)
        try:
            number, waiting = await control.begin(
                "exec", [folder, str(len(arguments)), *arguments, *assigned], streams.theirs
            )
            streams.begin()
            exiting = _exit_code(asyncio.shield(waiting))  # it is answered also after it has been given up
            code, timed_out = await within(asked.seconds, exiting, lambda: _end_request(control, number, waiting))
        finally:
            streams.close()
        return streams.result(code, timed_out)

    def _live(self) -> Control:
        if self._control is None:
            raise SandboxError("the sandbox is closed")
        return self._control

    # ------------------------------------------------------------ ends

    async def close(self) -> None:
        control, self._control = self._control, None
        if self._forwarder is not None:
            self._forwarder.close()
        if control is not None:
            control.hang_up()
        await super().close()
        if control is not None:
            control.close()
        if self._said >= 0:
            os.close(self._said)
            self._said = -1

    def kill(self) -> None:
        with self._ending:
            control, process, cgroup = self._control, self._process, self._cgroup
            self._process = self._cgroup = None
            if control is not None:
                control.hang_up()
            if process is not None:
                _end(process)
            if cgroup is not None:
                cgroup.remove()

    def _why(self) -> str:
        """Called when the channel has closed without our doing."""
        text = ""
        with contextlib.suppress(OSError, BlockingIOError):
            text = os.read(self._said, 4096).decode(errors="replace").strip()
        return f"the sandbox ended{': ' + text if text else ''}"


async def _exit_code(answered: asyncio.Future[InitAnswer]) -> int:
    answer = await answered
    if answer.kind == "error":
        raise SandboxError(f"the sandbox can't start a process: {os.strerror(answer.value)}")
    return answer.value


async def _end_request(control: Control, number: int, waiting: asyncio.Future[InitAnswer]) -> None:
    """End what a request has started, and wait until that is over."""
    await control.kill(number)
    await asyncio.wait([waiting], timeout=END_S)


def _limits(settings: SandboxSettings, mode: str, cgroup: bool, filtered: bool) -> dict[str, str]:
    own_user = mode == "root" or os.geteuid() != 0
    return {
        "memory": "cgroup" if cgroup else "limit per process, and a watcher",
        "processes": "cgroup" if cgroup else "prlimit" if own_user else "not limited",
        "cpus": "cgroup" if cgroup else "not limited",
        "disk": "size of the file system in memory",
        "time": "watched by the owner",
        "lifetime": "watched inside",
        "network": NETWORKS[settings.network],
        "system calls": "seccomp" if filtered else "not limited",
    }


def _text_file(opened: contextlib.ExitStack, content: bytes) -> int:
    descriptor = os.memfd_create("ajet-text")
    opened.callback(os.close, descriptor)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _with_control(line: list[str], control: int, cgroup: Cgroup | None) -> list[str]:
    """The command line, in the cgroup, with the channel's descriptor."""
    files = cgroup.files if cgroup is not None else []
    return ["/bin/sh", "-c", _JOIN, "sh", str(len(files)), *files, *line, f"control={control}"]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for bubblewrap, which ends with its first process; else force it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
        return
    process.send_signal(signal.SIGKILL)
    process.wait()
