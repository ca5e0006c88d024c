"""The memory plan on the terminal: for `ajet validate --plan`, and before a run begins."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajet.backbone.memory_plan import Device
    from ajet.config import BackboneName, Config

log = logging.getLogger("ajet.backbone.memory")

SMALL_BYTES = 100 * 2**20
"""Weights below this are trained on any CPU: a run says nothing about them."""


def show_plan(config: Config, backbone: BackboneName, gpu: float | None) -> list[str]:
    """Print the plan for this machine, or for a GPU of so many GiB. Returns what is wrong."""
    from ajet.backbone.memory_changes import changes_that_help
    from ajet.backbone.memory_plan import GIB, Device, plan_memory
    from ajet.schema.install import require_training

    require_training("a memory plan")
    print(flush=True)
    device = Device.here(backbone) if gpu is None else Device("cuda", int(gpu * GIB))
    plan = plan_memory(config, backbone, device)
    if plan is None:
        print(_no_plan(config, backbone, device))
        return []
    changes = changes_that_help(config, backbone, device, plan) if plan.fits is False else []
    print("\n".join(plan.lines(changes)))
    if plan.fits is not False:
        return []
    size = (device.capacity or 0) / GIB
    found = f"{', '.join(change.keys for change in changes)}" or "a smaller model, or more GPUs (--backbone=verl)"
    needs = f"{config.ajet.model.path} needs {plan.total / GIB:.1f} GiB and there are {size:.1f}"
    return [f"{needs}; less is needed with {found}"]


def announce_plan(config: Config, backbone: BackboneName) -> None:
    """A run's first lines. Raises a `ConfigError` if the model can't fit, whatever the batch."""
    from ajet.backbone.memory_changes import changes_that_help, refuse_if_hopeless
    from ajet.backbone.memory_plan import Device, plan_memory

    device = Device.here(backbone)
    if backbone != "local" or not _is_worth_it(config, device):
        return
    plan = plan_memory(config, backbone, device)
    if plan is None:
        log.info("%s", _no_plan(config, backbone, device))
        return
    changes = changes_that_help(config, backbone, device, plan) if plan.fits is False else []
    refuse_if_hopeless(plan, changes)
    say = log.warning if plan.fits is False else log.info
    say("%s", "\n    ".join(plan.lines(changes)))


def _is_worth_it(config: Config, device: Device) -> bool:
    folder = Path(config.ajet.model.path).expanduser()
    if device.kind == "cuda":
        return True
    if config.ajet.model.path.startswith("tiny:"):
        return False
    return not folder.is_dir() or sum(file.stat().st_size for file in folder.glob("*.safetensors")) > SMALL_BYTES


def _no_plan(config: Config, backbone: BackboneName, device: Device) -> str:
    from ajet.backbone.memory_plan import has_shape

    if backbone not in ("local", "verl", "trinity") or config.ajet.trainer_common.val_only:
        return f"memory: not planned, because {backbone} trains no weights here"
    if has_shape(config, device):
        return f"memory: not planned, because a pass of {config.ajet.model.path} can't be computed without its weights"
    return (
        f"memory: not planned, because no config.json of {config.ajet.model.path} is at hand: put its folder into "
        "ajet.model.path, or load it once"
    )
