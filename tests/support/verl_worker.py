"""verl's training worker on the CPU, without Ray: Trinity trains with it too."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def process_group() -> Iterator[None]:
    """A group of one process, as the worker finds it under Ray."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    import torch

    yield
    torch.distributed.destroy_process_group()


def training_worker(path: str, **optimizer: Any) -> Any:
    """The worker of this model in float32, its weights fresh; `optimizer`: verl's settings of it."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=path,
                use_remove_padding=False,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                model_dtype="fp32",
                use_torch_compile=False,
                mixed_precision={"param_dtype": "fp32"},
                use_dynamic_bsz=True,
                max_token_len_per_gpu=150,
                infer_max_token_len_per_gpu=150,
            ),
            optimizer_config=FSDPOptimizerConfig(**optimizer),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return worker
