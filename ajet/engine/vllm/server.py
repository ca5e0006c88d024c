"""`VllmServer`: one vLLM server that we start, ask for its health, and stop with everything it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from ajet.engine.vllm.arguments import (
    SERVER_KEY,
    SERVER_MODULE,
    VllmSettings,
    server_arguments,
    server_environment,
    worker_arguments,
)
from ajet.schema.errors import (
    EngineError,
    FeatureUnavailableError,
    MissingDependencyError,
)
from ajet.schema.install import install_command
from ajet.system.parent import ending_with_us

STOP_SECONDS = 15.0
"""How long a server may take to end before it is killed."""
TAIL_CHARACTERS = 3000
"""How much of a server's log an error message quotes."""

ERROR_LINE = re.compile(r"\b\w*(Error|Exception)\b: .|\berror: ")
SAYS_NOTHING = ("See root cause above", "Engine core initialization failed")
"""vLLM's last error points to an earlier one."""
CANT_SLEEP = "Sleep mode is not supported"

CommandLine = Callable[[VllmSettings, int], list[str]]


def vllm_command(settings: VllmSettings, port: int) -> list[str]:
    """The command that starts a server."""
    return [
        settings.python,
        "-m",
        SERVER_MODULE,
        "--middleware",
        SERVER_KEY,
        *worker_arguments(),
        *server_arguments(settings, port),
    ]


class VllmServer:
    """A server process on a free port, in a process group of its own. `start` may be called again after it died."""

    def __init__(self, settings: VllmSettings, index: int, command: CommandLine = vllm_command) -> None:
        self._settings = settings
        self._command = command
        self._index = index
        self._process: subprocess.Popen[bytes] | None = None
        folder = settings.log_folder or Path(tempfile.mkdtemp(prefix="ajet-vllm-"))
        folder.mkdir(parents=True, exist_ok=True)
        self.log_file = folder / f"vllm-{index}.log"
        self.port = 0
        self.key = secrets.token_urlsafe(32)
        self.starts = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process and wait until it answers."""
        self.port = _free_port()
        self.starts += 1
        command = self._command(self._settings, self.port)
        if shutil.which(command[0]) is None:
            raise MissingDependencyError(f"vLLM's Python {command[0]} does not exist (rollout.vllm.python)")
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                ending_with_us(command),  # an orphaned server would keep the GPU's memory
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **server_environment(self._settings, self._index, self.key)},
                start_new_session=True,  # a process group of its own, so that its workers can be stopped too
            )
        weakref.finalize(self, _signal_group, self._process, signal.SIGKILL)  # also when the interpreter ends
        try:
            await self._wait_until_healthy()
        except BaseException:
            await self.stop()
            raise

    async def _wait_until_healthy(self) -> None:
        end = time.monotonic() + self._settings.start_timeout_s
        while time.monotonic() < end:
            if not self.alive:
                tail = self.log_tail()
                if "No module named 'vllm'" in tail or "No module named vllm" in tail:
                    raise MissingDependencyError(
                        f"vLLM is not installed for this Python: {install_command('vllm')}, or set "
                        "rollout.vllm.python to a Python that has it"
                    )
                if self._settings.sleep and CANT_SLEEP in tail:
                    raise FeatureUnavailableError(
                        "rollout.vllm.sleep: vLLM can't release this device's memory: leave the key out"
                    )
                raise EngineError(f"the vLLM server ended while starting: {reason_in(tail)} (log: {self.log_file})")
            if await self.healthy():
                return
            await asyncio.sleep(0.25)
        raise EngineError(
            f"the vLLM server was not up after {self._settings.start_timeout_s:.0f} s (rollout.vllm.start_timeout); it "
            f"said last: {reason_in(self.log_tail())} (log: {self.log_file})"
        )

    async def healthy(self) -> bool:
        """Whether it answers a health check."""
        import httpx

        # plain HTTP on this machine; loading certificates for it would take longer than the check
        async with httpx.AsyncClient(timeout=self._settings.heartbeat_s, verify=False) as http:
            try:
                answer = await http.get(f"{self.base_url}/health")
            except httpx.HTTPError:
                return False
        return answer.status_code == 200

    async def stop(self) -> None:
        """End it and its workers; kill those that don't end in time. The last to end is Python's resource tracker,
        which removes their shared memory."""
        process = self._process
        if process is None:
            return
        _signal_group(process, signal.SIGTERM)
        end = time.monotonic() + STOP_SECONDS
        while (process.poll() is None or _group_lives(process)) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        _signal_group(process, signal.SIGKILL)
        await asyncio.to_thread(process.wait)

    def log_tail(self) -> str:
        """The end of its output."""
        text = self.log_file.read_text(errors="replace") if self.log_file.exists() else ""
        return text[-TAIL_CHARACTERS:]


def reason_in(log: str) -> str:
    """The line of a server's log that says best why it ended: the last that names an error, else the last."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if ERROR_LINE.search(line) and not any(words in line for words in SAYS_NOTHING)]
    return (named or lines or ["it said nothing"])[-1][:500]


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """To the whole process group, which may outlive its first process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    """Whether anything of the process group is left."""
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
