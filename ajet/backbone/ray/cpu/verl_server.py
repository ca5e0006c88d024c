"""The embedded engine as a rollout server of verl, on the CPU: a server actor, its replica, and the trainer's adapter.

All weights come in memory from the trainer's process; generation pauses while they change, so each reply is drawn under
one policy version.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from ajet.engine.model_source import ModelSource
from ajet.engine.torch.commands import TorchEngineSettings
from ajet.engine.torch.engine import TorchEngine
from ajet.schema.chat import GenerateRequest, Sampling

SERVER = "ajet_cpu_server_{rank}"
"""Name of a replica's server actor: the trainer's workers find it by their rank."""
CONCURRENCY = 1000
"""Requests and control calls that a server takes at a time; the engine queues what it can't draw yet."""


class CpuServer:
    """One engine in one Ray actor."""

    def __init__(self, model_path: str, max_model_len: int, max_num_seqs: int, seed: int) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        settings = TorchEngineSettings(max_model_len=max_model_len, max_num_seqs=max_num_seqs, seed=seed)
        self._engine = TorchEngine(ModelSource.resolve(model_path), settings)
        self._version: int | None = None

    async def ready(self) -> None:
        """Return when the engine can draw."""
        await self._engine.ready()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """verl's token-in, token-out call."""
        if self._version is None:
            raise RuntimeError("a rollout server was asked for tokens before it had the trainer's weights")
        known = set(Sampling.__dataclass_fields__)
        fields = {key: value for key, value in sampling_params.items() if key in known}
        for name in ("stop", "stop_token_ids"):
            fields[name] = tuple(fields.get(name) or ())
        request = GenerateRequest(list(prompt_ids), Sampling(**fields), session_id=request_id)
        completion = await self._engine.generate(request)
        return TokenOutput(
            token_ids=completion.token_ids,
            log_probs=completion.logprobs,
            stop_reason={"abort": "aborted"}.get(completion.finish_reason, "completed"),
            extra_fields={"global_steps": completion.versions[-1][1], "min_global_steps": completion.versions[0][1]},
        )

    async def load_weights(self, weights: dict[str, Any], version: int) -> None:
        """Serve these weights from now on."""
        # Ray's arrays lie in its store and can't be written to; they are read once, while being copied
        tensors = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
        await self._engine.load_weights(tensors, version)
        self._version = version

    # Calls that verl makes to every server, and that mean nothing without a GPU.

    async def wake_up(self, *_: Any, **__: Any) -> None: ...

    async def sleep(self, *_: Any, **__: Any) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def abort_all_requests(self, *_: Any, **__: Any) -> None: ...

    async def resume_generation(self) -> None: ...

    async def start_profile(self, **_: Any) -> None: ...

    async def stop_profile(self) -> None: ...


class CpuReplica(RolloutReplica):  # type: ignore[misc]
    """In verl's driver: starts the server."""

    async def launch_servers(self) -> None:
        name = SERVER.format(rank=self.replica_rank)
        server = (
            ray.remote(CpuServer)
            .options(name=name, num_cpus=0, max_concurrency=CONCURRENCY)
            .remote(self.model_config.path, self.config.max_model_len, self.config.max_num_seqs, self.config.seed)
        )
        await server.ready.remote()
        self._server_address = name
        self._server_handle = server
        self.servers = [server]


class CpuServerAdapter(BaseRollout):  # type: ignore[misc]
    """In a trainer's worker: hands weights to the server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self._rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        """All parameters, as numpy arrays through Ray's object store."""
        from verl.workers.rollout.utils import ensure_async_iterator

        arrays = {name: tensor.detach().float().cpu().numpy() async for name, tensor in ensure_async_iterator(weights)}
        server = await asyncio.to_thread(ray.get_actor, SERVER.format(rank=self._rank))
        await server.load_weights.remote(arrays, int(global_steps or 0))
