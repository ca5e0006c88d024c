"""`VllmServer`: one vLLM server that we start, ask for its health, and stop; `VllmSettings`, its command line and
environment.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ajet.schema.errors import (
    ConfigError,
    EngineError,
    FeatureUnavailableError,
    MissingDependencyError,
)
from ajet.schema.install import install_command
from ajet.system.processes import ending_with_us, output_of

MODEL_NAME = "ajet"
"""The model's name on a server of ours."""
WORKER_FOLDER = Path(__file__).parent / "in_worker"
"""Goes on the Python path of vLLM's processes. It holds nothing but the module of `WORKER` and `SERVER_KEY`."""
WORKER = "ajet_in_vllm.AjetWorker"
RELOAD = "ajet_reload_weights"
"""Its method that loads new weights from a folder."""
SERVER_KEY = "ajet_in_vllm.ServerKey"
"""Lets nobody but us use a server: vLLM's routes for weights and workers would be open to all local programs."""
KEY_VARIABLE = "AJET_SERVER_KEY"
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
"""`python -m` this starts a server."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Settings of one engine with all its replicas."""

    model: str
    """A Hugging Face folder or id."""
    max_model_len: int = 18000
    max_num_seqs: int = 64
    replicas: int = 1
    tensor_parallel: int = 1
    seed: int = 0
    dtype: str = "auto"
    gpu_memory_utilization: float = 0.6
    python: str = sys.executable
    start_timeout_s: float = 600.0
    max_restarts: int = 3
    heartbeat_s: float = 5.0
    """Seconds between two health checks of a server."""
    heartbeats_to_hang: int = 6
    """A server that fails this many health checks in a row is restarted."""
    sleep: bool = False
    """Leave the GPU's memory to the trainer between `pause` and `resume`."""
    devices: tuple[int, ...] = ()
    """GPUs, counted among those that the environment shows; each replica takes the next `tensor_parallel` of them.
    Empty: all."""
    lora_rank: int = 0
    """The largest rank of a LoRA adapter that may be loaded. 0: none."""
    notes_experts: bool = False
    """Say of each token which experts of a mixture it went to. vLLM's CPU build can't."""
    extra_args: tuple[str, ...] = ()
    log_folder: Path | None = None
    """Where servers write their output. None: a temporary folder, which errors name."""

    @classmethod
    def from_config(cls, config: Any) -> VllmSettings:
        """Read `ajet.model`, `ajet.rollout` and `ajet.rollout.vllm`."""
        from ajet.engine.model_source import ModelSource

        rollout = config.ajet.rollout
        return cls(
            model=ModelSource.resolve(config.ajet.model.path).path,
            max_model_len=rollout.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            replicas=rollout.n_vllm_engine,
            tensor_parallel=rollout.tensor_model_parallel_size,
            seed=rollout.seed,
            dtype=config.ajet.model.dtype,
            gpu_memory_utilization=rollout.vllm.gpu_memory_utilization,
            python=rollout.vllm.python or sys.executable,
            start_timeout_s=rollout.vllm.start_timeout,
            sleep=rollout.vllm.sleep,
            devices=tuple(rollout.vllm.devices),
            notes_experts=rollout.routing_replay,
            extra_args=tuple(rollout.vllm.extra_args),
        )


CPU_ARGUMENTS = ("--no-enable-chunked-prefill", "--kv-cache-memory-bytes", str(4 << 30))
"""vLLM's CPU build dies if it computes a prompt with a seed in chunks, and takes most of the machine's memory."""
CPU_VARIABLES = {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Compiling takes minutes at each start; threads bound to cores would fight with the trainer's and other servers'."""
_BUILD = (
    "from importlib.metadata import distributions; "
    "print([(one.name, one.version) for one in distributions() if one.name in ('vllm', 'vllm-cpu')])"
)


@functools.cache
def is_cpu_build(python: str) -> bool:
    """Return whether this Python's vLLM is built for CPUs. As vLLM does, judge by its package's name and version."""
    return "cpu" in (output_of(python, "-c", _BUILD, within_s=60.0) or "")


def cpu_arguments(settings: VllmSettings) -> list[str]:
    """Return the arguments that the CPU build needs. `auto` means the trainer's number format on a CPU."""
    return [*(["--dtype", "float32"] if settings.dtype == "auto" else []), *CPU_ARGUMENTS]


def cpu_variables() -> dict[str, str]:
    """Return the variables that the CPU build needs and the user's environment doesn't set."""
    return {name: value for name, value in CPU_VARIABLES.items() if name not in os.environ}


LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `--max-lora-rank`."""


def _lora_arguments(rank: int) -> list[str]:
    if not rank:
        return []
    return ["--enable-lora", "--max-lora-rank", str(next((each for each in LORA_RANKS if each >= rank), rank))]


def server_arguments(settings: VllmSettings, port: int, host: str = "127.0.0.1") -> list[str]:
    """Command-line arguments for a vLLM server."""
    options = {
        "--served-model-name": MODEL_NAME,
        "--host": host,
        "--port": port,
        "--model": settings.model,
        "--dtype": settings.dtype,
        "--max-model-len": settings.max_model_len,
        "--max-num-seqs": settings.max_num_seqs,
        "--tensor-parallel-size": settings.tensor_parallel,
        "--seed": settings.seed,
        # logprobs at the request's temperature; the default, `raw_logprobs`, means at temperature 1
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": 20,
        "--gpu-memory-utilization": settings.gpu_memory_utilization,
    }
    return [
        *(word for name, value in options.items() for word in (name, str(value))),
        "--enable-prompt-tokens-details",  # how much of a prompt came from the prefix cache
        *(["--enable-sleep-mode"] if settings.sleep else []),
        *_lora_arguments(settings.lora_rank),
        *(["--enable-return-routed-experts"] if settings.notes_experts else []),
        *(cpu_arguments(settings) if is_cpu_build(settings.python) else []),
        *settings.extra_args,  # the last of two that contradict each other counts
    ]


def server_environment(settings: VllmSettings, replica: int = 0, key: str = "") -> dict[str, str]:
    """Environment variables for a server with this key, to be set on top of our own."""
    count = settings.tensor_parallel
    devices = settings.devices[replica * count : (replica + 1) * count]
    return {
        **({"CUDA_VISIBLE_DEVICES": ",".join(map(_as_shown, devices))} if devices else {}),
        **(cpu_variables() if is_cpu_build(settings.python) else {}),
        "PYTHONPATH": os.pathsep.join([str(WORKER_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and collective_rpc exist only in this mode
        KEY_VARIABLE: key,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _as_shown(device: int) -> str:
    """What the environment calls the GPU with this number among those that it shows."""
    shown = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not shown:
        return str(device)
    if device >= len(shown):
        raise ConfigError(
            f"rollout.vllm.devices: there is no GPU {device}: CUDA_VISIBLE_DEVICES shows {len(shown)}, numbered from 0"
        )
    return shown[device]


STOP_SECONDS = 15.0
"""How long a server may take to end before it is killed."""
TAIL_BYTES = 16 << 20
"""How much of a server's log is searched for its last error: vLLM repeats a traceback for each request in flight."""

ERROR_LINE = re.compile(r"\b\w*(Error|Exception)\b: .|\berror: |^ +Value error, ")
LOG_PREFIX = re.compile(r"^\(.+? pid=\d+\) (?P<level>[A-Z]+) \S+ \S+ \[\S+\] ")
SAYS_NOTHING = (
    "See root cause above", "Engine core initialization failed", "stack trace above", "stack trace (above)",
    "validation error for",
)  # fmt: skip
"""vLLM's last error points to an earlier one, pydantic's to a later line."""
REFUSED_ARGUMENT = re.compile(r": error: (unrecognized arguments: .+|argument .+)")
CANT_SLEEP = "Sleep mode is not supported"

CommandLine = Callable[[VllmSettings, int], list[str]]


def vllm_command(settings: VllmSettings, port: int) -> list[str]:
    """The command that starts a server."""
    ours = ["--middleware", SERVER_KEY, "--worker-extension-cls", WORKER]
    return [settings.python, "-m", SERVER_MODULE, *ours, *server_arguments(settings, port)]


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
        self._log_start = 0

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
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                ending_with_us(command),  # an orphaned server would keep the GPU's memory
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **server_environment(self._settings, self._index, self.key)},
                start_new_session=True,  # a process group of its own, so that its workers can be stopped too
            )
        # also when the interpreter ends
        self._at_exit = weakref.finalize(self, _signal_group, self._process, signal.SIGKILL)
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
                        "rollout.vllm.python to a Python that has it, or use the embedded engine: rollout.engine=torch"
                    )
                if self._settings.sleep and CANT_SLEEP in tail:
                    raise FeatureUnavailableError(
                        "rollout.vllm.sleep: vLLM can't release this device's memory: leave the key out"
                    )
                if refused := REFUSED_ARGUMENT.search(tail):
                    raise ConfigError(f"rollout.vllm.extra_args: {refused[1]} (log: {self.log_file})")
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

        # plain HTTP on this machine, which no proxy reaches; loading certificates would take longer than the check
        async with httpx.AsyncClient(timeout=self._settings.heartbeat_s, verify=False, trust_env=False) as http:
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
        while (process.poll() is None or _signal_group(process, 0)) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        _signal_group(process, signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        self._process = None  # its number may soon be another's
        self._at_exit.detach()

    def log_tail(self) -> str:
        """Return what it has written since it was last started, or the end of that."""
        with self.log_file.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - TAIL_BYTES))
            return log.read().decode(errors="replace")


def error_in(log: str) -> str:
    """Return the last error that a server's log names, without vLLM's prefix; an empty text if it names none."""
    for line in reversed(log.splitlines()):
        prefix = LOG_PREFIX.match(line)
        is_hint = prefix is not None and prefix["level"] in ("DEBUG", "INFO", "WARNING")
        if not is_hint and ERROR_LINE.search(line) and not any(words in line for words in SAYS_NOTHING):
            return line[prefix.end() if prefix else 0 :].partition(" [type=")[0].strip()[:500]
    return ""


def reason_in(log: str) -> str:
    """Return the line of a server's log that says best why it ended: the last error, else the last line."""
    return error_in(log) or (log.strip().splitlines() or ["it said nothing"])[-1].strip()[:500]


def _signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal (0: none) to the whole process group, which may outlive its first process. Returns whether anything
    of it is left."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
