"""How vLLM is started: settings, command-line arguments, environment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ajet.schema.errors import ConfigError

MODEL_NAME = "ajet"
"""The model's name on a server of ours."""
WORKER_FOLDER = Path(__file__).parent / "in_worker"
"""Goes on the Python path of vLLM's processes. It holds nothing but the modules of `WORKER` and `SERVER_KEY`."""
WORKER = "ajet_worker.AjetWorker"
RELOAD = "ajet_reload_weights"
"""Its method that loads new weights from a folder."""
SERVER_KEY = "ajet_server_key.ServerKey"
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
            max_restarts=rollout.vllm.max_restarts,
            sleep=rollout.vllm.sleep,
            devices=tuple(rollout.vllm.devices),
            extra_args=tuple(rollout.vllm.extra_args),
        )


def worker_arguments() -> list[str]:
    """Mix our methods into vLLM's workers."""
    return ["--worker-extension-cls", WORKER]


LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `--max-lora-rank`."""


def _lora_arguments(rank: int) -> list[str]:
    if not rank:
        return []
    return ["--enable-lora", "--max-lora-rank", str(next((each for each in LORA_RANKS if each >= rank), rank))]


def server_arguments(settings: VllmSettings, port: int, host: str = "127.0.0.1") -> list[str]:
    """Command-line arguments for a vLLM server."""
    return ["--served-model-name", MODEL_NAME, "--host", host, "--port", str(port), *engine_arguments(settings)]


def engine_arguments(settings: VllmSettings) -> list[str]:
    """Command-line arguments of the engine itself, on a server or in this process."""
    return [
        "--model",
        settings.model,
        "--dtype",
        settings.dtype,
        "--max-model-len",
        str(settings.max_model_len),
        "--max-num-seqs",
        str(settings.max_num_seqs),
        "--tensor-parallel-size",
        str(settings.tensor_parallel),
        "--seed",
        str(settings.seed),
        # logprobs at the request's temperature; the default, `raw_logprobs`, means at temperature 1
        "--logprobs-mode",
        "processed_logprobs",
        "--max-logprobs",
        "20",
        "--gpu-memory-utilization",
        str(settings.gpu_memory_utilization),
        *(["--enable-sleep-mode"] if settings.sleep else []),
        *_lora_arguments(settings.lora_rank),
        *settings.extra_args,
    ]


def server_environment(settings: VllmSettings, replica: int = 0, key: str = "") -> dict[str, str]:
    """Environment variables for a server with this key, to be set on top of our own."""
    count = settings.tensor_parallel
    devices = settings.devices[replica * count : (replica + 1) * count]
    if settings.devices and len(devices) < count:
        raise ConfigError(
            f"rollout.vllm.devices names {len(settings.devices)} GPUs, but {settings.replicas} replicas on {count} "
            f"GPUs each need {settings.replicas * count}"
        )
    return {
        **({"CUDA_VISIBLE_DEVICES": ",".join(map(_as_shown, devices))} if devices else {}),
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
