"""How fast: updates in trees and rows, engines, whole GRPO steps. Three parts of `gpu_check.py`."""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine as engines
import grpo_step
import torch
from _engine_load import Load
from _gpu_models import LORA, NotMeasured, Place, Shape, dtype_name, folder_of, forget, model_of
from tree_training import Timings, Way, best_of, chain, forgetful, group, items_for, update_of

from ajet.backbone.local.learner import with_adapters
from ajet.backbone.memory import GIB, Device, plan_memory
from ajet.config import load_config
from ajet.schema.episode import CallTree
from ajet.trainer.forward import PackForward, RowForward
from ajet.trainer.pack import Layout, make_packs


def layouts_for(device: str) -> dict[str, list[CallTree]]:
    """Ratios of 1 to 26. On a GPU, conversations are longer: short ones would measure how fast kernels start."""
    n = 4 if device == "cuda" else 1
    found = {
        "unrelated rows": [chain(1, 200 * n, 0, 56 * n, seed) for seed in range(8)],
        "chain, 4 turns": [chain(4, 200 * n, 60 * n, 60 * n)],
        "group of 8, 1 turn": group(8, 1, 400 * n, 0, 100 * n),
    }
    if device == "cuda":
        found |= {
            "chain, 10 turns": [chain(10, 200 * n, 60 * n, 60 * n)],
            "forgetful, 10 turns": [forgetful(10, 200 * n, 40 * n, 80 * n, 40 * n)],
            "group of 16, 4 turns": group(16, 4, 200, 20, 30),
            "best of 4, 8 turns": [best_of(8, 4, 200 * n, 40 * n, 60 * n)],
        }
    return found | {"chain, 50 turns": [chain(50, 100 if n == 1 else 200, 20 * n, 20 * n)]}


def layouts(shape: Shape, place: Place) -> dict[str, Any]:
    """Seconds and memory of an update in trees, merged rows and flat rows."""
    model = model_of(shape, place.device, place.native)
    if shape.lora:
        model = with_adapters(model, LORA)
    if place.device == "cuda":  # as a run on a GPU does
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in model.modules():
            module.training = bool(getattr(module, "gradient_checkpointing", False))
    rows: dict[str, Any] = {}
    for name, trees in layouts_for(place.device).items():
        try:
            rows[name] = _compare(model, trees, place.device)
        except torch.cuda.OutOfMemoryError:
            rows[name] = {"not_measured": "it does not fit into the GPU's memory"}
            model.zero_grad(set_to_none=True)
            forget()
        print(name, rows[name], flush=True)
    return {"shapes": rows}


BUDGET = 16384
"""Tokens of a pack."""


def _compare(model: Any, trees: list[CallTree], device: str) -> dict[str, Any]:
    items = items_for(trees)
    packs = {layout: make_packs(items, layout, BUDGET) for layout in Layout}
    ways = [
        Way("tree", PackForward(BUDGET), packs[Layout.TREE]),
        Way("merged", RowForward(BUDGET), packs[Layout.MERGED]),
        Way("flat", RowForward(BUDGET), packs[Layout.FLAT]),
    ]
    timings = Timings(device, 3 if device == "cuda" else 1)
    timings.run({way.name: update_of(model, way) for way in ways})
    seconds = timings.seconds()
    computed = sum(map(len, packs[Layout.TREE]))
    ratio = sum(pack.unshared_tokens for pack in packs[Layout.TREE]) / computed
    return {
        "tokens": computed,
        "ratio": ratio,
        "speedup": seconds["flat"] / seconds["tree"],
        "against_merged": seconds["merged"] / seconds["tree"],
        "seconds": seconds,
        "memory_mib": timings.memory,
    }


def engine(shape: Shape, place: Place) -> dict[str, Any]:
    """Tokens per second of the embedded engine, of transformers' `generate`, and of vLLM. Adapters are not served."""
    engines.MODEL = str(folder_of(shape, place))
    loads = [Load(32, 5), Load(128, 1)] if place.device == "cuda" else [Load(4, 2)]
    ways: dict[str, Callable[[Load], dict[str, Any]]] = {
        "embedded": engines.embedded,
        "generate": engines.generate,
        "vllm": lambda load: engines.vllm(load, place.need_vllm(), prefix_cache=True, device=place.device),
    }
    runs: dict[str, Any] = {}
    for load in loads:
        by = runs[f"{load.conversations} conversations, {load.turns} turns"] = {}
        for name, way in ways.items():
            try:
                figures = way(load)
                by[name] = {**figures, "tokens_per_s": round(load.drawn / max(figures["wall_s"], 0.01), 1)}
            except torch.cuda.OutOfMemoryError:
                by[name] = {"not_measured": "it does not fit into the GPU's memory"}
            except NotMeasured as why:
                by[name] = {"not_measured": str(why)}
            except subprocess.CalledProcessError as error:
                by[name] = {"not_measured": f"vLLM ended with {error.returncode}: {error.stderr.strip()[-300:]}"}
            forget()
            print(by, flush=True)
    return {"runs": runs}


STEPS = 3


def step(shape: Shape, place: Place) -> dict[str, Any]:
    """A whole GRPO step of `ajet --conf …`, with the embedded engine and with vLLM that sleeps during updates."""
    folder = folder_of(shape, place)
    common = [f"model.lora.enabled={str(shape.lora).lower()}", f"model.dtype={dtype_name(place.native)}"]
    found: dict[str, Any] = {"torch": _step(place, folder, common)}
    if place.vllm_python is None:
        found["vllm"] = {"not_measured": place.why_no_vllm}
    else:
        own = ["rollout.engine=vllm", f"rollout.vllm.python={place.vllm_python}", "rollout.vllm.start_timeout=300"]
        sleep = ["rollout.vllm.sleep=true"] if place.device == "cuda" else []
        found["vllm"] = _step(place, folder, [*common, *own, *sleep])
    found["trl"] = {"not_measured": "benchmarks/grpo_step.py compares with TRL, on a CPU"}
    return found


def _step(place: Place, folder: Path, overrides: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        with _device_memory(place) as seen:
            figures = grpo_step.run_ours(folder, Path(scratch), STEPS, 1, overrides)
        config = load_config(Path(scratch) / "threads_1.yaml", overrides)
        plan = plan_memory(config, "local", Device.here("local"))
    figures.pop("all_step_seconds")
    if place.device == "cuda" and plan is not None:
        figures |= {"peak_gib": round(seen["peak"] / GIB, 2), "planned_gib": round(plan.total / GIB, 2)}
    return figures


@contextmanager
def _device_memory(place: Place) -> Iterator[dict[str, int]]:
    """The most that all programs took of the GPU beyond what they had before, looked at ten times a second."""
    seen = {"peak": 0}
    if place.device == "cpu":
        yield seen
        return
    ended = threading.Event()
    free_before = torch.cuda.mem_get_info()[0]

    def watch() -> None:
        while not ended.wait(0.1):
            seen["peak"] = max(seen["peak"], free_before - torch.cuda.mem_get_info()[0])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()
