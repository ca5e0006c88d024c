"""Is it right: gradients of trees, and the logprobs of engines, against the trainer. Three parts of `gpu_check.py`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import model_families as families
import numpy as np
import torch
from _gpu_models import LORA, Place, ProgramFailed, Shape, dtype_name, folder_of, forget, in_each_format, model_of
from tree_training import chain, group

from ajet.backbone.local.learner import with_adapters
from ajet.engine.model_source import ModelSource
from ajet.engine.torch.commands import TorchEngineSettings
from ajet.engine.torch.engine import TorchEngine
from ajet.schema.chat import GenerateRequest, Sampling
from ajet.schema.episode import CallTree
from ajet.trainer.credit.estimators import CallCredit, EpisodeCredit
from ajet.trainer.executor import check_trees, tree_support
from ajet.trainer.forward import PackForward, RowForward
from ajet.trainer.loss import LossSettings
from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.pack import Layout
from ajet.trainer.trainer import TrainSettings, Updater

HERE = Path(__file__).parent
PROMPTS, PROMPT, REPLY = 8, 64, 32
ROUNDINGS = 4.0
"""Logprobs of two programs in bfloat16 may differ by this many times what bfloat16 itself costs one of them."""


def gradient(shape: Shape, place: Place) -> dict[str, Any]:
    """The gradient of packed trees and of padded rows, each against that of every row by itself."""
    return in_each_format(place, partial(_gradient, shape, place))


def _gradient(shape: Shape, place: Place, dtype: torch.dtype) -> dict[str, Any]:
    model = model_of(shape, place.device, dtype)
    if shape.lora:
        model = families.with_adapters(model)
    why = tree_support(model) or check_trees(model, families.calls())
    alone = families.gradient(model, families.ALONE, Layout.FLAT)
    tree = families.distance(families.gradient(model, PackForward(), Layout.TREE), alone)
    rows = families.distance(families.gradient(model, RowForward(), Layout.MERGED), alone)
    exact = dtype is not torch.float32 or max(tree, rows) <= families.EXACT
    return {"ok": why is None and exact, "tree": tree, "rows": rows, "why": why}


def credited(trees: Sequence[CallTree]) -> list[tuple[CallTree, EpisodeCredit]]:
    """Every second episode was good."""
    return [
        (tree, EpisodeCredit("e", [CallCredit([(1.0 - 2 * (index % 2), 0.01)]) for _ in tree.calls]))
        for index, tree in enumerate(trees)
    ]


def prompts_of(seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, 500, (PROMPTS, PROMPT)).tolist()


def as_trees(prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]]) -> list[CallTree]:
    """Single calls, with these tokens."""
    trees = []
    for prompt, reply in zip(prompts, replies, strict=True):
        tree = chain(1, len(prompt), 0, len(reply))
        tree.runs[0].ids = np.array(prompt, np.int32)
        tree.runs[1].ids = np.array(reply, np.int32)
        trees.append(tree)
    return trees


def logprobs_of(trainer: Updater, trees: Sequence[CallTree]) -> Any:
    known = trainer.logprobs(credited(trees))
    return np.stack([known[index, 0] for index in range(len(trees))])


def trainer_of(model: Any, shape: Shape) -> Updater:
    settings = TrainSettings(LossSettings(correction=None), OptimSettings(lr=shape.learning_rate))
    return Updater(model, settings)


def largest(one: Any, other: Any) -> float:
    return float(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).max())


def rounding(trainer: Updater, shape: Shape, trees: Sequence[CallTree]) -> float:
    """What the number format costs: the trainer's logprobs against those in float32. Turns the model into float32."""
    model = trainer.model
    before = logprobs_of(trainer, trees)
    if next(model.parameters()).dtype is torch.float32:
        return 0.0
    model.float()
    return largest(before, logprobs_of(trainer_of(model, shape), trees))


def agrees(gap: float, cost: float) -> bool:
    return gap <= max(families.EXACT, ROUNDINGS * cost)


def logprobs(shape: Shape, place: Place) -> dict[str, Any]:
    """The embedded engine's logprobs against the trainer's, before and after an update that the engine must serve."""
    return in_each_format(place, partial(_logprobs, shape, place))


def _logprobs(shape: Shape, place: Place, dtype: torch.dtype) -> dict[str, Any]:
    base = model_of(shape, place.device, dtype)
    settings = TorchEngineSettings(max_model_len=512, max_num_seqs=PROMPTS, kv_cache_gb=0.5)
    return asyncio.run(_served(shape, TorchEngine(base, settings)))


async def _served(shape: Shape, served: TorchEngine) -> dict[str, Any]:
    async def replies(seed: int) -> list[Any]:
        requests = [
            GenerateRequest(prompt, Sampling(max_tokens=REPLY, seed=seed + index, ignore_eos=True))
            for index, prompt in enumerate(prompts_of(seed))
        ]
        return list(await asyncio.gather(*map(served.generate, requests)))

    await served.ready()
    model: Any = with_adapters(served.model, LORA) if shape.lora else served.model
    trainer = trainer_of(model, shape)
    first = await replies(0)
    trees = as_trees(prompts_of(0), [reply.token_ids for reply in first])
    await served.pause()
    before = logprobs_of(trainer, trees)
    gap = largest(before, [reply.logprobs for reply in first])
    trainer.update(credited(trees))
    moved = largest(before, logprobs_of(trainer, trees))
    await served.load_weights(None, 1)
    await served.resume()
    second = await replies(100)
    await served.aclose()
    after = as_trees(prompts_of(100), [reply.token_ids for reply in second])
    gap_after = largest(logprobs_of(trainer, after), [reply.logprobs for reply in second])
    versions = [reply.versions for reply in second] == [[(0, 1)]] * PROMPTS
    cost = rounding(trainer, shape, after)
    right = agrees(gap, cost) and agrees(gap_after, cost) and versions and moved > gap_after
    return {"ok": right, "gap": gap, "moved": moved, "gap_after": gap_after, "rounding": cost, "versions": versions}


def vllm(shape: Shape, place: Place) -> dict[str, Any]:
    """vLLM's logprobs against the trainer's, after an update, and whether it sleeps and wakes."""
    python = place.need_vllm()
    folder = folder_of(shape, place)
    with tempfile.TemporaryDirectory(dir=place.work) as scratch:
        changed = Path(scratch) / "changed"
        _write_update(shape, place, folder, changed)
        forget()
        answer = _ask_vllm(shape, place, python, folder, changed)
        gaps = [_gap_to_files(shape, place, folder, changed if new else None, answer[new]) for new in (0, 1)]
    (gap, cost), (gap_after, cost_after) = gaps
    slept = answer["sleep"]
    right = agrees(gap, cost) and agrees(gap_after, cost_after) and answer["versions"] == [1] and slept.get("ok", True)
    return {"ok": right, "gap": gap, "gap_after": gap_after, "rounding": max(cost, cost_after), "sleep": slept}


def _write_update(shape: Shape, place: Place, folder: Path, changed: Path) -> None:
    """An update's weights, as the local backbone writes them for an engine with weights of its own."""
    model: Any = ModelSource.resolve(str(folder)).model(dtype_name(place.native), device=place.device)
    if shape.lora:
        model = with_adapters(model, LORA)
    trainer_of(model, shape).update(credited(group(PROMPTS, 1, PROMPT, 0, REPLY)))
    model.save_pretrained(changed)


def _ask_vllm(shape: Shape, place: Place, python: str, folder: Path, changed: Path) -> dict[Any, Any]:
    job = {
        "model": str(folder),
        "changed": str(changed),
        "lora_rank": LORA.rank if shape.lora else 0,
        "dtype": dtype_name(place.native),
        "device": place.device,
        "reply": REPLY,
        "prompts": [prompts_of(0), prompts_of(100)],
    }
    file = changed.with_name("job.json")
    file.write_text(json.dumps(job))
    _run([python, str(HERE / "_gpu_vllm.py"), str(file)])
    told: dict[str, Any] = json.loads(file.with_suffix(".answer").read_text())
    return {0: told["first"], 1: told["second"], **told}


def _gap_to_files(
    shape: Shape, place: Place, folder: Path, changed: Path | None, replies: list[dict[str, Any]]
) -> tuple[float, float]:
    """The gap to a trainer that reads the same files, and what the number format costs."""
    whole = changed if changed is not None and not shape.lora else folder
    model: Any = ModelSource.resolve(str(whole)).model(dtype_name(place.native), device=place.device)
    if changed is not None and shape.lora:
        import peft

        model = peft.PeftModel.from_pretrained(model, str(changed), is_trainable=True)
    trees = as_trees(prompts_of(0 if changed is None else 100), [reply["token_ids"] for reply in replies])
    trainer = trainer_of(model, shape)
    gap = largest(logprobs_of(trainer, trees), [reply["logprobs"] for reply in replies])
    cost = rounding(trainer, shape, trees)
    del trainer, model
    forget()
    return gap, cost


def _run(command: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", flush=True)  # into the part's log
        said = [line for line in done.stderr.splitlines() if "Error" in line] or ["its log says more"]
        raise ProgramFailed(f"{Path(command[1]).name} ended with {done.returncode}: {said[0].strip()[:300]}")
