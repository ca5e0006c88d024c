"""`AutoGraderJudge`: rubrics for old scripts that use them outside a run. In a run, use `judge_type:
rubrics_auto_grader`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ajet.config import Config
from ajet.config.judges import RubricsConfig
from ajet.schema.errors import ConfigError
from ajet.schema.task import Task, WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import JudgedEpisode
from ajet.task_judge.rubrics import Rubrics, example_of
from ajet.task_judge.rubrics_judge import RubricsJudge


@dataclass(frozen=True, slots=True)
class GraderScore:
    """The grade of one answer."""

    score: float
    reason: str


@dataclass(frozen=True, slots=True)
class Rank:
    """The ranks of several answers, in the order of the answers: 1 is the best."""

    rank: list[int]
    reason: str


class AutoGraderJudge(RubricsJudge):
    """Takes a whole config, or any object whose attributes resemble one."""

    def __init__(self, config: Any) -> None:
        super().__init__(config if isinstance(config, Config) else _as_config(config))

    async def generate_rubrics_from_samples(self, tasks: Sequence[Task] = ()) -> Rubrics:
        """Rubrics from graded tasks (by default, the examples of the config), also written to the file."""
        if not tasks:
            self.rubrics = await asyncio.to_thread(self.load_or_write, again=True)
            return self.rubrics
        section = self.section
        examples = [
            example_of(
                {"main_query": task.main_query, **task.metadata},
                *(self.mode, f"task {task.task_id or number}", section.query_field, section.answer_field),
                *(section.min_score, section.max_score),
            )
            for number, task in enumerate(tasks)
        ]
        self.rubrics = await asyncio.to_thread(self.write, examples)
        self.rubrics.save(self.path)
        return self.rubrics

    async def load_rubrics_from_cache(self) -> Rubrics:
        """The rubrics of the file."""
        self.rubrics = Rubrics.load(self.path)
        return self.rubrics

    async def _async_compute_reward(
        self, task: Task, output: WorkflowOutput | list[WorkflowOutput]
    ) -> GraderScore | Rank:
        outputs = output if isinstance(output, list) else [output]
        judged = [JudgedEpisode(WorkflowTask(task=task), each) for each in outputs]
        said = await self.compute_group_rewards(judged)
        reason = "\n".join(dict.fromkeys(text for each in said for text in each.notes.get("reasons", [])))
        if not isinstance(output, list):
            return GraderScore(said[0].reward, reason)
        better = [sum(other.reward > each.reward for other in said) for each in said]
        return Rank([count + 1 for count in better], reason)


def _as_config(given: Any) -> Config:
    """Build a config from nested attribute objects. Only this judge's block and the experiment's folder are read."""
    try:
        block = given.ajet.task_judge.rubrics_auto_grader
    except AttributeError as error:
        raise ConfigError(f"AutoGraderJudge: the config has no ajet.task_judge.rubrics_auto_grader: {error}") from None
    values = {name: _plain(getattr(block, name)) for name in RubricsConfig.model_fields if hasattr(block, name)}
    config = Config.model_validate({"ajet": {"task_judge": {"rubrics_auto_grader": values}}})
    if folder := getattr(given.ajet, "experiment_dir", None):
        config.remember_folder(Path(folder))
    return config


def _plain(value: Any) -> Any:
    return {key: _plain(inner) for key, inner in vars(value).items()} if hasattr(value, "__dict__") else value
