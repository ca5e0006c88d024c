"""How far ahead of the trainer episodes are drawn. The pool is a recording one; `test_own_engine.py` has real runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ajet.backbone.local.rollouts import Rollouts
from ajet.config.loader import load_config
from ajet.observe.progress import Progress
from ajet.schema.errors import ConfigError
from ajet.schema.task import Task
from ajet.task_reader.task_reader_base import TaskStream
from ajet.task_runner.runtime import ServiceLoop

STEPS = 6


class RecordingPool:
    """Notes which steps are drawn, and lets each end at once; `failing` raises instead."""

    def __init__(self, failing: int = 0) -> None:
        self.begun: list[int] = []
        self.failing = failing

    async def run_groups(self, tasks: list[Task], *, step: int, earlier: list[Task]) -> list[Any]:
        self.begun.append(step)
        await asyncio.sleep(0)
        if step == self.failing:
            raise ConfigError("the pool is empty")
        return []


@pytest.fixture
def service() -> Iterator[ServiceLoop]:
    loop = ServiceLoop()
    loop.start()
    yield loop
    loop.stop(5.0)


async def settled() -> None:
    """Whatever may begin has begun."""
    for _ in range(50):
        await asyncio.sleep(0)


def rollouts(folder: Path, service: ServiceLoop, pool: RecordingPool, ahead: int) -> Rollouts:
    (folder / "job.yaml").write_text("ajet: {project_name: p, rollout: {engine: vllm}}")
    config: Any = load_config(folder / "job.yaml", [f"rollout.max_staleness={ahead}"], complete=False)
    runtime: Any = SimpleNamespace(run=service.run, submit=service.submit, pool=pool, external=None)
    stream = TaskStream([Task(task_id=str(index)) for index in range(64)], seed=0, batch_size=2)
    return Rollouts(config, runtime, stream, Progress.create("quiet"), lambda _: True, STEPS)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_step_begins_before_the_version_that_it_may_be_drawn_with(
    tmp_path: Path, service: ServiceLoop, ahead: int
) -> None:
    pool = RecordingPool()
    drawn = rollouts(tmp_path, service, pool, ahead)
    positions = []
    for step in range(1, STEPS + 1):
        positions.append(drawn.take(step).reader_state["position"])
        service.run(settled())
        assert pool.begun == list(range(1, min(STEPS, step + ahead) + 1))
        drawn.trained(step)
    # a checkpoint after a step knows where the tasks stood for that step, however many were drawn since
    assert positions == [2 * step for step in range(1, STEPS + 1)]
    drawn.stop()


def test_what_ends_the_drawing_reaches_the_trainer_in_its_turn(tmp_path: Path, service: ServiceLoop) -> None:
    drawn = rollouts(tmp_path, service, RecordingPool(failing=3), 2)
    drawn.take(1), drawn.trained(1)
    drawn.take(2), drawn.trained(2)
    with pytest.raises(ConfigError, match="the pool is empty"):
        drawn.take(3)


def test_nothing_is_drawn_after_the_stop(tmp_path: Path, service: ServiceLoop) -> None:
    pool = RecordingPool()
    drawn = rollouts(tmp_path, service, pool, 1)
    drawn.take(1)
    drawn.stop()
    service.run(settled())
    begun = list(pool.begun)
    drawn.trained(1)
    service.run(settled())
    assert pool.begun == begun
