"""The real runs of `scale.py`, and their agent: some turns, each a reply and then a tool that takes its time.

The local backbone trains a tiny model. In vLLM's place stands the tests' server over the embedded engine, so the engine
has a process and weights of its own. Most replies and waits are short and a few are very long, as with real agents;
SCALE_LOAD says how long.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
from common import ROOT, known_figures, output_of
from numpy.typing import NDArray

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask
from ajet.schema.episode import Episode
from ajet.schema.errors import EnvironmentUnavailableError

N = TypeVar("N", int, float)
REPEAT = 4
"""Episodes of a task."""
MOST_TURNS = 8
VOCABULARY = 512

CONF = """
ajet:
  project_name: scale
  experiment_name: scale
  model: {{path: "tiny:qwen2-0.3m"}}
  task_reader: {{type: jsonl_dataset_file, jsonl_dataset_file: {{training: {{file_path: {folder}/tasks.jsonl}}}}}}
  data: {{train_batch_size: {load.tasks}, max_prompt_length: 1024, max_response_length: 1024}}
  rollout:
    user_workflow: {here}->LongTailed
    engine: vllm
    vllm: {{python: {python}, start_timeout: 600}}
    num_repeat: {repeat}
    episode_retries: 9
    temperature: 1.0
    max_model_len: 2048
    max_response_length_in_one_turn: 192
    max_staleness: {load.ahead}
    compute_madness_checklist: []
  trainer_common:
    total_training_steps: {load.steps}
    val_before_train: false
    test_freq: 0
    save_freq: 0
    use_kl_loss: false
    optim: {{lr: 1.0e-6}}
    logger: [file]
"""


@dataclass(frozen=True)
class Load:
    """A run: its batch, how far it draws ahead, and how its episodes differ from those of a plain run."""

    tasks: int
    ahead: int = 0
    replies: float = 1.0
    tools: float = 1.0
    failures: float = 0.0
    """The chance of an attempt to die after a reply. It is run again."""
    steps: int = 14


FITTED = {"narrow": Load(4), "wide": Load(12), "one ahead": Load(8, ahead=1)}
CHECKED = {
    "another width": Load(16),
    "longer replies, slower tools": Load(6, replies=2.0, tools=3.0),
    "three ahead, attempts that die": Load(10, ahead=3, failures=0.08, steps=18),
}


@dataclass(frozen=True)
class Costs:
    """What was fitted, in seconds and tokens."""

    decode: float
    """Of a step of the engine, which gives each reply in flight one token; and more of it for each of them."""
    decode_each: float
    prefill: float
    host: float
    """A process's work for a call (gateway, tracker, client, agent): one core does it, call after call."""
    latency: tuple[float, ...]
    """The rest of a call, which nobody else waits for; and what an agent does between calls, its tool left out."""
    between: tuple[float, ...]
    update: float
    update_token: float
    slowed: float
    """Times as long that an update takes beside episodes in the trainer's process."""
    sync: float
    rest: float
    """Of a step: credit, recording, metrics."""
    opening: int
    """Tokens of a first prompt, and those that a further turn adds."""
    turn: int
    tool: tuple[float, float]
    """Of the logarithm of a tool's seconds: mean and deviation."""
    replies: tuple[int, ...]
    turns: tuple[int, ...]


class LongTailed(Workflow):
    name: str = "long_tailed"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        load = json.loads(os.environ["SCALE_LOAD"])
        dice, tools = random.Random(), list[float]()
        client = tuner.as_raw_openai_sdk_client()
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        for _ in range(min(MOST_TURNS, 1 + int(dice.expovariate(0.5)))):
            mean = load["replies"] * (2 + dice.lognormvariate(2.5, 0.7))
            # the more tokens end a reply, the shorter it is
            asked = {"stop_token_ids": dice.sample(range(VOCABULARY), round(VOCABULARY / mean))}
            reply = await client.chat.completions.create(model="m", messages=messages, extra_body=asked)
            if dice.random() < load["failures"]:
                raise EnvironmentUnavailableError("the tool's machine is gone")
            began = time.monotonic()
            await asyncio.sleep(load["tools"] * dice.lognormvariate(-3.5, 1.2))
            tools.append(time.monotonic() - began)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
            messages.append({"role": "user", "content": "and then?"})
        return WorkflowOutput(reward=dice.random(), metadata={"tools": tools})


def conduct_all(loads: dict[str, Load]) -> dict[str, dict[str, Any]]:
    """Runs to fit and runs to check take turns, so that a busy hour of the machine is in both."""
    runs = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in sorted(loads, key=lambda name: list(loads).index(name) % 3):
            runs[name] = conduct(loads[name], Path(scratch) / str(len(runs)))
    return runs


def conduct(load: Load, folder: Path) -> dict[str, Any]:
    """One run in a process of its own: the metrics of its steps, its episodes, and its processor time."""
    sys.path.insert(0, str(ROOT / "tests"))
    from ajet.observe.episode_store import EpisodeStore
    from ajet.observe.metrics import read_metrics
    from support.torch_vllm_server import vllm_python

    folder.mkdir()
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"question": f"task {number}"}) + "\n" for number in range(load.tasks)))
    conf = folder / "job.yaml"
    python = vllm_python(folder)
    conf.write_text(CONF.format(folder=folder, load=load, here=Path(__file__), python=python, repeat=REPEAT))
    command = [sys.executable, str(Path(__file__)), str(conf), str(folder)]
    said = output_of(command, SCALE_LOAD=json.dumps(asdict(load)))
    steps = [step for step in read_metrics(folder / "scale" / "metrics.jsonl") if "time/step" in step]
    episodes = [row.episode for row in EpisodeStore(folder / "scale" / "episodes.sqlite").all()]
    cpu = json.loads(said.strip().splitlines()[-1])
    return {"load": load, "steps": steps, "episodes": episodes, "cpu": cpu}


def fit(narrow: dict[str, Any], wide: dict[str, Any], ahead: dict[str, Any]) -> Costs:
    """The constants, from three runs. What only an episode itself waits for is read from the narrow one, in which
    episodes are least in each other's way."""
    calls = np.concatenate([_calls(run) for run in (narrow, wide, ahead)])
    decode, decode_each, prefill, _ = _least_squares(calls[:, 1:5], calls[:, 0])
    alone = calls[: len(_calls(narrow))]
    latency = np.maximum(0.0, alone[:, 0] - alone[:, 1:4] @ [decode, decode_each, prefill])
    between = [
        max(0.0, wait - tool)
        for episode in narrow["episodes"]
        for wait, tool in zip(_waits(episode), episode.metadata["tools"], strict=False)
    ]
    tools = np.log(
        [tool for run in (narrow, wide) for episode in run["episodes"] for tool in episode.metadata["tools"]]
    )
    steps = [step for run in (narrow, wide) for step in run["steps"][1:]]
    sizes = np.array([[1.0, step["tokens/computed"]] for step in steps])
    update, update_token = _least_squares(sizes, np.array([step["time/update"] for step in steps]))
    late = [step["time/update"] / (update + update_token * step["tokens/computed"]) for step in ahead["steps"][1:]]
    served = sum(step["episode/calls"] * step["episode/count"] for step in steps)
    rest = [
        after["time"] - before["time"] - after["time/rollout"] - after["time/update"] - after["time/sync"]
        for run in (narrow, wide)
        for before, after in pairwise(run["steps"])
    ]
    episodes = [episode for run in (narrow, wide, ahead) for episode in run["episodes"] if episode.tree.calls]
    fresh = [[call[4] for call in _of(episode)] for episode in episodes]
    return Costs(
        decode=decode,
        decode_each=decode_each,
        prefill=prefill,
        host=sum(cpu for run in (narrow, wide) for cpu in run["cpu"][1:]) / served,
        latency=_spread([round(seconds, 4) for seconds in latency.tolist()]),
        update=update,
        update_token=update_token,
        slowed=max(1.0, median(late)),
        sync=median(step["time/sync"] for step in steps),
        rest=median(rest),
        opening=round(median(tokens[0] for tokens in fresh)),
        turn=round(median(count for tokens in fresh for count in tokens[1:])),
        between=_spread([round(seconds, 4) for seconds in between]),
        tool=(float(tools.mean()), float(tools.std())),
        replies=_spread([call[3] for episode in episodes for call in _of(episode)]),
        turns=_spread([len(episode.tree.calls) for episode in episodes]),
    )


def _of(episode: Episode) -> list[tuple[float, float, int, int, int]]:
    """Of each call: when it began and ended, its prompt's and its reply's tokens, and those of the prompt that the
    engine didn't have."""
    found = []
    for call in episode.tree.calls:
        began = episode.began + call.started_s
        known = 0
        if call.extends >= 0:
            before = episode.tree.calls[call.extends]
            known = before.prompt_tokens + len(before.logprobs)
        found.append((began, began + call.seconds, call.prompt_tokens, len(call.logprobs), call.prompt_tokens - known))
    return found


def _calls(run: dict[str, Any]) -> NDArray[np.float64]:
    """A row for each call: its seconds; its tokens; its tokens times the calls in flight meanwhile; the prompt tokens
    that came to the engine meanwhile; 1."""
    calls = np.array(sorted(call for episode in run["episodes"] for call in _of(episode)), dtype=np.float64)
    began, ended, _, tokens, fresh = calls.T
    times = np.concatenate([began, ended])
    order = np.argsort(times)
    flying = np.cumsum(np.concatenate([np.ones(len(began)), -np.ones(len(ended))])[order])
    area = np.concatenate([[0.0], np.cumsum(flying[:-1] * np.diff(times[order]))])
    beside = (np.interp(ended, times[order], area) - np.interp(began, times[order], area)) / (ended - began)
    sums = np.concatenate([[0.0], np.cumsum(fresh)])
    came = sums[np.searchsorted(began, ended)] - sums[np.searchsorted(began, began)]
    return np.stack([ended - began, tokens, tokens * beside, came, np.ones(len(began))], axis=1)


def _waits(episode: Episode) -> list[float]:
    """The seconds between a reply and the next call."""
    return [after[0] - before[1] for before, after in pairwise(_of(episode))]


def _spread(values: list[N], of: int = 200) -> tuple[N, ...]:
    """This many of them, evenly from the smallest to the largest."""
    ordered = sorted(values)
    return tuple(ordered[round(index * (len(ordered) - 1) / (of - 1))] for index in range(of))


def _least_squares(rows: NDArray[np.float64], values: NDArray[np.float64]) -> list[float]:
    """Coefficients that aren't negative: one that would be is left out."""
    kept = list(range(rows.shape[1]))
    while True:
        found = np.linalg.lstsq(rows[:, kept], values, rcond=None)[0]
        if (found >= 0).all():
            return [float(found[kept.index(index)]) if index in kept else 0.0 for index in range(rows.shape[1])]
        del kept[int(np.argmin(found))]


def saturation() -> dict[str, Any]:
    """What one core serves in a second, from the results of the benchmarks that measured it."""
    store, children = known_figures("store"), known_figures("isolated_workflows")["cpu_ms_of_a_child_that"]
    return {
        "gateway.json: calls": round(1e3 / known_figures("gateway")["stub_engine"][-1]["cpu_ms_per_request"]),
        "store.json: rollouts in batches": round(1e3 / store["server_cpu_ms_per_rollout"]),
        "store.json: rollouts span by span": round(1e3 / store["span_by_span_server_cpu_ms"]),
        "isolated_workflows.json: processes of one episode": round(1e3 / children["opens_a_loop"]),
    }


def child(conf: str, folder: str) -> None:
    """The run. Prints this process's CPU seconds while it waited for each step's episodes."""
    from ajet.backbone.local.rollouts import Drawn, Rollouts
    from ajet.cli.main import main as ajet

    spent: list[float] = []
    take = Rollouts.take

    def measured(self: Rollouts, step: int) -> Drawn:
        before = time.process_time()
        drawn = take(self, step)
        spent.append(time.process_time() - before)
        return drawn

    Rollouts.take = measured  # type: ignore[method-assign]
    code = ajet(["--conf", conf, "--exp-dir", folder, "--quiet", "--fresh"])
    if code:
        raise SystemExit(code)
    print("\n" + json.dumps(spent))


if __name__ == "__main__":
    child(*sys.argv[1:])
