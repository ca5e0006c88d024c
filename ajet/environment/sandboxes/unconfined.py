"""`UnconfinedSandbox`: kind `none`. A folder of its own, a clean environment and time limits: nothing is confined.

For machines where the episode is confined already (a container made for it), and for trusted commands. Commands may do
whatever you may.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping

from ajet.environment.sandboxes.sandbox import (
    WORKSPACE,
    Confined,
    ExecResult,
    Execution,
    SandboxError,
    SandboxSettings,
    Streams,
    within,
)


class UnconfinedSandbox(Confined):
    """Kind `none`."""

    @staticmethod
    def check(settings: SandboxSettings) -> None:
        """Refuse unless `network: host` is set explicitly."""
        if settings.network != "host":
            raise SandboxError(f"sandbox kind none can't limit the network: set network: host, not {settings.network}")
        if settings.writable != (WORKSPACE,):
            raise SandboxError(
                "sandbox kind none can't make a workspace elsewhere: choose bubblewrap, docker or podman"
            )

    def __init__(self, settings: SandboxSettings, gateway_url: str | None = None) -> None:
        self.check(settings)
        super().__init__(settings)
        self.gateway_url = gateway_url
        self.workspace = ""
        self._running: set[int] = set()
        """Process groups."""

    @property
    def limits(self) -> Mapping[str, str]:
        held = {"time": "watched by the owner"}
        names = ("memory", "processes", "cpus", "disk", "time", "lifetime", "network", "system calls")
        return {name: held.get(name, "not limited") for name in names}

    async def start(self) -> None:
        """Make the folder."""
        self.workspace = tempfile.mkdtemp(prefix="ajet-workspace-")

    async def run(self, asked: Execution) -> ExecResult:
        if not self.workspace:
            raise SandboxError("the sandbox is closed")
        variables = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": self.workspace,
            "LANG": "C.UTF-8",
            **self.settings.environment,
            **asked.env,
        }
        streams = Streams(asked)
        theirs_in, theirs_out, theirs_err = streams.theirs
        try:
            try:
                process = await asyncio.create_subprocess_exec(
                    *asked.arguments,
                    stdin=theirs_in,
                    stdout=theirs_out,
                    stderr=theirs_err,
                    cwd=os.path.join(self.workspace, asked.folder),
                    env=variables,
                    start_new_session=True,
                )
            except OSError as error:
                code = 127 if isinstance(error, FileNotFoundError) else 126
                return ExecResult(code, b"", f"{asked.arguments[0]}: {error.strerror}\n".encode(), 0.0)
            streams.begin()
            self._running = {group for group in self._running if _alive(group)} | {process.pid}

            async def end() -> None:
                _end(process.pid)
                await process.wait()

            code, timed_out = await within(asked.seconds, process.wait(), end)
        finally:
            streams.close()
        return streams.result(code if code >= 0 else 128 - code, timed_out)

    async def end_processes(self) -> None:
        """End processes that are still in their command's group."""
        for group in filter(_alive, self._running):
            _end(group)

    def kill(self) -> None:
        workspace, self.workspace = self.workspace, ""
        for group in filter(_alive, self._running):  # a number whose processes have all ended may be another's now
            _end(group)
        self._running.clear()
        if workspace:
            shutil.rmtree(workspace, ignore_errors=True)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # not ours: the number has been given to another
    return True


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
