"""The embedded engine as one of Trinity's rollout models, on the CPU, and the allocator that starts it.

Weights come through Trinity's synchronizer, from memory or from its checkpoint; generation pauses while they change, so
each reply is drawn under one policy version.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import load_file
from trinity.common.config import InferenceModelConfig
from trinity.common.constants import SyncMethod
from trinity.common.models.allocator import Allocator, get_model_wrapper
from trinity.common.models.model import InferenceModel, ModelWrapper
from trinity.manager.synchronizer import Synchronizer

from ajet.engine.model_source import ModelSource
from ajet.engine.torch.commands import TorchEngineSettings
from ajet.engine.torch.engine import TorchEngine
from ajet.schema.chat import Completion, GenerateRequest


class CpuRolloutModel(InferenceModel):  # type: ignore[misc]
    """One engine in one Ray actor."""

    def __init__(self, config: InferenceModelConfig) -> None:
        super().__init__(config)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        settings = TorchEngineSettings(max_model_len=config.max_model_len or 4096, seed=config.seed, dtype="float32")
        self._engine = TorchEngine(ModelSource.resolve(str(config.model_path)), settings)
        self._version = 0

    async def prepare(self) -> None:
        """Return when the engine can draw."""
        await self._engine.ready()
        self._synchronizer = Synchronizer.get_actor(namespace=self.config.ray_namespace)
        self._prepared = True

    async def draw(self, request: GenerateRequest) -> Completion:
        """Our engine's own call."""
        return await self._engine.generate(request)

    async def sync_model_weights(self, model_version: int, method: SyncMethod, timeout: float = 1200) -> int:
        """Serve the newest weights."""
        if method == SyncMethod.CHECKPOINT:
            folder = (
                Path(str(self.config.checkpoint_job_dir)) / f"global_step_{model_version}" / "actor" / "huggingface"
            )
            weights = load_file(folder / "model.safetensors")
        else:
            weights, model_version = await self._synchronizer.get_model_state_dict.remote()
        if weights:
            # Ray's tensors lie in its store and can't be written to
            await self._engine.load_weights({name: tensor.clone() for name, tensor in weights.items()}, model_version)
            self._version = model_version
        return self._version

    def get_model_version(self) -> int:
        return self._version

    async def shutdown(self) -> None:
        await self._engine.aclose()


class CpuAllocator(Allocator):  # type: ignore[misc]
    """Trinity's allocator, with our rollout model for each of its engines."""

    async def create_engine(self, config: InferenceModelConfig, role: str, engine_id: int) -> ModelWrapper:
        from copy import deepcopy

        config = deepcopy(config)
        config.engine_id = engine_id
        name = self.get_actor_name(role, engine_id, 0)
        return await get_model_wrapper(
            CpuRolloutModel, config, self.pg, [(name, self.bundle_result.actor_bundle_map[name])]
        )
