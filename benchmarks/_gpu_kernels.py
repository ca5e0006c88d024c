"""What optional kernels change in an update: compiled layers, Liger's output layer. A part of `gpu_check.py`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from _gpu_models import LORA, Place, Shape, forget, model_of
from tree_training import Timings, Way, group, items_for, update_of

from ajet.backbone.local.learner import with_adapters
from ajet.schema.errors import UserError
from ajet.trainer.executor import check_same
from ajet.trainer.forward import PackForward, require_liger, why_not_liger
from ajet.trainer.pack import Item, Layout, make_packs

BUDGET = 16384
"""Tokens of a pack."""

WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""The model on a CPU."""


def kernels(shape: Shape, place: Place) -> dict[str, Any]:
    """Seconds and memory of an update of a group of 8, as it is and with each kernel; right if all give the same."""
    if place.device == "cpu":  # where the time of a model as small as that is spent between kernels
        shape = replace(shape, config={**shape.config, **WIDE})
    model = model_of(shape, place.device, place.native)
    if shape.lora:
        model = with_adapters(model, LORA)
    if place.device == "cuda":  # as a run on a GPU does
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in model.modules():
            module.training = bool(getattr(module, "gradient_checkpointing", False))
    n = 4 if place.device == "cuda" else 1
    items = items_for(group(8, 2, 400 * n, 20 * n, 100 * n))
    plain = PackForward(BUDGET)
    options = {"compiled": {"compiled": True}, "liger": {"liger": True}, "both": {"compiled": True, "liger": True}}
    ways = {name: replace(plain, **given) for name, given in options.items()}
    found: dict[str, Any] = {"plain": _timed(model, items, plain, place)}
    for name, forward in ways.items():
        if name != "compiled" and (lacking := _no_liger(model, place)):
            found[name] = {"not_measured": lacking}
            continue
        began = time.perf_counter()
        why = check_same(model, items, plain, forward, Layout.TREE)
        first = time.perf_counter() - began
        found[name] = {"ok": why is None, "why": why, "first_s": round(first, 1)}
        if why is None:
            found[name] |= _timed(model, items, forward, place)
        print(name, found[name], flush=True)
    return {"ok": all(each.get("ok", True) for each in found.values()), **found}


def _no_liger(model: Any, place: Place) -> str | None:
    try:
        require_liger(place.device)
    except UserError as error:
        return str(error)
    return why_not_liger(model)


def _timed(model: Any, items: list[Item], forward: PackForward, place: Place) -> dict[str, Any]:
    timings = Timings(place.device, 3)
    way = Way("update", forward, make_packs(items, Layout.TREE, BUDGET))
    update = update_of(model, way)
    try:
        update()  # longer packs than those that were compared may be compiled once more
        timings.run({way.name: update})
    except torch.cuda.OutOfMemoryError:
        model.zero_grad(set_to_none=True)
        forget()
        return {"not_measured": "it does not fit into the GPU's memory"}
    return {"seconds": timings.seconds()[way.name], "memory_mib": round(timings.memory[way.name])}
