"""verl without GPUs, for tests and laptops: `VERL_PLATFORM=cpu`.

verl has registries for platforms and rollout servers. Four places have none; they are replaced here,
and tests check them against the installed verl version:

- the table of rollout adapters is a private dict (`_ROLLOUT_REGISTRY`);
- torch refuses a process group for `cpu:gloo,cpu:gloo`, which names one device twice;
- FSDP2's CPU offload pins memory, which needs an accelerator;
- `PlatformBase` has no default for the CPU, and verl calls CUDA's names on its `device_module`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ajet.backbone.ray.verl.config import CPU_ROLLOUT

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
    """Make the CPU known to verl."""
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

        def set_device(self, device_index: int) -> None: ...

        def synchronize(self, device_index: int | None = None) -> None: ...

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None: ...

        def empty_cache(self) -> None: ...

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def profiler_start(self) -> None: ...

        def profiler_stop(self) -> None: ...

        def ray_resource_name(self) -> str:
            return "GPU"  # the launcher announces one to Ray: verl's placement counts it

        def ray_noset_envvars(self) -> list[str]:
            return []

        def is_ipc_supported(self) -> bool:
            return False

        def cudart(self) -> None:
            return None


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

    def load() -> Any:
        from ajet.backbone.ray.cpu.verl_server import CpuReplica

        return CpuReplica

    RolloutReplicaRegistry.register(CPU_ROLLOUT, load)
    base._ROLLOUT_REGISTRY[(CPU_ROLLOUT, "async")] = "ajet.backbone.ray.cpu.verl_server.CpuServerAdapter"
