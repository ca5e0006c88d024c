"""`Sandbox`: a confined place in which one episode runs commands and keeps files.

Code that a model wrote runs here and nowhere else. A sandbox belongs to one episode, and closing it ends every process
in it and removes its files. What a command does wrong (exit code, time limit, too much output) is an `ExecResult`; only
a sandbox that itself fails raises `SandboxError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ajet.schema.errors import UserError

SandboxKind = Literal["bubblewrap", "docker", "podman", "kubernetes", "none"]
Network = Literal["none", "gateway", "host"]


class SandboxError(UserError):
    """A sandbox that can't be made as asked, or that died."""


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """How an episode is confined. Limits hold for the sandbox as a whole, not for each command."""

    kind: SandboxKind = "bubblewrap"
    network: Network = "none"
    """`gateway`: the run's own gateway can be reached and nothing else."""
    cpus: float = 1.0
    memory_mb: int = 1024
    processes: int = 128
    disk_mb: int = 512
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
    """Made by `ajet.sandbox.open_sandbox`; an async context manager that closes it."""

    workspace: str
    """The folder, as seen inside, where commands start and relative paths begin."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        on_output: Callable[[bytes], None] | None = None,
    ) -> ExecResult:
        """Run a shell line, or an argument vector without a shell. Cancelling it ends the command and its children."""

    async def read(self, path: str) -> bytes:
        """A file's bytes. Raises FileNotFoundError, IsADirectoryError or PermissionError."""

    async def write(self, path: str, content: bytes) -> None:
        """Create or replace a file, whole or not at all; its folders are made."""

    async def reset(self) -> None:
        """End all processes and empty the workspace: as new, for another use in the same episode."""

    async def close(self) -> None:
        """End all processes and remove all files. Calling it again does nothing."""

    async def __aenter__(self) -> Sandbox: ...

    async def __aexit__(self, *_: object) -> None: ...
