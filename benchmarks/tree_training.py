"""Forward + backward of one update: packed trees against merged rows, flat per-call rows, and a plain causal pass.

Over shapes of trees and packing ratios. On a CPU one thread is measured in CPU time, so that a busy machine disturbs
little; on a GPU wall time. Also the peak memory, and which layout the planner takes.

    python benchmarks/tree_training.py [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import write_result

from ajet.credit.weights import CallCredit, EpisodeCredit
from ajet.schema.call_tree import ROOT, Call, CallTree, Run
from ajet.trainer.forward import BestForward, Forward, RowForward
from ajet.trainer.pack import Item, Layout, Pack, items_of, make_packs
from ajet.trainer.planner import CostModel, plan

VOCAB = 2048
LONG_ENOUGH_S = 30.0
"""A way that takes this long is not repeated further."""


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


SHAPES: dict[str, Callable[[], list[CallTree]]] = {
    "unrelated rows": lambda: [chain(1, 200, 0, 56, seed) for seed in range(8)],
    "chain, 2 turns": lambda: [chain(2, 300, 40, 60)],
    "chain, 4 turns": lambda: [chain(4, 200, 60, 60)],
    "chain, 10 turns": lambda: [chain(10, 200, 60, 60)],
    "chain, 20 turns": lambda: [chain(20, 200, 60, 60)],
    "chain, 50 turns": lambda: [chain(50, 200, 40, 40)],
    "group of 8, 1 turn": lambda: group(8, 1, 400, 0, 100),
    "group of 8, 2 turns": lambda: group(8, 2, 300, 40, 60),
    "group of 16, 4 turns": lambda: group(16, 4, 200, 20, 30),
    "forgetful, 10 turns": lambda: [forgetful(10, 200, 40, 80, 40)],
    "forgetful, 30 turns": lambda: [forgetful(30, 200, 30, 60, 30)],
    "best of 4, 8 turns": lambda: [best_of(8, 4, 200, 40, 60)],
}


@dataclass
class Way:
    """One way to compute the same gradient."""

    name: str
    forward: Forward
    packs: list[Pack]


def measure(run: Callable[[], None], device: str, repeats: int) -> float:
    """Seconds of the fastest of several runs, after a warm-up."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    times = []
    for _ in range(repeats + 1):
        if times and sum(times) > LONG_ENOUGH_S:
            break
        began = clock()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - began)
    return min(times[1:] or times)


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    model = model_on(device)
    costs = CostModel.of(model)
    repeats = 1 if arguments.quick else 3
    table = []
    for name, make in SHAPES.items():
        if arguments.only not in name:
            continue
        items = items_for(make())
        packs = {layout: make_packs(items, layout) for layout in Layout}
        ways = [
            Way("tree", BestForward(), packs[Layout.TREE]),
            Way("merged", RowForward(), packs[Layout.MERGED]),
            Way("flat", RowForward(), packs[Layout.FLAT]),
        ]
        seconds, memory = {}, {}
        for way in ways:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds[way.name] = measure(update_of(model, way), device, repeats)
            if device == "cuda":
                memory[way.name] = torch.cuda.max_memory_allocated() / 2**20
        (tree,) = packs[Layout.TREE]
        seconds["causal pass"] = measure(causal_pass(model, len(tree), len(tree.edges), device), device, repeats)
        flat, merged = seconds["flat"], seconds["merged"]
        chosen = plan(items, costs, None)[0].layout
        row = {
            "shape": name,
            "tokens": len(tree),
            "ratio": tree.unshared_tokens / len(tree),
            "speedup": flat / seconds["tree"],
            "speedup_over_ratio": flat / seconds["tree"] / (tree.unshared_tokens / len(tree)),
            "against_merged": merged / seconds["tree"],
            "against_causal": seconds["tree"] / seconds["causal pass"],
            "planner": str(chosen),
            "seconds": seconds,
            "memory_mib": memory,
        }
        table.append(row)
        print(
            f"{name:22} {len(tree):6} tokens  ratio {row['ratio']:5.2f}  speedup {row['speedup']:5.2f} "
            f"({row['speedup_over_ratio']:.2f} x ratio)  vs merged {row['against_merged']:.2f}  "
            f"causal {row['against_causal']:.2f}  planner {chosen}  "
            + " ".join(f"{key}={value:.3f}" for key, value in seconds.items()),
            flush=True,
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if not arguments.only:
        write_result(
            "tree_training" if device == "cpu" else "tree_training_gpu",
            {"device": device, "parameters": parameters, "threads": 1, "shapes": table},
        )


if __name__ == "__main__":
    main()
