"""What a memory plan says to a person: on the terminal, for `ajet validate --plan` and before a run begins.

If more memory is needed than there is, it says what to change in the configuration, the cheapest first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.backbone.memory_plan import (
    GIB,
    Device,
    MemoryPlan,
    PlanChange,
    amount,
    conversation_bytes,
    longest_pack,
    meta_model,
    plan_memory,
)
from ajet.backbone.training_settings import logits_chunk
from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    from ajet.config import BackboneName, Config

log = logging.getLogger("ajet.backbone.memory")

SMALL_BYTES = 100 * 2**20
"""Weights below this are trained on any CPU: a run says nothing about them."""


def show_plan(config: Config, backbone: BackboneName, gpu: float | None) -> list[str]:
    """Print the plan for this machine, or for a GPU of so many GiB. Returns what is wrong."""
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


def announce_plan(config: Config) -> None:
    """The first lines of a run on `local`. Raises a `ConfigError` if the model can't fit, whatever the batch."""
    device = Device.here("local")
    if device.kind == "cpu" and _is_small(config.ajet.model.path):
        return
    plan = plan_memory(config, "local", device)
    if plan is None:
        log.info("%s", _no_plan(config, "local", device))
        return
    changes = changes_that_help(config, "local", device, plan) if plan.fits is False else []
    refuse_if_hopeless(plan, changes)
    say = log.warning if plan.fits is False else log.info
    say("%s", "\n    ".join(plan.lines(changes)))


def _is_small(model: str) -> bool:
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return model.startswith("tiny:")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) <= SMALL_BYTES


def _no_plan(config: Config, backbone: BackboneName, device: Device) -> str:
    if backbone not in ("local", "verl", "trinity") or config.ajet.trainer_common.val_only:
        return f"memory: not planned, because {backbone} trains no weights here"
    if meta_model(config, device) is not None:
        return f"memory: not planned, because a pass of {config.ajet.model.path} can't be computed without its weights"
    return (
        f"memory: not planned, because no config.json of {config.ajet.model.path} is at hand: put its folder into "
        "ajet.model.path, or load it once"
    )


KL_TERM = "trainer_common.use_kl_loss"
PART = 4
"""How many times less tokens of a pass are proposed than there may be."""
CONVERSATIONS = 8
"""Conversations of full length for which a smaller KV cache that is proposed has room."""


def changes_that_help(config: Config, backbone: BackboneName, device: Device, plan: MemoryPlan) -> list[PlanChange]:
    """What to change until it fits, the cheapest first, each together with those before it."""
    present = config.model_copy(deep=True)
    best = plan.total
    found: list[PlanChange] = []
    for key, value in _remedies(config, backbone, device):
        trial = present.model_copy(deep=True)
        group, _, name = f"ajet.{key}".rpartition(".")
        setattr(attrgetter(group)(trial), name, value)
        now = plan_memory(trial, backbone, device)
        if now is None or now.total >= best:
            continue
        present, best = trial, now.total
        found.append(PlanChange(f"{key}: {str(value).lower()}", best))
        if now.fits:
            break
    if present.ajet.model.lora.enabled:  # whose reference is the base model: the KL term takes nothing
        found = [change for change in found if change.key != KL_TERM]
    return found


def refuse_if_hopeless(plan: MemoryPlan, changes: list[PlanChange]) -> None:
    """Raise if the run can't fit, whatever its batches."""
    if not plan.hopeless:
        return
    fixed = sum(part.size for part in plan.parts if part.fixed)
    capacity = plan.device.capacity or 0
    place = "the GPU" if plan.device.kind == "cuda" else "this machine"
    advice = "choose a smaller model, or more GPUs with --backbone=verl"
    if changes and changes[-1].total <= capacity:
        advice = f"set {', '.join(change.keys for change in changes)}"
    raise ConfigError(
        f"ajet.model.path: {plan.title.removeprefix('memory: ')}, does not fit: weights, gradients and optimiser alone "
        f"take {amount(fixed).strip()}, and {place} has {amount(capacity).strip()}: {advice}"
    )


def _remedies(config: Config, backbone: BackboneName, device: Device) -> Iterator[tuple[str, Any]]:
    """Keys and values to set; the cheapest first."""
    ajet = config.ajet
    rollout = ajet.rollout
    local = backbone == "local"
    if logits_chunk(config) == 0:
        yield "trainer_common.logits_chunk", "auto"
    if local and rollout.engine == "torch":
        one = conversation_bytes(meta_model(config, device), rollout.max_model_len)
        yield "rollout.kv_cache_gb", max(1, round(CONVERSATIONS * one / 1e9))
    if local and rollout.engine == "vllm":
        yield "rollout.vllm.sleep", True
    if backbone != "trinity":
        yield "trainer_common.gradient_checkpointing", True
    tokens = longest_pack(config, device) if local else 16384
    less = max(tokens // PART, rollout.max_model_len)
    yield f"trainer_common.{'max_tokens_per_step' if local else 'micro_tokens'}", less
    if device.kind == "cuda" and local:
        yield "trainer_common.optim.state_bits", 8
        yield "trainer_common.optim.master", "none"
    elif device.kind == "cuda":
        yield "trainer_common.fsdp_config.optimizer_offload", True
    if not ajet.model.lora.enabled:
        yield KL_TERM, False
        yield "model.lora.enabled", True
    if local and rollout.engine == "torch":
        yield "model.lora.base_bits", 4
    if device.kind == "cpu":
        yield "model.dtype", "bfloat16"
