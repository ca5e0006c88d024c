"""One vLLM server: started on a free port, waited for, watched, stopped with its whole process group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from ajet.engine.vllm.settings import VllmSettings, server_arguments, server_environment
from ajet.schema.errors import EngineError, MissingDependencyError

STOP_SECONDS = 15.0
"""How long a server may take to leave before it is killed."""
TAIL_CHARACTERS = 3000
"""How much of its log an error message quotes."""
MODULE = "vllm.entrypoints.openai.api_server"

DIE_WITH_US = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"
"""Runs a command that the kernel tells to end when the thread that started it is gone, were it killed: a server left
behind would keep a GPU's memory. (1: PR_SET_PDEATHSIG, 15: SIGTERM)"""

CommandLine = Callable[[VllmSettings, int], list[str]]


def vllm_command(settings: VllmSettings, port: int) -> list[str]:
    """How a server is started."""
    return [settings.python, "-m", MODULE, *server_arguments(settings, port)]


class VllmServer:
    """A server process. `start` may be called again after it died."""

    def __init__(self, settings: VllmSettings, index: int, command: CommandLine = vllm_command) -> None:
        self._settings = settings
        self._command = command
        self._index = index
        self._process: subprocess.Popen[bytes] | None = None
        folder = settings.log_folder or Path(tempfile.mkdtemp(prefix="ajet-vllm-"))
        folder.mkdir(parents=True, exist_ok=True)
        self.log_file = folder / f"vllm-{index}.log"
        self.port = 0
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
            raise MissingDependencyError(f"vLLM's Python {command[0]} can't be started (rollout.vllm.python)")
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", DIE_WITH_US, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **server_environment(self._settings, self._index)},
                start_new_session=True,  # so that its workers can be stopped with it
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
                        "vLLM is not installed for this Python: pip install 'agentjet[vllm]', or name the Python that "
                        "has it in rollout.vllm.python"
                    )
                raise EngineError(f"the vLLM server ended while starting (log: {self.log_file}):\n{tail}")
            if await self.healthy():
                return
            await asyncio.sleep(0.25)
        raise EngineError(
            f"the vLLM server was not up after {self._settings.start_timeout_s:.0f} s (log: {self.log_file}):\n"
            f"{self.log_tail()}"
        )

    async def healthy(self) -> bool:
        """Whether it answers now."""
        import httpx

        async with httpx.AsyncClient(timeout=self._settings.heartbeat_s) as http:
            try:
                answer = await http.get(f"{self.base_url}/health")
            except httpx.HTTPError:
                return False
        return answer.status_code == 200

    async def stop(self) -> None:
        """End it and its workers; kill what does not leave."""
        process = self._process
        if process is None:
            return
        _signal_group(process, signal.SIGTERM)
        end = time.monotonic() + STOP_SECONDS
        while process.poll() is None and time.monotonic() < end:
            await asyncio.sleep(0.05)
        _signal_group(process, signal.SIGKILL)
        await asyncio.to_thread(process.wait)

    def log_tail(self) -> str:
        """The end of what it printed."""
        text = self.log_file.read_text(errors="replace") if self.log_file.exists() else ""
        return text[-TAIL_CHARACTERS:]


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """To the group that `start_new_session` made: it may live on after its first process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
