"""Forward and backward pass of one update: packed trees, merged rows, flat per-call rows, and a plain causal pass.

Over shapes of trees and packing ratios. On a CPU, the CPU time of one thread is measured, so that a busy machine
matters little; on a GPU, wall time. The layouts are timed in turn, so that a slow moment of the machine affects
all of them. Also measures the peak memory beyond the model's own, and shows which layout the planner chooses.

    python benchmarks/tree_training.py [--repeats 3] [--only PART_OF_A_NAME]
    python benchmarks/tree_training.py --charts          # draw docs/assets from the committed figures
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, write_result

from ajet.schema.episode import ROOT, Call, CallTree, Run
from ajet.trainer.credit.estimators import CallCredit, EpisodeCredit
from ajet.trainer.executor import CostModel, plan
from ajet.trainer.forward import PackForward, RowForward
from ajet.trainer.pack import Item, Layout, Pack, items_of, make_packs

VOCAB = 2048
LONG_ENOUGH_S = 4.0
"""A way that has run this long in all is not repeated further."""
ASSETS = Path(__file__).parents[1] / "docs" / "assets"


def model_on(device: str) -> Any:
    """About 7 M parameters on a CPU; the size of Qwen2.5-0.5B on a GPU."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    if device == "cuda":
        config = Qwen2Config(
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            vocab_size=151936,
            tie_word_embeddings=True,
        )
        return Qwen2ForCausalLM(config).to("cuda", torch.bfloat16).eval()
    config = Qwen2Config(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


class Grower:
    """Grows a call tree run by run."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.tree = CallTree()

    def _run(self, parent: int, length: int, call: int) -> int:
        runs = self.tree.runs
        start = 0 if parent == ROOT else runs[parent].start + len(runs[parent].ids)
        runs.append(Run(self.rng.integers(0, VOCAB, length).astype(np.int32), parent, start, call))
        return len(runs) - 1

    def context(self, parent: int, length: int) -> int:
        return self._run(parent, length, ROOT)

    def reply(self, prompt: int, length: int) -> int:
        run = self._run(prompt, length, len(self.tree.calls))
        logprobs = np.full(length, -7.0, np.float32)
        tokens = self.tree.runs[prompt].start + len(self.tree.runs[prompt].ids)
        call = Call("c", "a", "t", 0, prompt, tokens, run, logprobs, np.ones(length, np.bool_))
        self.tree.calls.append(call)
        return run


def chain(turns: int, prompt: int, context: int, reply: int, seed: int = 0) -> CallTree:
    """A conversation that only grows."""
    grower = Grower(seed)
    end = grower.context(ROOT, prompt)
    for turn in range(turns):
        if turn:
            end = grower.context(end, context)
        end = grower.reply(end, reply)
    return grower.tree


def forgetful(turns: int, prompt: int, context: int, thought: int, reply: int) -> CallTree:
    """A template that drops earlier thinking: each reply is a branch, the next prompt goes on without its thought."""
    grower = Grower(0)
    end = grower.context(ROOT, prompt)
    for _ in range(turns):
        grower.reply(end, thought + reply)
        end = grower.context(end, reply + context)
    return grower.tree


def group(members: int, turns: int, prompt: int, context: int, reply: int) -> list[CallTree]:
    """Episodes of one task: the same prompt, then each its own way."""
    trees = [chain(turns, prompt, context, reply, seed) for seed in range(members)]
    for tree in trees:
        tree.runs[0].ids = trees[0].runs[0].ids
    return trees


def best_of(turns: int, width: int, prompt: int, context: int, reply: int) -> CallTree:
    """Several replies at each turn, all trained; the last one is continued."""
    grower = Grower(0)
    end = grower.context(ROOT, prompt)
    for turn in range(turns):
        if turn:
            end = grower.context(end, context)
        end = [grower.reply(end, reply) for _ in range(width)][-1]
    return grower.tree


def siblings(members: int, shared: int, own: int, trained: int) -> list[CallTree]:
    """Single calls whose prompts begin alike: where sharing starts to pay."""
    trees = group(members, 1, shared + own - trained, 0, trained)
    rng = np.random.default_rng(9)
    for tree in trees:
        ids = tree.runs[0].ids.copy()
        ids[shared:] = rng.integers(0, VOCAB, len(ids) - shared)
        tree.runs[0].ids = ids
    return trees


SHAPES: dict[str, Callable[[], list[CallTree]]] = {
    "unrelated rows": lambda: [chain(1, 200, 0, 56, seed) for seed in range(8)],
    **{
        f"siblings sharing {shared} of 256": lambda shared=shared: siblings(8, shared, 256 - shared, 56)  # type: ignore[misc]
        for shared in (16, 32, 128)
    },
    "chain, 2 turns": lambda: [chain(2, 300, 40, 60)],
    "chain, 4 turns": lambda: [chain(4, 200, 60, 60)],
    "chain, 10 turns": lambda: [chain(10, 200, 60, 60)],
    "chain, 50 turns": lambda: [chain(50, 200, 40, 40)],
    "group of 8, 1 turn": lambda: group(8, 1, 400, 0, 100),
    "group of 8, 2 turns": lambda: group(8, 2, 300, 40, 60),
    "group of 16, 4 turns": lambda: group(16, 4, 200, 20, 30),
    "forgetful, 10 turns": lambda: [forgetful(10, 200, 40, 80, 40)],
    "forgetful, 15 turns": lambda: [forgetful(15, 200, 30, 60, 30)],
    "best of 4, 8 turns": lambda: [best_of(8, 4, 200, 40, 60)],
}


@dataclass
class Way:
    """One way to compute the same gradient."""

    name: str
    forward: RowForward
    packs: list[Pack]


class Timings:
    """Times several ways in turns, and takes each one's peak memory in its first run."""

    def __init__(self, device: str, repeats: int) -> None:
        self.device = device
        self.repeats = repeats
        self.times: dict[str, list[float]] = {}
        self.memory: dict[str, float] = {}

    def run(self, ways: dict[str, Callable[[], None]]) -> None:
        """A first run of each way, which counts only if the way is too long to repeat, and then the repeats."""
        for turn in range(self.repeats + 1):
            for name, way in ways.items():
                times = self.times.setdefault(name, [])
                if sum(times) > LONG_ENOUGH_S:
                    continue
                if turn == 0:
                    self.memory[name] = self._peak_mib(lambda way=way, times=times: times.append(self._time(way)))  # type: ignore[misc]
                else:
                    times.append(self._time(way))

    def seconds(self) -> dict[str, float]:
        """The fastest run of each."""
        return {name: min(times[1:] or times) for name, times in self.times.items()}

    def _time(self, way: Callable[[], None]) -> float:
        clock = time.process_time if self.device == "cpu" else time.perf_counter
        began = clock()
        way()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return clock() - began

    def _peak_mib(self, run: Callable[[], None]) -> float:
        """How far memory rises while it runs."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            return (torch.cuda.max_memory_allocated() - before) / 2**20
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _status_kib("VmRSS")
        run()
        return (_status_kib("VmHWM") - before) / 1024


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise KeyError(field)


def update_of(model: Any, way: Way) -> Callable[[], None]:
    def run() -> None:
        with way.forward.session(model):
            for pack in way.packs:
                way.forward(model, pack).logprob_E.sum().backward()
        model.zero_grad(set_to_none=True)

    return run


def causal_pass(model: Any, tokens: int, edges: int, device: str) -> Callable[[], None]:
    """A plain row of as many tokens, with as many logits."""
    ids = torch.randint(0, VOCAB, (1, tokens), device=device)
    keep = torch.linspace(0, tokens - 1, min(edges, tokens), device=device).long()
    target = torch.randint(0, VOCAB, (len(keep),), device=device)

    def run() -> None:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[0].float()
        torch.nn.functional.cross_entropy(logits, target).backward()
        model.zero_grad(set_to_none=True)

    return run


def items_for(trees: list[CallTree]) -> list[Item]:
    credits = [EpisodeCredit("e", [CallCredit([(1.0, 1.0)]) for _ in tree.calls]) for tree in trees]
    return items_of(list(zip(trees, credits, strict=True)))


def measure(model: Any, costs: CostModel, trees: list[CallTree], device: str, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    items = items_for(trees)
    packs = {layout: make_packs(items, layout) for layout in Layout}
    ways = [
        Way("tree", PackForward(), packs[Layout.TREE]),
        Way("merged", RowForward(), packs[Layout.MERGED]),
        Way("flat", RowForward(), packs[Layout.FLAT]),
    ]
    (tree,) = packs[Layout.TREE]
    timings = Timings(device, repeats)
    timings.run(
        {way.name: update_of(model, way) for way in ways}
        | {"causal": causal_pass(model, len(tree), len(tree.edges), device)}
    )
    seconds = timings.seconds()
    ratio = tree.unshared_tokens / len(tree)
    chosen = str(plan(items, costs, None, [Layout.TREE, Layout.MERGED])[0].layout)
    return {
        "tokens": len(tree),
        "ratio": ratio,
        "speedup": seconds["flat"] / seconds["tree"],
        "speedup_over_ratio": seconds["flat"] / seconds["tree"] / ratio,
        "against_merged": seconds["merged"] / seconds["tree"],
        "against_causal": seconds["tree"] / seconds["causal"],
        "planner": chosen,
        "planner_against_best": min(seconds[way.name] for way in ways) / seconds[chosen],
        "seconds": seconds,
        "memory_mib": timings.memory,
    }


def draw(record: dict[str, Any]) -> None:
    """Three charts: speed over packing ratio, where sharing starts to pay, peak memory."""
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "ajet"
    rows = sorted(record["figures"]["shapes"], key=lambda row: row["ratio"])
    kinds = {"chain": "o", "group": "s", "forgetful": "^", "best": "D"}
    figure, (speed, even, memory) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")

    limits = (1, 1.15 * max(row["ratio"] for row in rows))
    speed.plot(limits, limits, color="0.4", lw=1, label="packing ratio")
    speed.plot(limits, [0.8 * limit for limit in limits], color="0.4", lw=1, ls=":", label="0.8 x ratio")
    for kind, marker in kinds.items():
        shown = [row for row in rows if row["shape"].startswith(kind)]
        names = {"forgetful": "dropped thinking", "best": "best of 4", "group": "group, shared prompt"}
        points = [row["ratio"] for row in shown], [row["speedup"] for row in shown]
        speed.plot(*points, marker, ms=7, label=names.get(kind, kind))
    speed.set(xscale="log", yscale="log", xlabel="packing ratio (flat tokens per computed token)")
    speed.set(ylabel="times faster than flat rows", title="Update: tree against flat per-call rows")
    for axis in (speed.xaxis, speed.yaxis):
        axis.set_major_locator(plt.FixedLocator([1, 2, 5, 10, 20, 30]))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(plt.NullLocator())
    speed.legend(fontsize=8)

    near = [row for row in rows if row["shape"].startswith(("siblings", "unrelated"))]
    even.axhline(1, color="0.4", lw=1)
    even.plot([r["ratio"] for r in near], [r["speedup"] for r in near], "o-", label="tree")
    chosen = [r["seconds"]["flat"] / r["seconds"][r["planner"]] for r in near]
    even.plot([r["ratio"] for r in near], chosen, "s--", mfc="none", ms=9, label="what the planner takes")
    even.set(xlabel="packing ratio", ylabel="times faster than flat rows", title="Where sharing starts to pay")
    even.legend(fontsize=8)

    large = [row for row in rows if row["ratio"] > 1.5]
    places = np.arange(len(large))
    for offset, name in ((-0.27, "tree"), (0.0, "merged"), (0.27, "flat")):
        memory.barh(places + offset, [row["memory_mib"][name] for row in large], 0.25, label=name)
    memory.set_yticks(places, [f"{row['shape']} ({row['ratio']:.1f})" for row in large], fontsize=7)
    memory.set(xscale="log", xlabel="MiB above the model", title="Peak memory of one update")
    memory.legend(fontsize=8)
    for axes in (speed, even, memory):
        axes.grid(alpha=0.3)
    figure.savefig(ASSETS / "tree_training.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--charts", action="store_true", help="draw the committed figures, and no more")
    arguments = parser.parse_args()
    if arguments.charts:
        draw(json.loads((RESULTS / "tree_training.json").read_text()))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    model = model_on(device)
    costs = CostModel.of(model)
    causal_pass(model, 512, 64, device)()  # the first pass of a process is slow
    parameters = sum(parameter.numel() for parameter in model.parameters())
    table = []
    for name, make in SHAPES.items():
        if arguments.only not in name:
            continue
        row = measure(model, costs, make(), device, arguments.repeats)
        table.append({"shape": name, **row})
        print(
            f"{name:26} {row['tokens']:5} tokens  ratio {row['ratio']:5.2f}  speedup {row['speedup']:5.2f} "
            f"({row['speedup_over_ratio']:.2f} x)  vs merged {row['against_merged']:5.2f}  causal "
            f"{row['against_causal']:.2f}  planner {row['planner']:6} {row['planner_against_best']:.2f} of best  MiB "
            + " ".join(f"{key}={value:.0f}" for key, value in row["memory_mib"].items()),
            flush=True,
        )
        if not arguments.only:  # after each shape, so that a run that is cut short leaves what it has
            write_result(
                "tree_training" if device == "cpu" else "tree_training_gpu",
                {"device": device, "parameters": parameters, "threads": 1, "shapes": table},
            )
    if not arguments.only and device == "cpu":
        draw(json.loads((RESULTS / "tree_training.json").read_text()))


if __name__ == "__main__":
    main()
