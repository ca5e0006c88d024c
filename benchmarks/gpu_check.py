"""Everything that only a GPU can show, in one command and without a network: is it right, how fast, how much memory.

Random weights in the shapes of Qwen3-0.6B, Qwen3-1.7B and, with LoRA, Qwen3-8B. For each of them:

- gradient: packed trees and padded rows against every row by itself, in float32 and bfloat16
- logprobs: the embedded engine against the trainer, before and after an update
- vllm: the same for vLLM; whether it sleeps, wakes, and serves an update's weights
- memory: the peak of two updates against the plan of `ajet validate --plan`
- kernels: an update with compiled layers and with Liger's output layer, against one without
- layouts: an update in trees against merged and flat rows, at packing ratios from 1 to 26
- engine: tokens per second of the embedded engine, transformers' `generate`, and vLLM
- step: a whole GRPO step with the embedded engine and with vLLM; its peak memory against the plan

Each part is a process of its own that ends after 8 minutes at most; `--part-minutes` gives a busy machine more. What is
measured is kept in `--work`, and another call goes on from there. vLLM is measured if this Python has it, or the one
that `--vllm-python` names.

    python benchmarks/gpu_check.py                      # without a CUDA device it says so and changes nothing
    python benchmarks/gpu_check.py --device cuda        # the same, but a missing device is an error: `make gpu-check`
    python benchmarks/gpu_check.py --device cpu         # the whole way in small, to see that it works
    python benchmarks/gpu_check.py --part layouts       # or --part layouts-0.6b; several are possible
    python benchmarks/gpu_check.py --minutes 8          # begin no part after that; call it again to go on
    python benchmarks/gpu_check.py --fresh              # forget what is measured
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ajet.schema.files import write_whole

HERE = Path(__file__).parent
PART_MINUTES = 8.0
CPU_LABEL = "in small on a CPU, to see that it works: these figures say nothing about a GPU"
PARTS = ("gradient", "logprobs", "vllm", "memory", "kernels", "layouts", "engine", "step")
SHAPES = {"cuda": ("0.6b", "1.7b", "8b-lora"), "cpu": ("tiny", "tiny-lora")}
ONLY_WHOLE_ON_A_CPU = ("kernels", "layouts", "engine", "step")
"""Parts that adapters would only repeat there."""


class Refused(Exception):
    """What the user asked for can't be done."""


def no_cuda() -> str | None:
    """Why no CUDA device can be used here, and what to do; None if one can."""
    import torch

    from ajet.backbone.local.placement import why_no_gpu, why_unfit

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `why_no_gpu` says it in our words
        there = torch.cuda.is_available()
    if not there:
        none = why_no_gpu()
        return f"PyTorch finds no CUDA device ({none.cause}): {none.fix}"
    if (why := why_unfit(0)) is not None:
        return f"{why}: install a PyTorch that is built for it (pytorch.org)"
    try:
        torch.ones(8, device="cuda").sum().item()
    except RuntimeError as error:
        return f"{str(error).splitlines()[0]}: install a PyTorch that is built for this GPU and driver (pytorch.org)"
    return None


def hardware(device: str) -> dict[str, Any]:
    """What the figures belong to, beside processor and versions."""
    import torch

    if device == "cpu":
        return {"name": "CPU", "label": CPU_LABEL}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def vllm_python(named: str | None, device: str) -> tuple[str | None, str]:
    """A Python with vLLM for this device, or the reason why there is none."""
    asked = named or os.environ.get("AJET_VLLM_PYTHON")
    if asked is None and (device == "cpu" or importlib.util.find_spec("vllm") is None):
        return None, "this Python has no vLLM: --vllm-python names one that has"
    python = asked or sys.executable
    test = "import torch, vllm" + ("; assert torch.cuda.is_available(), 'it sees no GPU'" if device == "cuda" else "")
    try:
        tried = subprocess.run([python, "-c", test], capture_output=True, text=True, check=False)
    except OSError as error:
        return None, f"vLLM's Python {python} can't be started: {error.strerror}"
    if tried.returncode:
        last = (tried.stderr.strip().splitlines() or ["no message"])[-1]
        return None, f"vLLM can't be used in {python}: {last}"
    return python, ""


class State:
    """What is measured so far, in a file; another device or PyTorch begins anew."""

    def __init__(self, file: Path, facts: dict[str, Any], *, fresh: bool) -> None:
        self.file = file
        self.parts: dict[str, dict[str, Any]] = {}
        self._facts = facts
        if fresh or not file.is_file():
            return
        try:
            kept = json.loads(file.read_text())
            if kept["facts"] == facts:
                self.parts = kept["parts"]
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(f"{file} can't be read ({error!r}): begin anew with --fresh") from error

    def done(self, name: str) -> bool:
        """Whether there are figures, and nothing in them is wrong or missing."""
        return name in self.parts and "not_measured" not in self.parts[name] and self.parts[name].get("ok", True)

    def add(self, name: str, figures: dict[str, Any]) -> None:
        self.parts[name] = figures
        write_whole(self.file, json.dumps({"facts": self._facts, "parts": self.parts}, indent=1))


def all_parts(device: str) -> Iterator[str]:
    """Small models first, and what may be wrong before what may be slow."""
    for shape in SHAPES[device]:
        for part in PARTS:
            if device == "cpu" and shape != "tiny" and part in ONLY_WHOLE_ON_A_CPU:
                continue
            yield f"{part}-{shape}"


def chosen_parts(device: str, asked: Sequence[str]) -> list[str]:
    every = list(all_parts(device))
    for name in asked:
        if name not in PARTS and name not in every:
            raise Refused(f"--part {name}: there is no such part; choose from {', '.join([*PARTS, *every])}")
    return [name for name in every if not asked or name in asked or name.partition("-")[0] in asked]


def conduct(name: str, told: dict[str, Any], work: Path, limit: float) -> dict[str, Any]:
    """One part in a process of its own, whose group is ended if it takes too long."""
    part, _, shape = name.partition("-")
    work.mkdir(parents=True, exist_ok=True)
    job, log = work / f"{name}.json", work / f"{name}.log"
    figures = job.with_suffix(".figures")
    figures.unlink(missing_ok=True)
    job.write_text(json.dumps({**told, "part": part, "shape": shape, "work": str(work)}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]), "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    with log.open("w") as out:
        child = subprocess.Popen(
            [sys.executable, str(HERE / "_gpu_parts.py"), str(job)],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            return {"not_measured": f"it took longer than {limit:g} s; its output is in {log.name}"}
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it started may outlive it
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if child.returncode or not figures.is_file():
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        return {"ok": False, "error": f"ended with {child.returncode}: {last[:300]}"}
    found: dict[str, Any] = json.loads(figures.read_text())
    return {**found, "part_seconds": round(time.monotonic() - began, 1)}


# ---------------------------------------------------------------- tables


def verdict(figures: dict[str, Any]) -> str:
    if "not_measured" in figures:
        return f"not measured: {figures['not_measured']}"
    if "error" in figures:
        return f"FAILED: {figures['error']}"
    if "ok" not in figures:
        return "measured"
    return "ok" if figures["ok"] else "WRONG"


def rows_of(part: str, figures: dict[str, Any]) -> Iterator[str]:
    """What a part found, a line for each thing."""
    if "not_measured" in figures or "error" in figures:
        return
    if part in ("gradient", "logprobs"):
        for dtype in ("float32", "bfloat16"):
            yield f"{dtype:<10}{_plain(figures[dtype])}"
    elif part == "kernels":
        for name in ("plain", "compiled", "liger", "both"):
            yield f"{name:<10}{_plain(figures[name], ('seconds', 'memory_mib', 'first_s', 'why'))}"
    elif part == "layouts":
        for name, row in figures["shapes"].items():
            yield f"{name:<22}{_plain(row, ('tokens', 'ratio', 'speedup', 'against_merged'))}"
    elif part == "engine":
        for load, by in figures["runs"].items():
            for name, row in by.items():
                yield f"{load}, {name:<10}{_plain(row, ('tokens_per_s', 'wall_s'))}"
    elif part == "step":
        for name in ("torch", "vllm", "trl"):
            row = figures[name]
            yield f"{name:<10}{_plain(row, ('step_seconds', 'rollout', 'train', 'peak_gib', 'planned_gib'))}"
    else:
        yield _plain(figures)


def _plain(row: dict[str, Any], names: Sequence[str] = ()) -> str:
    if "not_measured" in row:
        return f"not measured: {row['not_measured']}"
    shown = {name: row[name] for name in names or row if name in row and name not in ("ok", "part_seconds")}
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in shown.items()
        if value is not None and not (isinstance(value, dict) and "not_measured" not in value)
    )


def show(parts: dict[str, dict[str, Any]], names: Sequence[str]) -> None:
    for name in names:
        if name in parts:
            print(f"{name:<20} {verdict(parts[name])}")
            for line in rows_of(name.partition("-")[0], parts[name]):
                print(f"    {line}")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda: a missing device is an error")
    parser.add_argument("--part", action="append", default=[], help="a part, or one of its shapes; may be repeated")
    parser.add_argument("--minutes", type=float, help="begin no part after this many minutes")
    parser.add_argument(
        "--part-minutes", type=float, default=PART_MINUTES, help="end a part after so many (default: 8)"
    )
    parser.add_argument("--vllm-python", help="a Python that has vLLM; default: AJET_VLLM_PYTHON, or this one")
    parser.add_argument("--work", type=Path, default=HERE.parent / "build" / "gpu_check", help="what parts leave")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="measure only what is missing (default)")
    how.add_argument("--fresh", action="store_true", help="forget what is measured")
    return parser.parse_args()


def main() -> int:
    asked = options()
    device = asked.device or "cuda"
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported
    elif (why := no_cuda()) is not None:
        if asked.device is None:
            print(f"left out: {why}")
            return 0
        print(f"gpu-check: {why}; make gpu-check DEVICE=cpu tries the whole way in small", file=sys.stderr)
        return 2
    names = chosen_parts(device, asked.part)
    work = (asked.work / device).resolve()
    python, why_not = vllm_python(asked.vllm_python, device)
    told = {"device": device, "vllm_python": python, "why_no_vllm": why_not}
    facts = hardware(device)
    from common import machine, write_result

    state = State(work / "state.json", {**facts, **machine()}, fresh=asked.fresh)
    began = time.monotonic()
    for name in names:
        if state.done(name):
            print(f"{name}: measured before", flush=True)
            continue
        if asked.minutes is not None and time.monotonic() - began > 60 * asked.minutes:
            print(f"{asked.minutes:g} minutes are over: call it again to go on with {name}")
            break
        print(f"{name} …", flush=True)
        if name.startswith("vllm-") and python is None:
            state.add(name, {"not_measured": why_not})
            continue
        state.add(name, conduct(name, told, work, 60 * asked.part_minutes))
    every = list(all_parts(device))
    figures = {
        "device": facts,
        "complete": all(name in state.parts for name in every),
        "parts": {name: state.parts[name] for name in every if name in state.parts},
    }
    if figures["complete"]:
        shutil.rmtree(work / "models", ignore_errors=True)
    file = write_result("gpu" if device == "cuda" else "gpu_check_cpu", figures) if not asked.part else state.file
    print()
    show(state.parts, names)
    print(f"\n{facts['name']}{': ' + CPU_LABEL if device == 'cpu' else ''}\nfigures in {file}")
    wrong = [name for name in names if name in state.parts and not state.parts[name].get("ok", True)]
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the part that is running, too
    try:
        sys.exit(main())
    except Refused as refused:
        print(f"gpu-check: {refused}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("gpu-check: interrupted; what is measured is kept, and another call goes on from there", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # nobody reads our output any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(130)
