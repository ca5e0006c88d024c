"""Made-up episodes and experiment folders in the form that a real run writes, for tests and benchmarks.

`python tests/support/synthetic_run.py FOLDER` writes one to look at with `ajet view`.
"""

from __future__ import annotations

import math
import random
import re
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ajet.backbone.metrics import episode_metrics
from ajet.config import Config
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.recorder import EpisodeRecorder
from ajet.schema.chat import Sampling
from ajet.schema.episode import ROOT, Call, CallTree, Episode, EpisodeStatus, Failure, Fork, Ledger, Outcome, Run
from ajet.schema.task import Task

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
_PIECES = re.compile(r"<\|im_start\|>|<\|im_end\|>| ?[^\W\d_]{1,7}|\d| ?[^\w\s]|\s+|_|.", re.DOTALL)
_END = "<|im_end|>\n"


class Vocabulary:
    """Gives each piece of text an id as it comes, and answers as a tokenizer would."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._pieces: list[str] = []

    def encode(self, text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array([self._id(piece) for piece in _PIECES.findall(text)], np.int32)

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]

    def get_vocab(self) -> dict[str, int]:
        return self._ids

    def convert_ids_to_tokens(self, index: int) -> str:
        return self._pieces[index]


@dataclass(slots=True)
class CallCredit:
    advantage: float
    weight: float
    entries: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class EpisodeCredit:
    calls: list[CallCredit]


class TreeMaker:
    """Grows a call tree, a call at a time."""

    def __init__(self, vocabulary: Vocabulary, rng: random.Random, version: int = 0) -> None:
        self._vocabulary = vocabulary
        self._rng = rng
        self._version = version
        self._clock = 0.0
        self.tree = CallTree(runs=[Run(vocabulary.encode("<|im_start|>system\n"), ROOT, 0)], toolsets=[[CALCULATOR]])

    def call(
        self,
        agent: str,
        messages: list[dict[str, Any]],
        reply: dict[str, Any],
        *,
        extends: int = ROOT,
        alternative_to: int = ROOT,
        fork: Fork | None = None,
        trainable: bool = True,
    ) -> int:
        """Add a call: its prompt is that of `extends` and its reply, then `messages`; or another call's."""
        tree = self.tree
        if alternative_to != ROOT:
            twin = tree.calls[alternative_to]
            prompt_run, prompt_tokens, turn, extends = twin.prompt_run, twin.prompt_tokens, twin.turn, twin.extends
            messages = twin.new_messages
        else:
            parent = tree.calls[extends].run if extends != ROOT else 0
            turn = tree.calls[extends].turn + 1 if extends != ROOT else 0
            text = (
                "".join(f"<|im_start|>{m['role']}\n{m['content']}{_END}" for m in messages) + "<|im_start|>assistant\n"
            )
            if extends == ROOT:
                text = text.removeprefix("<|im_start|>system\n")
            prompt_run = self._run("\n" + text if extends != ROOT else text, parent)
            prompt_tokens = tree.runs[prompt_run].start + len(tree.runs[prompt_run].ids)
        index = len(tree.calls)
        run = self._run(_reply_text(reply), prompt_run, index)
        count = len(tree.runs[run].ids)
        logprobs = -np.abs(np.random.default_rng(self._rng.randrange(2**32)).standard_gamma(0.35, count))
        seconds = 0.02 * count
        tree.calls.append(
            Call(
                name=f"call-{index}", agent=agent, target=agent, turn=turn, prompt_run=prompt_run,
                prompt_tokens=prompt_tokens, run=run, logprobs=logprobs.astype(np.float32),
                mask=np.full(count, trainable), versions=[(0, self._version)],
                sampling=Sampling(temperature=0.9, max_tokens=1024), trainable=trainable, extends=extends,
                new_messages=messages, reply=reply, tools=0, fork=fork, started_s=self._clock, seconds=seconds,
            )
        )  # fmt: skip
        self._clock += seconds + 0.05
        return index

    def _run(self, text: str, parent: int, call: int = ROOT) -> int:
        above = self.tree.runs[parent]
        self.tree.runs.append(Run(self._vocabulary.encode(text), parent, above.start + len(above.ids), call))
        return len(self.tree.runs) - 1


def _reply_text(reply: dict[str, Any]) -> str:
    text = ""
    if reply.get("reasoning_content"):
        text += f"<think>\n{reply['reasoning_content']}\n</think>\n\n"
    text += reply.get("content") or ""
    for call in reply.get("tool_calls") or []:
        function = call["function"]
        text += f'\n<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
    return text + "<|im_end|>"


def _asks_calculator(thought: str, expression: str) -> dict[str, Any]:
    call = {"name": "calculator", "arguments": f'{{"expression": "{expression}"}}'}
    return {
        "role": "assistant",
        "content": thought,
        "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
    }


def math_episode(
    vocabulary: Vocabulary,
    rng: random.Random,
    *,
    task: int = 0,
    step: int = 0,
    repeat: int = 0,
    skill: float = 0.5,
    long: int = 0,
) -> Episode:
    """A solver with a calculator, sometimes with a checker beside it, retries and failures. `long`: extra tokens."""
    a, b, c = 12 + task * 7 % 83, 3 + task * 13 % 29, 5 + task * 5 % 17
    answer = a * b + c
    right = rng.random() < skill
    maker = TreeMaker(vocabulary, rng, step)
    question = (
        f"A shop sells {a} boxes a day with {b} apples each, and {c} single apples. How many apples is that a day?"
    )
    system = {
        "role": "system",
        "content": "You solve problems step by step. Use the calculator, then give \\boxed{answer}.",
    }
    first = maker.call(
        "solver",
        [system, {"role": "user", "content": question}],
        _asks_calculator(f"Each day {a} boxes of {b} apples are sold, so I multiply first.", f"{a} * {b}"),
    )
    result = {"role": "tool", "content": str(a * b), "tool_call_id": "call_0"}
    if rng.random() < 0.3:  # a reply thrown away: the agent asked again
        wasted = maker.call(
            "solver", [], {"role": "assistant", "content": "I am not sure what to do."}, alternative_to=first
        )
        maker.tree.calls[wasted].mask[:] = False
        maker.tree.calls[wasted].drop = "abandoned"
        maker.tree.calls[wasted].fork = Fork("same_prompt", first, "the same messages were sent again", 0)
    thought = f"Now I add the {c} single apples: {a * b} + {c} = {answer if right else answer + 10}."
    final_text = f"{thought}\n\n\\boxed{{{answer if right else answer + 10}}}"
    reasoning = "The product is known. What is left is the sum. " * (1 + long // 12)
    last = maker.call(
        "solver", [result], {"role": "assistant", "content": final_text, "reasoning_content": reasoning}, extends=first
    )
    if rng.random() < 0.4:
        verdict = "The steps are right." if right else "The sum looks wrong, please add again."
        ask = {"role": "user", "content": f"Check this solution:\n{final_text}"}
        system_checker = {"role": "system", "content": "You check solutions. Say what is wrong, briefly."}
        maker.call("checker", [system_checker, ask], {"role": "assistant", "content": verdict}, trainable=task % 2 == 0)
    if rng.random() < 0.25:
        fork = Fork("message_changed", last, "message 3: 'content' differs from what was sampled", 41)
        history = {"role": "user", "content": f"(summary so far) {a} * {b} = {a * b}. Finish the answer."}
        maker.call(
            "solver", [history], {"role": "assistant", "content": f"\\boxed{{{answer}}}"}, extends=first, fork=fork
        )
    return _finish(maker.tree, rng, task, step, repeat, right)


def _finish(tree: CallTree, rng: random.Random, task: int, step: int, repeat: int, right: bool) -> Episode:
    ledger = Ledger(captured=tree.sampled_tokens, trained=tree.trained_tokens)
    for call in tree.calls:
        if not call.mask.any():
            reason = call.drop or "not_trainable"
            ledger.masked[reason] = ledger.masked.get(reason, 0) + len(tree.runs[call.run].ids)
    status, failure, outcomes = EpisodeStatus.COMPLETED, None, ()
    fate = rng.random()
    if fate < 0.03:
        status = EpisodeStatus.WORKFLOW_ERROR
        trace = 'Traceback (most recent call last):\n  File "workflow.py", line 41, in execute\n    raise error\n'
        failure = Failure("ValueError", "no \\boxed{} in the answer", trace + "ValueError: no \\boxed{} in the answer")
    elif fate < 0.05:
        status, failure = EpisodeStatus.TIMEOUT, Failure("EpisodeTimeout", "rollout.episode_timeout (1200 s) ran out")
    elif fate < 0.09:
        status, outcomes = EpisodeStatus.TRUNCATED, (Outcome.LENGTH,)
    seconds = sum(call.seconds for call in tree.calls)
    return Episode(
        episode_id=uuid.UUID(int=rng.getrandbits(128)).hex[:16], task_id=f"apples-{task:04d}", status=status, tree=tree,
        ledger=ledger, group_id=f"s{step}-t{task}", repeat=repeat, tag=("easy", "medium", "hard")[task % 3],
        reward=None if failure else float(right), is_success=None if failure else right, outcomes=outcomes,
        failure=failure, metadata={"answer": task}, log_metrics={"tool": {"calls": 1}, "lengths": [3, 5]},
        timings={"total": seconds + 0.4, "model": seconds, "judge": 0.1, "queue": 0.05},
    )  # fmt: skip


def task_of(episode: Episode) -> Task:
    """The task of an episode from `math_episode`, as a reader would give it."""
    number = int(episode.task_id[-4:])
    a, b, c = 12 + number * 7 % 83, 3 + number * 13 % 29, 5 + number * 5 % 17
    facts = {"answer": str(a * b + c), "tag": episode.tag, "source": {"book": "apples", "page": number}}
    return Task(main_query=episode.tree.calls[0].new_messages[-1]["content"], task_id=episode.task_id, metadata=facts)


def credit_of(episodes: list[Episode]) -> list[EpisodeCredit | None]:
    """Group-relative advantages."""
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    spread = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) if rewards else 0.0
    credits: list[EpisodeCredit | None] = []
    for episode in episodes:
        if episode.reward is None:
            credits.append(None)
            continue
        advantage = (episode.reward - mean) / (spread + 1e-6)
        calls = [
            CallCredit(advantage, 1e-4, [(advantage, 1e-4)]) if call.mask.any() else CallCredit(0.0, 0.0)
            for call in episode.tree.calls
        ]
        credits.append(EpisodeCredit(calls))
    return credits


def trainer_logprobs(episode: Episode, rng: random.Random) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    noise = np.random.default_rng(rng.randrange(2**32))
    return [
        np.minimum(call.logprobs + noise.normal(0, 0.05, len(call.logprobs)), 0).astype(np.float32)
        if call.mask.any()
        else np.zeros(0, np.float32)
        for call in episode.tree.calls
    ]


def batches(
    seed: int, steps: int, tasks: int, repeats: int, vocabulary: Vocabulary
) -> Iterator[tuple[int, list[Episode]]]:
    """For each step, its groups' episodes; the model gets better as steps go by."""
    rng = random.Random(seed)
    for step in range(1, steps + 1):
        skill = 0.2 + 0.7 * (1 - math.exp(-step / (steps / 2.5)))
        for task in range(tasks):
            number = (step * tasks + task) % 300
            yield (
                step,
                [
                    math_episode(vocabulary, rng, task=number, step=step, repeat=repeat, skill=skill)
                    for repeat in range(repeats)
                ],
            )


def step_metrics(step: int, episodes: list[Episode], rng: random.Random) -> dict[str, float]:
    """What a trainer would log beside the episodes' own metrics."""
    fade = math.exp(-step / 30)
    return episode_metrics(episodes) | {
        "train/loss": 0.05 * fade + rng.gauss(0, 0.006), "train/kl": 0.002 + 0.03 * (1 - fade) + rng.gauss(0, 0.001),
        "train/entropy": 0.25 + 0.6 * fade + rng.gauss(0, 0.02), "train/clip_fraction": abs(rng.gauss(0.03, 0.01)),
        "train/grad_norm": 0.4 + 0.5 * fade + abs(rng.gauss(0, 0.05)), "train/lr": 1e-6, "train/staleness": 0.0,
        "train/packing_ratio": 2.1 + rng.gauss(0, 0.1), "perf/tokens_per_second": 1800 + rng.gauss(0, 90),
        "time/rollout": 6 + rng.gauss(0, 0.4), "time/train": 3 + rng.gauss(0, 0.2), "time/sync": 0.1,
        "time/step": 9.5 + rng.gauss(0, 0.5),
    }  # fmt: skip


def write_validations(
    root: Path, name: str, validations: dict[int, dict[str, list[float | None]]], seed: int = 0, again: str = ""
) -> None:
    """A run with these rewards of each task in each validation. None: the episode failed."""
    config = Config()
    config.ajet.experiment_name, config.ajet.trainer_common.seed = name, seed
    with ExperimentFolder.open(config, exp_dir=root) as experiment:
        recorder = EpisodeRecorder(experiment.episodes)
        for step, tasks in validations.items():
            values = [value for found in tasks.values() for value in found if value is not None]
            experiment.metrics.log(step, {"val/return/mean": float(np.mean(values))})
            for task, rewards in tasks.items():
                for repeat, reward in enumerate(rewards):
                    status = EpisodeStatus.COMPLETED if reward is not None else EpisodeStatus.WORKFLOW_ERROR
                    episode = Episode(
                        f"{name}{step}{task}{repeat}{again}", task, status, CallTree(), Ledger(), repeat=repeat
                    )
                    episode.reward = reward
                    episode.failure = Failure("X", "x") if reward is None else None
                    asked = Task(main_query=f"What is {task}?", task_id=task)
                    recorder.record(episode, step, validation=True, task=asked)
        recorder.close()


def write_experiment(
    root: Path, name: str = "math-agent", *, steps: int = 40, tasks: int = 4, repeats: int = 4, seed: int = 0
) -> Path:
    """A whole experiment folder; one whose name says so was trained with rloo."""
    algorithm = {"adv_estimator": "rloo"} if name.endswith("rloo") else {}
    ajet = {"experiment_name": name, "model": {"path": "tiny:chat"}, "trainer_common": {"algorithm": algorithm}}
    config = Config.model_validate({"ajet": ajet})
    vocabulary = Vocabulary()
    rng = random.Random(seed + 1)
    with ExperimentFolder.open(config, exp_dir=root, backbone="local") as folder:
        recorder = EpisodeRecorder(folder.episodes, tokenizer=vocabulary)
        by_step: dict[int, list[Episode]] = {}
        for step, group in batches(seed, steps, tasks, repeats, vocabulary):
            by_step.setdefault(step, []).extend(group)
            for episode, credit in zip(group, credit_of(group), strict=True):
                recorder.record(
                    episode, step, credit, trainer_logprobs=trainer_logprobs(episode, rng),
                    task=task_of(episode),
                )  # fmt: skip
        for step, episodes in by_step.items():
            metrics = step_metrics(step, episodes, rng)
            if step % 10 == 0:
                metrics |= {
                    "val/return/mean": metrics["return/mean"] + 0.03,
                    "val/success/rate": metrics["success/rate"],
                }
            folder.metrics.log(step, metrics)
        recorder.close()
    return folder.path


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "saved_experiments")
    for seed, name in enumerate(("math-agent", "math-agent-rloo", "math-agent-long")):
        print(write_experiment(target, name, seed=seed, steps=40 + 20 * seed))
