"""What judges may return, and which judge a config names."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ajet.config import make_config
from ajet.schema.errors import ConfigError, ImportPathError, JudgeFault
from ajet.schema.task import Task, WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge, Judgement, Reward, load_judge, validate_reward
from ajet.task_judge.env_service_as_judge import EnvServiceJudge
from ajet.task_judge.math_answer_as_judge import MathAnswerAsJudge

TASK = WorkflowTask(task=Task(task_id="t1", metadata={"answer": "1/2"}))


@pytest.mark.parametrize(
    ("value", "reward", "success"),
    [
        ((1.0, True), 1.0, True),
        ((0, False), 0.0, False),
        ((-2.5, None), -2.5, None),
        ((np.float32(0.5), np.bool_(True)), 0.5, True),
        ((np.array(0.25), 1), 0.25, True),
        (np.int64(3), 3.0, None),
        (0.75, 0.75, None),
        (Decimal("0.75"), 0.75, None),
        (True, 1.0, True),
    ],
)
def test_a_finite_number_is_a_reward(value: Any, reward: float, success: bool | None) -> None:
    assert validate_reward(value) == Judgement(reward, success)


@pytest.mark.parametrize(
    "value",
    [
        None,
        float("nan"),
        float("inf"),
        -float("inf"),
        np.float64("nan"),
        10**400,
        "1.0",
        [1.0, True],
        [1.0],
        {"reward": 1.0},
        1j,
        np.array([1.0]),
        (1.0,),
        (1.0, True, "why"),
        (None, True),
        ("1.0", True),
        (float("nan"), True),
        (1.0, "yes"),
        (1.0, 0.5),
    ],
)
def test_anything_else_is_a_named_fault(value: Any) -> None:
    with pytest.raises(JudgeFault, match="TheJudge returned"):
        validate_reward(value, "TheJudge")


def test_judges_may_be_async() -> None:
    class Slow(BaseJudge):
        async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
            await asyncio.sleep(0)
            return 0.5, True

    said = validate_reward(asyncio.run(Slow(make_config()).compute_reward(TASK, WorkflowOutput())))
    assert said == Judgement(0.5, True)


def test_a_reward_of_parts_in_a_pair_is_told_where_success_goes() -> None:
    with pytest.raises(JudgeFault, match="return the Reward alone, and say whether it is a success"):
        validate_reward((Reward(parts={"correct": 1.0}), True))


def test_a_judge_without_compute_reward_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Empty must define"):
        type("Empty", (BaseJudge,), {})(make_config()).compute_reward(TASK, WorkflowOutput())


@pytest.mark.parametrize(
    ("given", "reward"), [(r"so \boxed{\frac{1}{2}}", 1.0), (0.5, 1.0), ("2", 0.0), ("", 0.0), (None, 0.0)]
)
def test_math_answer(given: Any, reward: float) -> None:
    output = WorkflowOutput(metadata={"final_answer": given})
    assert MathAnswerAsJudge(make_config()).compute_reward(TASK, output) == (reward, reward == 1.0)


def test_math_answer_needs_both_answers() -> None:
    grader = MathAnswerAsJudge(make_config())
    with pytest.raises(JudgeFault, match=r"'final_answer' in the workflow's WorkflowOutput.*holds 'answer'"):
        grader.compute_reward(TASK, WorkflowOutput(metadata={"answer": 3}))
    with pytest.raises(JudgeFault, match="'answer' in the metadata of task 't2'"):
        grader.compute_reward(WorkflowTask(task=Task(task_id="t2")), WorkflowOutput(metadata={"final_answer": 3}))


@pytest.mark.parametrize(("raw", "judged"), [(1.0, (1.5, True)), (2.0, (2.0, True)), (0.5, (0.25, False))])
def test_an_environment_service_judges(raw: float, judged: tuple[float, bool]) -> None:
    asked: list[Any] = []

    class World:
        def evaluate(self, episode_uuid: str | None = None, params: Any = None) -> float:
            asked.append(params)
            return raw

    task = WorkflowTask(task=Task(), gym_env=World())
    grader = EnvServiceJudge(make_config())
    assert grader.compute_reward(task, WorkflowOutput()) == judged and asked == [{"sparse": False}]
    with pytest.raises(JudgeFault, match=r"set ajet\.rollout\.environment"):
        grader.compute_reward(WorkflowTask(task=Task()), WorkflowOutput())


def test_the_judge_of_a_config(tmp_path: Path) -> None:
    def load(**keys: Any) -> BaseJudge | None:
        config = make_config({f"task_judge.{key}": value for key, value in keys.items()})
        config.remember_source(tmp_path / "run.yaml")
        return load_judge(config)

    assert load() is None
    loaded = load(judge_protocol="ajet.task_judge.math_answer_as_judge->MathAnswerAsJudge")
    assert isinstance(loaded, MathAnswerAsJudge)
    (tmp_path / "mine.py").write_text(
        "from ajet.task_judge.base_judge import BaseJudge\n"
        "class J(BaseJudge):\n    def compute_reward(self, workflow_task, workflow_output): ..."
    )
    assert type(load(judge_protocol="mine.py->J")).__name__ == "J"
    with pytest.raises(ImportPathError, match=r"ajet.task_judge.judge_protocol: mine.py has no 'K'; there is: J"):
        load(judge_protocol="mine.py->K")
    with pytest.raises(ConfigError, match=r"rubrics_auto_grader\.model_name: a helper model is needed"):
        load(judge_type="rubrics_auto_grader")
