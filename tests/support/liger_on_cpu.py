"""Liger's kernel on a CPU, by Triton's interpreter: whether log-probabilities and gradients are those of our chunks.

A program of its own, because Triton has to be told before it is loaded. Prints what it found as JSON.
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from ajet.trainer.executor import choose
from ajet.trainer.forward import PackForward, RowForward
from ajet.trainer.loss import LossSettings
from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.pack import Item, Layout, items_of, make_packs
from ajet.trainer.trainer import TrainSettings, Updater
from support.random_batches import credited_batch
from support.small_models import small_model, weights


def run(model: Any, items: list[Item], forward: Any, layout: Layout) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    found = []
    with forward.session(model):
        for pack in make_packs(items, layout):
            logprob_E = forward(model, pack).logprob_E
            (logprob_E * torch.from_numpy(pack.edges.sampler_logprob).float()).sum().backward()
            found.append(logprob_E.detach())
    return torch.cat(found), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compared(family: str, layout: Layout, **options: Any) -> dict[str, float]:
    model = small_model(family, **options)
    items = items_of(credited_batch(1))
    kind = RowForward if layout is Layout.FLAT else PackForward
    expected, gradients = run(model, items, kind(), layout)
    got, other = run(model, items, kind(liger=True), layout)
    norm = torch.stack([value.norm() for value in gradients.values()]).norm()
    off = torch.stack([(other[name] - gradients[name]).norm() for name in gradients]).norm()
    return {"logprobs": float((got - expected).abs().max()), "gradient": float(off / norm)}


def updates() -> dict[str, float]:
    """Two mini-batches with a reference, by both."""
    ends = []
    for liger in (False, True):
        model = small_model()
        optim = OptimSettings(lr=1e-3, eps=1.0, weight_decay=0.0)
        settings = TrainSettings(LossSettings(kl_coef=0.1), optim, mini_batches=2, max_tokens=60, liger=liger)
        trainer = Updater(model, settings, reference=small_model(seed=1))
        metrics = trainer.update(credited_batch(2))
        ends.append((weights(model), metrics))
    (one, before), (other, after) = ends
    gap = max(float((one[name] - other[name]).abs().max()) for name in one)
    loss = abs(before["loss/total"] - after["loss/total"])
    return {"weights": gap, "loss": loss, "entropy": float("loss/entropy" in after)}


def used() -> list[bool]:
    """A model that divides its logits is trained without it, and the same one that doesn't with it."""
    found = []
    for change in ({"logits_scaling": 3.0}, {"vocab_size": 32}):
        model = small_model("granite", **change)
        found.append(bool(choose(model, items_of(credited_batch(1)), 16384, None, liger=True).forward.liger))  # type: ignore[attr-defined]
    return found


print(
    json.dumps(
        {
            "tree": compared("qwen2", Layout.TREE),
            "rows": compared("qwen2", Layout.FLAT),
            "untied": compared("llama", Layout.TREE, tie_word_embeddings=False),
            "updates": updates(),
            "used": used(),
        }
    )
)
