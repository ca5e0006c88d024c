"""`BubblewrapSandbox`: namespaces, a read-only root, a workspace in memory, no network. No image, and no privilege.

Inside, `inside.py` is process 1; it starts commands on request. Everything ends with it, and it ends when its owner
closes the channel or dies. Used on the sandboxes' thread only: the kernel ends bubblewrap with the thread
that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

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
from ajet.environment.sandboxes.forwarder import Forwarder
from ajet.environment.sandboxes.sandbox import (
    FILE_S,
    Command,
    ExecResult,
    Input,
    OnOutput,
    SandboxError,
    SandboxSettings,
    Streams,
    arguments_of,
    place_of,
)

START_S = 60.0
END_S = 5.0
"""How long the kernel may take to end a sandbox's processes."""
_JOIN = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo 0 > "$1" || exit 125; shift; n=$((n-1)); done; exec "$@"'
"""Moves itself into the cgroups, and becomes bubblewrap: no process of the sandbox is ever outside."""


class BubblewrapSandbox:
    """See `ajet.environment.sandboxes.sandbox.Confined`."""

    @staticmethod
    def check(settings: SandboxSettings) -> None:
        """Raises `SandboxError` if bubblewrap can't make this sandbox here."""
        probe()
        shown(settings.read_only)
        check_writable(settings)

    def __init__(self, settings: SandboxSettings, gateway_url: str | None = None) -> None:
        check_writable(settings)
        self.settings = settings
        self.workspace = settings.workspace
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

    async def exec(
        self,
        command: Command,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | Input = b"",
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        arguments = arguments_of(command, "/bin/bash")
        folder = os.path.join(self.workspace, cwd or "")
        variables = {**self._environment(), **(env or {})}
        fields = [folder, str(len(arguments)), *arguments, *(f"{name}={value}" for name, value in variables.items())]
        seconds = self.settings.seconds_for(timeout)
        return await self._ask("exec", fields, stdin, seconds, self.settings.output_bytes, on_output)

    async def read(self, path: str) -> bytes:
        done = await self._ask("read", [place_of(self.workspace, path)], b"", FILE_S, 1 << 30)
        _raise_for(done, path)
        return done.stdout

    async def write(self, path: str, content: bytes) -> None:
        _raise_for(await self._ask("write", [place_of(self.workspace, path)], content, FILE_S, 4096), path)

    async def _ask(
        self,
        action: str,
        fields: Sequence[str],
        stdin: bytes | Input,
        seconds: float,
        limit: int,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Have the first process do something, for at most so long."""
        started = time.perf_counter()
        call = _Call(self._live(), limit, on_output)
        timed_out = False
        try:
            code = await call.run(action, fields, stdin, seconds)
        except TimeoutError:
            timed_out, code = True, 124
        finally:
            call.close()
        return call.result(code, time.perf_counter() - started, timed_out)

    def _environment(self) -> dict[str, str]:
        return {"PATH": path_inside(), "HOME": "/tmp", "LANG": "C.UTF-8", **self.settings.environment}

    def _live(self) -> Control:
        if self._control is None:
            raise SandboxError("the sandbox is closed")
        return self._control

    # ------------------------------------------------------------ ends

    async def end_processes(self) -> None:
        await self.exec(["/bin/sh", "-c", "kill -9 -1"])

    async def close(self) -> None:
        control, self._control = self._control, None
        if self._forwarder is not None:
            self._forwarder.close()
        if control is not None:
            control.hang_up()
        await asyncio.shield(asyncio.to_thread(self.kill))
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


class _Call(Streams):
    """One request with its streams."""

    def __init__(self, control: Control, limit: int, on_output: OnOutput | None = None) -> None:
        super().__init__(limit, on_output)
        self._control = control

    async def run(self, action: str, fields: Sequence[str], stdin: bytes | Input, seconds: float) -> int:
        """The exit code. On a time limit, or when cancelled, whatever the request started is ended."""
        number, waiting = await self._control.begin(action, fields, self.theirs)
        self.close_theirs()
        self.feed(stdin)
        try:
            await asyncio.wait([waiting], timeout=seconds)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self._end(number, waiting)))
            raise
        if waiting.done():
            return self._code(waiting.result())
        await self._end(number, waiting)
        raise TimeoutError

    def _code(self, answer: InitAnswer) -> int:
        if answer.kind == "error":
            raise SandboxError(f"the sandbox can't start a process: {os.strerror(answer.value)}")
        return answer.value

    async def _end(self, number: int, waiting: asyncio.Future[InitAnswer]) -> None:
        await self._control.kill(number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), END_S)


def _limits(settings: SandboxSettings, mode: str, cgroup: bool, filtered: bool) -> dict[str, str]:
    own_user = mode == "root" or os.geteuid() != 0
    return {
        "memory": "cgroup" if cgroup else "limit per process, and a watcher",
        "processes": "cgroup" if cgroup else "prlimit" if own_user else "not limited",
        "cpus": "cgroup" if cgroup else "not limited",
        "disk": "size of the file system in memory",
        "time": "watched by the owner",
        "lifetime": "watched inside",
        "network": {"none": "namespace", "gateway": "namespace, with the gateway's port", "host": "not limited"}[
            settings.network
        ],
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


def _raise_for(result: ExecResult, path: str) -> None:
    if result.exit_code == 0:
        return
    if result.timed_out:
        raise OSError(errno.ETIMEDOUT, f"took longer than {FILE_S:g} s", path)
    text = result.stderr.decode(errors="replace")
    number = int(text) if text.isdecimal() else 5
    raise OSError(number, os.strerror(number), path)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for bubblewrap, which ends with its first process; else force it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
        return
    process.send_signal(signal.SIGKILL)
    process.wait()
