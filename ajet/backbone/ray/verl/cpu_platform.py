"""verl without GPUs, for tests and laptops (`AJET_PLATFORM=cpu`): its platform, and its server of rollouts.

verl has registries for platforms and rollout servers. Four places have none; they are replaced here,
and tests check them against the installed verl version:

- the table of rollout adapters is a private dict (`_ROLLOUT_REGISTRY`);
- torch refuses a process group for `cpu:gloo,cpu:gloo`, which names one device twice;
- FSDP2's CPU offload pins memory, which needs an accelerator;
- `PlatformBase` has no default for the CPU, and verl calls CUDA's names on its `device_module`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from ajet.backbone.ray.verl.config import CPU_ROLLOUT, VERSIONS
from ajet.engine.model_source import ModelSource
from ajet.engine.torch import TorchEngine, TorchEngineSettings
from ajet.schema.chat import GenerateRequest, Sampling

PROCESS_GROUP = "cpu:gloo"


class _CpuDevice(types.ModuleType):
    """Takes the place of `torch.cuda` in verl: what the CPU has, and zero for everything else."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, None) or (lambda *args, **kwargs: 0)

    @staticmethod
    def is_available() -> bool:
        return False

    @staticmethod
    def mem_get_info(*_: Any) -> tuple[int, int]:
        return 0, 0

    @staticmethod
    def get_device_name(*_: Any) -> str:
        return "CPU"


def register() -> None:
    _register_platform()
    _name_the_device_once()
    _offload_without_pinning()
    _register_rollout()


def _register_platform() -> None:
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry

    @PlatformRegistry.register(platform="cpu")
    class PlatformCPU(PlatformBase):  # type: ignore[misc]
        device_name = "cpu"
        vendor_name = "cpu"
        device_module = _CpuDevice("ajet_verl_cpu_device")

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return False  # never detected, only chosen

        def current_device(self) -> torch.device:
            return torch.device("cpu")

        def device_count(self) -> int:
            return 1

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        manual_seed_all = manual_seed

        def _nothing(self, *_: Any) -> None: ...

        set_device = synchronize = set_allocator_settings = empty_cache = _nothing
        profiler_start = profiler_stop = cudart = _nothing

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def ray_resource_name(self) -> str:
            return "GPU"  # the launcher announces one to Ray: verl's placement counts it

        def ray_noset_envvars(self) -> list[str]:
            return []

        def is_ipc_supported(self) -> bool:
            return False


def _name_the_device_once() -> None:
    import verl.utils.distributed as distributed

    original = distributed.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialise(timeout_second: int | None = None, backend: str | None = None) -> Any:
        return original(timeout_second, backend or PROCESS_GROUP)

    distributed.initialize_global_process_group_ray = initialise


def _offload_without_pinning() -> None:
    import verl.workers.engine.fsdp.transformer_impl as fsdp
    from torch.distributed.fsdp import CPUOffloadPolicy

    fsdp.CPUOffloadPolicy = lambda pin_memory=False: CPUOffloadPolicy(pin_memory=False)


def _register_rollout() -> None:
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(CPU_ROLLOUT, lambda: CpuReplica)
    base._ROLLOUT_REGISTRY[(CPU_ROLLOUT, "async")] = "ajet.backbone.ray.verl.cpu_platform.CpuServerAdapter"


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
            extra_fields={
                "global_steps": completion.versions[-1][1],
                "min_global_steps": completion.versions[0][1],
                VERSIONS: completion.versions,
            },
        )

    async def load_weights(self, weights: dict[str, Any], version: int) -> None:
        # Ray's arrays lie in its store and can't be written to; they are read once, while being copied
        tensors = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
        await self._engine.load_weights(tensors, version)
        self._version = version

    # Calls that verl makes to every server, and that mean nothing without a GPU.

    async def _nothing(self, *_: Any, **__: Any) -> None: ...

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = _nothing


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
