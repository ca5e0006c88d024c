"""What `gpu_check.py` measures: each function is one part, for one shape of model with random weights.

A part answers with figures; `ok` says whether what can be right or wrong is right. `NotMeasured` says why there are
none.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import engine as engines
import grpo_step
import memory_plan as planned_memory
import model_families as families
import numpy as np
import torch
from _engine_load import Load
from tree_training import Timings, Way, best_of, chain, forgetful, group, items_for, update_of

from ajet.backbone.local.learner import with_adapters
from ajet.backbone.memory_plan import GIB, Device, plan_memory
from ajet.config import load_config
from ajet.config.sections import LoraConfig
from ajet.credit.weights import CallCredit, EpisodeCredit
from ajet.engine.model_source import ModelSource, known_shapes
from ajet.engine.torch.engine import TorchEngine, TorchEngineSettings
from ajet.schema.call_tree import CallTree
from ajet.schema.errors import UserError
from ajet.schema.generation import GenerateRequest, Sampling
from ajet.trainer.checkpoint import write_model
from ajet.trainer.footprint import Pass, training_bytes
from ajet.trainer.forward import BestForward, PackForward, RowForward
from ajet.trainer.loss import LossSettings
from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.pack import Layout, items_of, make_packs
from ajet.trainer.trainer import Trainer, TrainSettings
from ajet.trainer.tree_check import check_trees, tree_support

HERE = Path(__file__).parent
TOKENIZER = "tiny:qwen2-0.3m"
LORA = LoraConfig(enabled=True)
PROMPTS, PROMPT, REPLY = 8, 64, 32
ROUNDINGS = 4.0
"""Logprobs of two programs in bfloat16 may differ by this many times what bfloat16 itself costs one of them."""
WORST_PLAN = 0.10
"""Largest accepted difference between planned and measured memory of an update."""


class NotMeasured(Exception):
    """Why there is no figure."""


class ProgramFailed(Exception):
    """Another program that a part needs has failed."""


@dataclass(frozen=True)
class Shape:
    """A model with random weights."""

    name: str
    config: dict[str, Any]
    lora: bool = False

    @property
    def learning_rate(self) -> float:
        """Large enough that one update moves logprobs by more than rounding does."""
        return 1e-2 if self.lora else 1e-4


@dataclass(frozen=True)
class Place:
    """Where it is measured."""

    device: str
    """`cuda` or `cpu`."""
    work: Path
    """Where models are kept between parts."""
    vllm_python: str | None = None
    why_no_vllm: str = ""

    @property
    def formats(self) -> tuple[torch.dtype, ...]:
        return (torch.float32, torch.bfloat16)

    @property
    def native(self) -> torch.dtype:
        """The number format that a run would take."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def need_vllm(self) -> str:
        if self.vllm_python is None:
            raise NotMeasured(self.why_no_vllm)
        return self.vllm_python


TINY = {
    **known_shapes()["Qwen/Qwen3-0.6B"],
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
}


def shapes_for(device: str) -> dict[str, Shape]:
    """By the name that parts end with."""
    if device == "cpu":
        found = [Shape("tiny", TINY), Shape("tiny-lora", TINY, lora=True)]
    else:
        known = known_shapes()
        found = [
            Shape("0.6b", known["Qwen/Qwen3-0.6B"]),
            Shape("1.7b", known["Qwen/Qwen3-1.7B"]),
            Shape("8b-lora", known["Qwen/Qwen3-8B"], lora=True),
        ]
    return {shape.name: shape for shape in found}


def model_of(shape: Shape, device: str, dtype: torch.dtype) -> Any:
    """Always the same weights on one kind of device; adapters are not part of them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = ModelSource.resolve(TOKENIZER)
    tokenizer = source.tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(**{**shape.config, **ends})
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.config._name_or_path = source.path  # where the embedded engine finds a tokenizer
    return model.eval()


def folder_of(shape: Shape, place: Place) -> Path:
    """The model as files, for what can't take it from this process. Written once."""
    folder = place.work / "models" / shape.name.removesuffix("-lora")
    if (folder / "hf").is_dir():
        return folder / "hf"
    model = model_of(shape, place.device, place.native)
    size = sum(parameter.nbytes for parameter in model.parameters())
    place.work.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(place.work).free < 2.5 * size:
        raise NotMeasured(f"{place.work} has no room for {2.5 * size / GIB:.0f} GiB: name another folder with --work")
    draft = folder.with_name(f".{folder.name}-{os.getpid()}")
    write_model(model, ModelSource.resolve(TOKENIZER).tokenizer(), draft)
    draft.rename(folder)
    return folder / "hf"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def in_each_format(place: Place, measure: Callable[[torch.dtype], dict[str, Any]]) -> dict[str, Any]:
    """What does not fit in one format may fit in the other."""
    rows: dict[str, Any] = {}
    for dtype in place.formats:
        try:
            rows[dtype_name(dtype)] = measure(dtype)
        except torch.cuda.OutOfMemoryError:
            rows[dtype_name(dtype)] = {"not_measured": "it does not fit into the GPU's memory"}
        _forget()
    if all("not_measured" in row for row in rows.values()):
        raise NotMeasured("it does not fit into the GPU's memory")
    return {"ok": all(row.get("ok", True) for row in rows.values()), **rows}


def _forget() -> None:
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- correctness


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


def logprobs_of(trainer: Trainer, trees: Sequence[CallTree]) -> Any:
    known = trainer.logprobs(credited(trees))
    return np.stack([known[index, 0] for index in range(len(trees))])


def trainer_of(model: Any, shape: Shape) -> Trainer:
    settings = TrainSettings(LossSettings(correction=None), OptimSettings(lr=shape.learning_rate))
    return Trainer(model, settings)


def largest(one: Any, other: Any) -> float:
    return float(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).max())


def rounding(trainer: Trainer, shape: Shape, trees: Sequence[CallTree]) -> float:
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
        _forget()
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
    _forget()
    return gap, cost


def _run(command: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", flush=True)  # into the part's log
        said = [line for line in done.stderr.splitlines() if "Error" in line] or ["its log says more"]
        raise ProgramFailed(f"{Path(command[1]).name} ended with {done.returncode}: {said[0].strip()[:300]}")


# ---------------------------------------------------------------- speed


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
            _forget()
        print(name, rows[name], flush=True)
    return {"shapes": rows}


BUDGET = 16384
"""Tokens of a pack."""


def _compare(model: Any, trees: list[CallTree], device: str) -> dict[str, Any]:
    items = items_for(trees)
    packs = {layout: make_packs(items, layout, BUDGET) for layout in Layout}
    ways = [
        Way("tree", BestForward(BUDGET), packs[Layout.TREE]),
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
            _forget()
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
        gpu = ["rollout.vllm.sleep=true"]
        cpu = ["rollout.vllm.extra_args=[--enforce-eager,--no-enable-chunked-prefill]"]
        found["vllm"] = _step(place, folder, [*common, *own, *(gpu if place.device == "cuda" else cpu)])
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


# ---------------------------------------------------------------- memory


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
    trainer = Trainer(model, settings)
    forward = trainer._forward = BestForward(trainer.budget)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        trainer.update(batch)
    measured = torch.cuda.max_memory_allocated()
    longest = max(trainer._plan(items_of(batch), forward), key=len)
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


PARTS: dict[str, Callable[[Shape, Place], dict[str, Any]]] = {
    part.__name__: part for part in (gradient, logprobs, vllm, memory, layouts, engine, step)
}


def measure(part: str, shape: str, place: Place) -> dict[str, Any]:
    """One part's figures, or the reason why there are none."""
    try:
        return PARTS[part](shapes_for(place.device)[shape], place)
    except NotMeasured as why:
        return {"not_measured": str(why)}
    except torch.cuda.OutOfMemoryError:
        return {"not_measured": "it does not fit into the GPU's memory"}
    except (UserError, ProgramFailed) as error:
        return {"ok": False, "error": str(error)}


def main() -> None:
    """`_gpu_parts.py JOB`: measures what the file says, and writes the figures beside it."""
    job = Path(sys.argv[1])
    told = json.loads(job.read_text())
    place = Place(told["device"], Path(told["work"]), told["vllm_python"], told["why_no_vllm"])
    job.with_suffix(".figures").write_text(json.dumps(measure(told["part"], told["shape"], place)))


if __name__ == "__main__":
    main()
