"""How vLLM runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ajet.schema.errors import ConfigError

MODEL_NAME = "ajet"
"""What a server of ours calls its model."""
MODULE = "vllm.entrypoints.openai.api_server"
"""What Python runs to start a server."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Of one engine, replicas and all."""

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
    """Seconds between two looks at each server."""
    heartbeats_to_hang: int = 6
    """A server that answers none of so many looks in a row hangs, and is started again."""
    sleep: bool = False
    """Leave the GPU's memory to a trainer between `pause` and `resume`."""
    devices: tuple[int, ...] = ()
    """GPUs, `tensor_parallel` of them for each replica in turn. None named: those that the environment shows."""
    extra_args: tuple[str, ...] = ()
    log_folder: Path | None = None
    """Where each server's output is kept. None: a temporary folder, named when a server fails."""

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


def server_arguments(settings: VllmSettings, port: int, host: str = "127.0.0.1") -> list[str]:
    """The arguments of vLLM's server that make it speak as ajet needs it."""
    return ["--served-model-name", MODEL_NAME, "--host", host, "--port", str(port), *engine_arguments(settings)]


def engine_arguments(settings: VllmSettings) -> list[str]:
    """Those of them that are about the engine, not about serving: for an engine inside this process, too."""
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
        # at the request's temperature; the default, `raw_logprobs`, would be those of temperature 1
        "--logprobs-mode",
        "processed_logprobs",
        "--max-logprobs",
        "20",
        "--gpu-memory-utilization",
        str(settings.gpu_memory_utilization),
        *(["--enable-sleep-mode"] if settings.sleep else []),
        *settings.extra_args,
    ]


def server_environment(settings: VllmSettings, replica: int = 0) -> dict[str, str]:
    """Variables that a server is started with, over the caller's own."""
    count = settings.tensor_parallel
    devices = settings.devices[replica * count : (replica + 1) * count]
    if settings.devices and len(devices) < count:
        raise ConfigError(
            f"rollout.vllm.devices names {len(settings.devices)} GPUs, and {settings.replicas} engines of {count} need "
            f"{settings.replicas * count}"
        )
    return {
        **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}),
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and collective_rpc exist in this mode only
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
