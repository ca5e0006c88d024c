"""The memory that a training is said to take, and what PyTorch's allocator hands out, on the CPU.

Base weights in 4 bits are measured where bitsandbytes is installed.

Measured with `torch.profiler`, which reports every allocation and release of the CPU's allocator: exact, and no matter
what else the machine does. Two updates are run, the second with the optimiser's state in place.

    python benchmarks/memory_plan.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from common import write_result
from torch.profiler import ProfilerActivity, profile
from tree_training import group

from ajet.engine.quantization import quantise
from ajet.trainer.credit.estimators import CallCredit, EpisodeCredit
from ajet.trainer.executor import Chosen
from ajet.trainer.footprint import Pass, training_bytes
from ajet.trainer.forward import PackForward
from ajet.trainer.loss import LossSettings
from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.pack import Layout, items_of
from ajet.trainer.trainer import TrainSettings, Updater

BOUND = 0.10
"""Largest accepted difference."""


@dataclass(frozen=True)
class Shape:
    """A model and how it is trained."""

    name: str
    model: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    lora: bool = False
    checkpointing: bool = False
    chunk: int = 0
    base_bits: int | None = None


SHAPES = (
    Shape("all weights, float32"),
    Shape("the same with checkpointing", checkpointing=True),
    Shape("a vocabulary of 50,000, logits in chunks of 128", {"vocab_size": 50_000}, chunk=128),
    Shape("adapters of rank 16", lora=True),
    Shape("adapters of rank 16 over 4 bits", lora=True, base_bits=4),
    Shape("bfloat16 with a float32 copy, checkpointing", dtype=torch.bfloat16, checkpointing=True),
)


def model_of(shape: Shape, device: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **{**options, **shape.model})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=shape.dtype, attn_implementation="sdpa").eval()
    if not shape.lora:
        return model
    if shape.base_bits is not None and device != "meta":
        quantise(model, device)
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def measure(shape: Shape) -> dict[str, Any]:
    """Bytes planned and measured."""
    trees = group(8, 2, 120, 20, 40)
    batch = [
        (tree, EpisodeCredit("e", [CallCredit([(1.0 - index % 3, 0.001)]) for _ in tree.calls]))
        for index, tree in enumerate(trees)
    ]
    settings = TrainSettings(
        LossSettings(correction=None),
        OptimSettings(lr=1e-5),
        max_tokens=600,
        logits_chunk=shape.chunk,
        gradient_checkpointing=shape.checkpointing,
    )
    model = model_of(shape, "cpu")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        trainer = Updater(model, settings)
        trainer._chosen = Chosen(PackForward(trainer.budget, shape.chunk), (Layout.TREE, Layout.MERGED))
        for _ in range(2):
            trainer.update(batch)
    now = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    packs = trainer._plan(items_of(batch), [Layout.TREE, Layout.MERGED])
    largest = max(packs, key=len)
    one = Pass(len(largest), len(largest.edges), "cpu", shape.checkpointing, shape.chunk)
    planned = training_bytes(model_of(shape, "meta"), one, base_bits=shape.base_bits)
    measured = weights + peak
    return {
        "shape": shape.name,
        "packs": len(packs),
        "tokens": one.tokens,
        "planned_mib": round(planned.total / 2**20, 2),
        "measured_mib": round(measured / 2**20, 2),
        "difference": round(planned.total / measured - 1, 4),
        "parts_mib": {name: round(size / 2**20, 2) for name, size in planned._asdict().items()},
    }


def main() -> None:
    rows = []
    for shape in SHAPES:
        if shape.base_bits is not None and find_spec("bitsandbytes") is None:
            print(f"{shape.name}: not measured, bitsandbytes is not installed")
            continue
        rows.append(measure(shape))
        print(rows[-1], flush=True)
    write_result("memory_plan", {"measure": "torch.profiler, CPU allocator", "bound": BOUND, "shapes": rows})
    worst = max(abs(row["difference"]) for row in rows)
    if worst > BOUND:
        raise SystemExit(f"the plan is {worst:.1%} off, more than {BOUND:.0%}")


if __name__ == "__main__":
    main()
