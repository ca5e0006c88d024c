"""A run of episodes of which 30 % fail, and how each of them was counted.

Gateway, sessions, tracker, pool and threads or processes are real; only the model's replies are scripted.
"""

from __future__ import annotations

import random
import resource
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai.resources.chat  # noqa: F401 - so that the first episodes' time is not an import's

from ajet.config import Config, make_config
from ajet.engine.base import Engine
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import ScriptedEngine
from ajet.schema.episode import Episode
from ajet.schema.task import Task
from ajet.task_runner.runtime import Runtime
from ajet.task_runner.threads import GRACE_S

AGENT = Path(__file__).parent / "faulty_agent.py"
FAULTY_SHARE = 0.3
TIMEOUT_S = 15.0

EXPECTED = {
    "well": "completed",
    "raise": "workflow_error",
    "hang_await": "timeout",
    "hang_blocking": "timeout",
    "judge_nan": "judge_error",
    "judge_none": "judge_error",
    "judge_raise": "judge_error",
    "os_exit": "workflow_error",
    "segfault": "workflow_error",
}
ISOLATED_ONLY = ("os_exit", "segfault")


def tasks_of(episodes: int, *, isolated: bool) -> list[Task]:
    """Exactly 30 % of them fail, each kind equally often, in a random order that is always the same."""
    kinds = [kind for kind in EXPECTED if kind != "well" and (isolated or kind not in ISOLATED_ONLY)]
    faulty = round(episodes * FAULTY_SHARE)
    deeds = [kinds[index % len(kinds)] for index in range(faulty)] + ["well"] * (episodes - faulty)
    random.Random(0).shuffle(deeds)
    return [
        Task(main_query=f"Task {index}", task_id=f"task-{index}", metadata={"deed": deed})
        for index, deed in enumerate(deeds)
    ]


def config_of(*, isolated: bool, parallel: int) -> Config:
    return make_config(
        {
            "model.path": "tiny:qwen2-0.3m",
            "rollout.user_workflow": f"{AGENT}->FaultyAgent",
            "rollout.episode_timeout": TIMEOUT_S,
            "rollout.max_env_worker": parallel,
            "rollout.max_model_len": 512,
            "rollout.compute_madness_checklist": [],
            "task_judge.judge_protocol": f"{AGENT}->FaultyJudge",
            "task_runner.wrapper_type": "multi-processing" if isolated else "asyncio",
        }
    )


def scripted(config: Config) -> Engine:
    return ScriptedEngine(["Here is my reply."], lambda: ModelSource.resolve(config.ajet.model.path).tokenizer())


def run(episodes: int, *, isolated: bool, parallel: int) -> dict[str, Any]:
    """The figures of one run; `wrong` counts the episodes that ended under the wrong type."""
    before = _episode_threads()
    tasks = tasks_of(episodes, isolated=isolated)
    ended: list[Episode] = []
    config = config_of(isolated=isolated, parallel=parallel)
    cpu = _cpu_s()
    with Runtime(config, make_engine=scripted, on_episode=ended.append) as runtime:
        runtime.model()
        runtime.run(runtime.attempts.ready())
        started = time.perf_counter()
        runtime.run(runtime.pool.run_episodes(tasks))
        wall_s = time.perf_counter() - started
    cpu_s = _cpu_s() - cpu  # workers count when their server is gone
    time.sleep(2 * GRACE_S)
    deeds = {task.task_id: task.metadata["deed"] for task in tasks}
    found = Counter((deeds[episode.task_id], str(episode.status)) for episode in ended)
    return {
        "episodes": len(ended),
        "at_once": parallel,
        "found": {f"{deed}: {status}": count for (deed, status), count in sorted(found.items())},
        "wrong": sum(count for (deed, status), count in found.items() if EXPECTED[deed] != status),
        "rewards_of_failed": sum(episode.reward is not None for episode in ended if episode.status != "completed"),
        "unnamed_failures": sum(episode.failure is None for episode in ended if episode.status != "completed"),
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "episode_threads_left": len(_episode_threads() - before),
    }


def _episode_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("ajet-episode")}


def _cpu_s() -> float:
    """CPU time of this process and of its children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
