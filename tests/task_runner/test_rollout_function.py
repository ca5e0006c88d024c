"""`@rollout`: parameters by name, what may be returned, and the function as a `user_workflow`."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ajet import Task, Trainer, Workflow, WorkflowOutput, WorkflowTask, rollout
from ajet.config.loader import make_config
from ajet.schema.errors import RewardError
from ajet.schema.user_code import import_class
from ajet.task_runner.workflow import RECORD_KEY, RolloutFunctionError


def execute(function: Any, task: Task | None = None, tuner: Any = None) -> WorkflowOutput:
    workflow_task = WorkflowTask(task=task or Task(main_query="q", task_id="t", metadata={"answer": 4}))
    output = function.__ajet_class__().execute(workflow_task, tuner)
    return asyncio.run(output) if asyncio.iscoroutine(output) else output


def test_parameters_are_filled_by_name_in_any_order() -> None:
    seen: dict[str, Any] = {}

    @rollout
    def agent(tuner: Any, rollout: Any, task: Any, workflow_task: Any, extra: int = 7) -> float:
        seen.update(tuner=tuner, rollout=rollout, task=task, id=workflow_task.task.task_id, extra=extra)
        return 1.0

    assert execute(agent, tuner="the tuner").reward == 1.0
    assert seen["tuner"] == "the tuner" and seen["id"] == "t" and seen["extra"] == 7
    assert seen["task"] == {"task_id": "t", "main_query": "q", "answer": 4}
    assert seen["rollout"].mode == "train" and seen["rollout"].input == seen["task"]


def test_a_record_of_a_data_set_arrives_as_it_was() -> None:
    @rollout
    async def agent(task: Any) -> WorkflowOutput:
        return WorkflowOutput(reward=0.0, metadata={"task": task})

    row = Task(main_query="shown", metadata={"question": "1+1", RECORD_KEY: True})
    assert execute(agent, row).metadata["task"] == {"question": "1+1"}
    assert execute(agent, Task(metadata={RECORD_KEY: [1, "x"]})).metadata["task"] == [1, "x"]


@pytest.mark.parametrize(
    ("returned", "reward"), [(1, 1), (0.5, 0.5), (None, None), ([1.0, 0.0], [1.0, 0.0]), (np.float32(0.25), 0.25)]
)
def test_what_is_returned_is_the_reward(returned: Any, reward: Any) -> None:
    assert execute(rollout(lambda task: returned)).reward == reward


@pytest.mark.parametrize("said", [False, np.bool_(False)])
def test_true_and_false_are_rewards_and_successes(said: Any) -> None:
    output = execute(rollout(lambda task: said))
    assert (output.reward, output.is_success) == (0.0, False)


def test_anything_else_returned_is_named_and_no_cut_reply_excuses_it() -> None:
    @rollout
    def agent(task: Any) -> Any:
        return {"reward": 1.0}

    with pytest.raises(RewardError, match=r"agent returned \{'reward': 1.0\} of type dict"):
        execute(agent)


def test_decorated_partial_and_callable_coroutines_are_awaited(tmp_path: Path) -> None:
    async def agent(task: Any, share: float) -> float:
        return share

    class Agent:
        async def __call__(self, task: Any) -> float:
            return 0.5

    part = functools.partial(agent, share=0.5)
    for function in (part, Agent(), functools.wraps(part)(lambda task: part(task))):
        assert execute(rollout(function)).reward == 0.5
        Trainer(exp_dir=tmp_path)._config(function, [1], None)


def test_an_unknown_parameter_is_refused_where_the_function_stands() -> None:
    with pytest.raises(RolloutFunctionError, match="parameter 'question', which nothing fills"):
        rollout(lambda question: 1.0)
    with pytest.raises(RolloutFunctionError, match="takes a function"):
        rollout(Workflow)


def test_called_directly_it_is_the_bare_function() -> None:
    @rollout
    def agent(task: Any, llm: Any = None) -> float:
        """Docs stay."""
        return task["x"]

    assert agent({"x": 3.0}) == 3.0
    assert (agent.__name__, agent.__doc__) == ("agent", "Docs stay.")


def test_a_yaml_names_it_like_a_class(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text("from ajet import rollout\n@rollout\ndef solver(task):\n    return 1.0\n")
    found = import_class("agents.py->solver", Workflow, key="k", base_dirs=[tmp_path])
    assert issubclass(found, Workflow) and found.__name__ == "solver"


def test_the_only_template_is_the_parameter_prompt_template() -> None:
    from ajet.task_runner.tuner import AjetTuner

    @rollout
    def agent(task: Any, prompt_template: Any) -> WorkflowOutput:
        return WorkflowOutput(reward=1.0, metadata={"prompt": prompt_template.format(**task)})

    def tuner(**templates: Any) -> AjetTuner:
        session: Any = SimpleNamespace(settings=SimpleNamespace(trainable_targets=()))
        loop: Any = None
        return AjetTuner(session, make_config({"prompt_tuning.templates": templates}), loop)

    task = Task(metadata={"question": "1+1", RECORD_KEY: True})
    assert execute(agent, task, tuner(a="Solve {question}")).metadata["prompt"] == "Solve 1+1"
    with pytest.raises(Exception, match=r"needs a name; ajet.prompt_tuning.templates has: none"):
        execute(agent, task, tuner())
    with pytest.raises(Exception, match=r"no template 'c'; ajet.prompt_tuning.templates has: a, b"):
        tuner(a="x", b="y").prompt("c")
