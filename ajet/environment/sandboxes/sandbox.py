"""`Sandbox`: a confined place in which one episode runs commands and keeps files.

Code that a model wrote runs here and nowhere else. A sandbox belongs to one episode, and closing it ends every process
in it and removes its files. What a command does wrong (exit code, time limit, too much output) is an `ExecResult`; only
a sandbox that itself fails raises `SandboxError`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from ajet.config.kinds import SANDBOXES
from ajet.environment.sandboxes.streams import Input, OnOutput
from ajet.schema.errors import UserError

Command = str | Sequence[str]

SHARED_MEMORY_MB = 64
"""What /dev/shm may hold."""
Network = Literal["none", "gateway", "host"]


class SandboxError(UserError):
    """A sandbox that can't be made as asked, or that died."""


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """How an episode is confined. Limits hold for the sandbox as a whole, not for each command."""

    kind: str = "bubblewrap"
    network: Network = "none"
    """`gateway`: the run's own gateway can be reached and nothing else."""
    cpus: float = 1.0
    memory_mb: int = 1024
    """Of all processes together. Files are in memory besides: see `memory_with_files_mb`."""
    processes: int = 128
    disk_mb: int = 512
    """What files may take in the workspace, and again in /tmp."""
    exec_seconds: float = 60.0
    """The longest that one command may run."""
    lifetime_seconds: float = 3600.0
    output_bytes: int = 1_000_000
    """The most that is kept of each output stream of a command."""
    image: str | None = None
    """Docker, Podman, Kubernetes: the image of the root file system."""
    read_only: tuple[str, ...] = ()
    """Folders of this machine that can also be seen, but not changed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """All variables that commands see, besides PATH, HOME and LANG: nothing is inherited."""
    options: Mapping[str, object] = field(default_factory=dict)
    """What one kind alone understands (Kubernetes: namespace, node selector, …)."""

    def __post_init__(self) -> None:
        if self.kind not in SANDBOXES:
            raise SandboxError(f"sandbox kind {self.kind!r}: expected one of {', '.join(SANDBOXES)}")
        if self.network not in get_args(Network):
            raise SandboxError(f"sandbox network {self.network!r}: expected one of {', '.join(get_args(Network))}")
        least = {"memory_mb": 16, "processes": 4, "disk_mb": 1, "output_bytes": 1, "cpus": 0.01}
        for name in ("cpus", "memory_mb", "processes", "disk_mb", "exec_seconds", "lifetime_seconds", "output_bytes"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0 or value < least.get(name, 0):
                raise SandboxError(f"sandbox {name}: {value} is too little; expected {least.get(name, 'more than 0')}")
        for name, value in self.environment.items():
            if not name or "=" in name or "\0" in name + value:
                raise SandboxError(f"sandbox environment: {name!r} can't be a variable")
        for folder in self.read_only:
            if not os.path.isabs(folder) or os.path.normpath(folder) in ("/", "/proc", "/sys", "/dev", "/workspace"):
                raise SandboxError(f"sandbox read_only: {folder!r} can't be shown: name an absolute path of a folder")

    @property
    def memory_with_files_mb(self) -> int:
        """The memory of processes and of full file systems together: files can't take what processes need."""
        return self.memory_mb + 2 * self.disk_mb + SHARED_MEMORY_MB

    def seconds_for(self, asked: float | None) -> float:
        """How long a command may run that asks for this long."""
        return min(asked or self.exec_seconds, self.exec_seconds)


def arguments_of(command: Command, shell: str = "/bin/sh") -> list[str]:
    """The argument vector of a command. Raises ValueError for what can't be one."""
    arguments = [shell, "-c", command] if isinstance(command, str) else list(command)
    if not arguments or any("\0" in argument for argument in arguments):
        raise ValueError("a command needs at least a program's name, and no NUL characters")
    return arguments


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command did."""

    exit_code: int
    """As a shell reports it; 124 when the time limit ended it, 137 when the memory limit did."""
    stdout: bytes
    stderr: bytes
    seconds: float
    timed_out: bool = False
    truncated: bool = False
    """Some output was dropped: it was longer than `output_bytes`."""


class Sandbox(Protocol):
    """An async context manager, made by `open_sandbox`, that closes it. Can be used from any event loop."""

    @property
    def workspace(self) -> str:
        """The folder, as seen inside, where commands start and relative paths begin."""

    @property
    def gateway_url(self) -> str | None:
        """The run's gateway as it is reached from inside (`network: gateway`)."""

    @property
    def settings(self) -> SandboxSettings:
        """How it is confined: what another one like it is made of."""

    @property
    def limits(self) -> Mapping[str, str]:
        """What holds each limit: `memory: cgroup`, `processes: prlimit`, … or `not limited`."""

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
        """Run a shell line, or an argument vector without a shell. Cancelling it ends the command and its children.
        Raises ValueError for what can't be a command."""

    async def read(self, path: str) -> bytes:
        """A file's bytes. Raises FileNotFoundError, IsADirectoryError, PermissionError or another OSError."""

    async def write(self, path: str, content: bytes) -> None:
        """Create or replace a file, whole or not at all; its folders are made. Raises OSError."""

    async def end_processes(self) -> None:
        """End what commands have left running. The files stay."""

    async def reset(self) -> None:
        """End all processes and empty the workspace: as new, for another use in the same episode."""

    async def close(self) -> None:
        """End all processes and remove all files. Calling it again does nothing."""

    def kill(self) -> None:
        """`close`, from any thread, and without an event loop. May take a moment."""

    async def __aenter__(self) -> Sandbox: ...

    async def __aexit__(self, *_: object) -> None: ...
