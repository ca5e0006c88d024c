"""How much memory two updates take, against the plan of `ajet validate --plan`. A part of `gpu_check.py`."""

from __future__ import annotations

from typing import Any

import memory_plan as planned_memory
import torch
from _gpu_correctness import credited
from _gpu_models import LORA, Place, Shape, model_of
from tree_training import group

from ajet.backbone.local.learner import with_adapters
from ajet.trainer.executor import Chosen
from ajet.trainer.footprint import Pass, training_bytes
from ajet.trainer.forward import PackForward
from ajet.trainer.loss import LossSettings
from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.pack import Layout, items_of
from ajet.trainer.trainer import TrainSettings, Updater

WORST_PLAN = 0.10
"""Largest accepted difference between planned and measured memory of an update."""


def memory(shape: Shape, place: Place) -> dict[str, Any]:
    """The peak of two updates against the plan. On a CPU, what PyTorch's allocator hands out."""
    if place.device == "cpu":
        config = {name: value for name, value in shape.config.items() if name != "model_type"}
        return planned_memory.measure(planned_memory.Shape(shape.name, config, lora=shape.lora))
    row = _memory_on_gpu(shape)
    return {"ok": abs(row["difference"]) <= WORST_PLAN, **row}


def _memory_on_gpu(shape: Shape) -> dict[str, Any]:
    def trained(device: str) -> Any:
        model = model_of(shape, device, torch.bfloat16)
        return with_adapters(model, LORA) if shape.lora else model

    batch = credited(group(8, 2, 960, 160, 320))
    model = trained("cuda")
    settings = TrainSettings(
        LossSettings(correction=None), OptimSettings(lr=1e-5), max_tokens=4096, gradient_checkpointing=True
    )
    trainer = Updater(model, settings)
    trainer._chosen = Chosen(PackForward(trainer.budget), (Layout.TREE, Layout.MERGED))
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        trainer.update(batch)
    measured = torch.cuda.max_memory_allocated()
    longest = max(trainer._plan(items_of(batch), [Layout.TREE, Layout.MERGED]), key=len)
    one = Pass(len(longest), len(longest.edges), "cuda", checkpointing=True)
    plan = training_bytes(trained("meta"), one)
    return {
        "tokens": one.tokens,
        "planned_mib": round(plan.total / 2**20, 1),
        "measured_mib": round(measured / 2**20, 1),
        "reserved_mib": round(torch.cuda.max_memory_reserved() / 2**20, 1),
        "difference": round(plan.total / measured - 1, 4),
        "parts_mib": {name: round(size / 2**20, 1) for name, size in plan._asdict().items()},
    }
