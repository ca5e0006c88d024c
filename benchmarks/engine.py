"""The embedded engine compared with transformers and vLLM: concurrent multi-turn conversations, one thread, float32.

Every engine runs the same conversations (100-token messages, 50-token replies) with log-probabilities, on the 30 M
model. `generate` is called turn by turn with the whole batch, which favours it: real agents don't wait for each other.
Figures are generated tokens per second of CPU time, so that other programs on the machine matter little, and ratios
compare runs made next to each other. Figures of runs that the arguments exclude are kept.

    python benchmarks/engine.py [--sizes 32] [--turns 1 10] [--engines embedded generate] [--vllm-python PYTHON]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _engine_load import Load
from common import known_figures, write_result

from ajet.engine.model_source import ModelSource
from ajet.engine.torch.commands import TorchEngineSettings
from ajet.engine.torch.engine import TorchEngine
from ajet.engine.torch.kv_cache import PrefixCache
from ajet.schema.chat import GenerateRequest, Sampling

CHART = Path(__file__).parent.parent / "docs" / "assets" / "engine.svg"
MODEL = "tiny:qwen2-30m"
COLUMNS = 3
MAX_LENGTH = 2048
SHORTER = 5
"""Turns that 32 conversations take with continuous batching, too."""
CONTINUOUS_LIMIT = 32 * SHORTER
"""Conversations × turns up to which continuous batching is measured: its cost a turn grows with the square of all that
is said so far, and 32 conversations of 10 turns take it more than a quarter of an hour."""


def measure(run: Callable[[], None], load: Load) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return _rates(load, time.process_time() - cpu, time.perf_counter() - wall)


def _rates(load: Load, cpu: float, wall: float) -> dict[str, float]:
    return {"tokens_per_cpu_s": round(load.drawn / cpu, 1), "cpu_s": round(cpu, 2), "wall_s": round(wall, 2)}


def embedded(load: Load, *, prefix_cache: bool = True) -> dict[str, Any]:
    """Conversations that go on as soon as their own reply is there."""
    with contextlib.nullcontext() if prefix_cache else mock.patch.object(PrefixCache, "find", lambda *_: None):
        return _embedded(load)


def _embedded(load: Load) -> dict[str, Any]:
    engine = TorchEngine(MODEL, TorchEngineSettings(max_model_len=MAX_LENGTH, max_num_seqs=128))
    asyncio.run(engine.ready())
    latencies: list[float] = []

    async def conversation(index: int, messages: list[list[int]]) -> None:
        prompt: list[int] = []
        for turn, message in enumerate(messages):
            prompt = prompt + message
            sampling = Sampling(max_tokens=load.reply, seed=1000 * index + turn, ignore_eos=True)
            began = time.perf_counter()
            reply = await engine.generate(GenerateRequest(prompt, sampling, session_id=str(index)))
            latencies.append(time.perf_counter() - began)
            prompt = prompt + reply.token_ids

    async def all_of_them() -> None:
        await asyncio.gather(*(conversation(*each) for each in enumerate(load.messages())))

    figures: dict[str, Any] = measure(lambda: asyncio.run(all_of_them()), load)
    facts = asyncio.run(engine.stats())
    asyncio.run(engine.aclose())
    figures["median_reply_s"] = round(sorted(latencies)[len(latencies) // 2], 3)
    figures["prompt_tokens"] = facts["prompt_tokens"]
    figures["computed_prompt_tokens"] = facts["computed_prompt_tokens"]
    return figures


def generate(load: Load) -> dict[str, Any]:
    """`transformers.generate`, all conversations in one batch, turn by turn, logprobs from its scores."""
    model = ModelSource.resolve(MODEL).model()
    model.generation_config.eos_token_id = None

    def run() -> None:
        prompts: list[list[int]] = [[] for _ in range(load.conversations)]
        for messages in zip(*load.messages(), strict=True):
            prompts = [prompt + message for prompt, message in zip(prompts, messages, strict=True)]
            ids = torch.tensor(prompts, device=model.device)
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=load.reply,
                do_sample=True,
                top_k=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
            new = output.sequences[:, ids.shape[1] :]
            torch.log_softmax(torch.stack(output.scores, 1), -1).gather(2, new[:, :, None])
            prompts = output.sequences.tolist()

    return measure(run, load)


def continuous(load: Load) -> dict[str, Any]:
    """transformers' continuous batching, all conversations handed over turn by turn to one manager.

    The manager is started before the clock. Its cache is as large as the conversations need: by default it takes most
    of the machine's memory, and filling that with zeros would count as drawing.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = ModelSource.resolve(MODEL).model()
    drawing = GenerationConfig(max_new_tokens=load.reply, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    page = 32
    pages = load.conversations * (load.turns * (load.message + load.reply) // page + 2)
    batching = ContinuousBatchingConfig(page_size=page, num_blocks=pages, max_batch_tokens=2048, return_logprobs=True)
    with model.continuous_batching_context_manager(
        generation_config=drawing, continuous_batching_config=batching
    ) as manager:

        def run() -> None:
            prompts: list[list[int]] = [[] for _ in range(load.conversations)]
            for messages in zip(*load.messages(), strict=True):
                prompts = [prompt + message for prompt, message in zip(prompts, messages, strict=True)]
                names = manager.add_requests(prompts, max_new_tokens=load.reply)
                replies = _await_all(manager, set(names))
                prompts = [prompt + replies[name] for prompt, name in zip(prompts, names, strict=True)]

        return measure(run, load)


def _await_all(manager: Any, names: set[str]) -> dict[str, list[int]]:
    replies: dict[str, list[int]] = {}
    while names - replies.keys():
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            replies[result.request_id] = result.generated_tokens
        elif result is None and not manager.is_running():
            raise RuntimeError("transformers' continuous batching ended")
    return replies


def vllm(load: Load, python: str, *, prefix_cache: bool, device: str = "cpu") -> dict[str, Any]:
    """vLLM, in an environment of its own."""
    script = Path(__file__).parent / "_engine_vllm.py"
    folder = ModelSource.resolve(MODEL).path
    arguments = [python, str(script), folder, str(load.conversations), str(load.turns), str(int(prefix_cache)), device]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    seconds = json.loads(done.stdout.strip().splitlines()[-1])
    return _rates(load, seconds["cpu_s"], seconds["wall_s"])


ENGINES: dict[str, Callable[[Load, str], dict[str, Any]]] = {
    "embedded": lambda load, python: embedded(load),
    "generate": lambda load, python: generate(load),
    "embedded, no prefix cache": lambda load, python: embedded(load, prefix_cache=False),
    "continuous batching": lambda load, python: continuous(load),
    "vllm, no prefix cache": lambda load, python: vllm(load, python, prefix_cache=False),
    "vllm": lambda load, python: vllm(load, python, prefix_cache=True),
}


def wanted(load: Load, name: str, python: str | None) -> bool:
    if "vllm" in name:
        return python is not None
    if name == "continuous batching":
        return load.conversations * load.turns <= CONTINUOUS_LIMIT
    if load.turns == SHORTER:  # there for continuous batching
        return name == "embedded"
    return load.turns > 1 or "cache" not in name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, nargs="*", default=[1, SHORTER, 10])
    parser.add_argument("--sizes", type=int, nargs="*", default=[32, 1, 8, 128], help="concurrent conversations")
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), help="which of them to run")
    parser.add_argument("--vllm-python", help="the Python of an environment with vLLM's CPU build")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    narrowed = any(getattr(arguments, name) != parser.get_default(name) for name in ("turns", "sizes", "engines"))
    runs: dict[str, Any] = _earlier() if narrowed else {}
    for size in arguments.sizes:
        for turns in arguments.turns:
            if turns == SHORTER and size != 32:
                continue
            load = Load(size, turns if size <= 32 else min(turns, 2))
            for name in arguments.engines:
                if wanted(load, name, arguments.vllm_python):
                    figures = ENGINES[name](load, arguments.vllm_python)
                    key = f"{load.conversations} conversations, {load.turns} turns"
                    runs.setdefault(key, {})[name] = figures
                    print(f"{key}: {name}: {figures}", flush=True)
                    write_result("engine", {"model": MODEL, "threads": 1, "runs": runs, "ratios": ratios(runs)})
    draw(runs)


def _earlier() -> dict[str, Any]:
    return dict(known_figures("engine").get("runs", {}))


def _size(run: tuple[str, Any]) -> list[int]:
    """By which panels are ordered: conversations, turns."""
    return [int(word) for word in run[0].replace(",", "").split() if word.isdigit()]


def draw(runs: dict[str, Any]) -> None:
    """The chart of the documentation: tokens per CPU second, a panel for each load."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no chart: matplotlib is not installed (pip install -e '.[plot]')")
        return
    plt.rcParams["svg.hashsalt"] = "ajet"
    rows = -(-len(runs) // COLUMNS)
    chart, panels = plt.subplots(rows, COLUMNS, figsize=(4.2 * COLUMNS, 2.9 * rows), squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
    for axes, (title, by) in zip(panels.flat, sorted(runs.items(), key=_size), strict=False):
        axes.set_axis_on()
        names = [name for name in reversed(ENGINES) if name in by]
        rates = [by[name]["tokens_per_cpu_s"] for name in names]
        colours = ["tab:blue" if name == "embedded" else "0.65" for name in names]
        axes.bar_label(axes.barh([name.replace(", ", ",\n") for name in names], rates, color=colours), fmt="%.0f")
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.18)
        axes.tick_params(labelsize=8)
    CHART.parent.mkdir(parents=True, exist_ok=True)
    chart.tight_layout()
    chart.savefig(CHART, metadata={"Date": None})
    print("chart in", CHART)


def ratios(runs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """How many times the embedded engine's throughput is that of the others."""
    return {
        key: {
            name: round(by["embedded"]["tokens_per_cpu_s"] / figures["tokens_per_cpu_s"], 2)
            for name, figures in by.items()
            if name != "embedded"
        }
        for key, by in runs.items()
        if "embedded" in by
    }


if __name__ == "__main__":
    main()
