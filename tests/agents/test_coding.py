"""`CodingAgent` in a real sandbox: it repairs a function, and the tests decide."""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

import pytest

from ajet.agents import AgentSettingsError, CodingAgent, StopReason, Trajectory, make_agent
from ajet.agents.tools import ToolContext, ToolSetupError
from ajet.environment.sandboxes import SandboxSettings, open_sandbox
from ajet.schema.errors import TaskDataError
from ajet.schema.task import Task, WorkflowTask
from support.scripted_models import Scripted, asks, call

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")

BROKEN = "def add(a, b):\n    return a - b\n"
TEST = "from sums import add\nassert add(2, 3) == 5, add(2, 3)\nprint('all passed')\n"
METADATA = {"files": {"sums.py": BROKEN}, "test_files": {"test_sums.py": TEST}, "test_command": "python3 test_sums.py"}
REPAIR = call(
    "file_editor", {"command": "str_replace", "path": "sums.py", "old_str": "a - b", "new_str": "a + b"}, "edit"
)
RUN = call("run_tests", {}, "run")


def run(model: Any, metadata: dict[str, Any] = METADATA, **settings: Any) -> Trajectory:
    async def main() -> Trajectory:
        task = WorkflowTask(task=Task(task_id="t", main_query="Repair add.", metadata=metadata))
        async with await open_sandbox(SandboxSettings()) as sandbox:
            return await CodingAgent(**settings).run_trajectory(task, model, context=ToolContext(sandbox, "e", task))

    return asyncio.run(main())


def test_it_edits_and_runs_the_tests_until_they_pass() -> None:
    trajectory = run(Scripted(asks(RUN), asks(REPAIR), asks(RUN)))
    assert (trajectory.stop_reason, trajectory.reward, trajectory.is_success) == (StopReason.TOOL, 1.0, True)
    failed, edited, passed = [step for step in trajectory.steps if step.step_type == "action_result"]
    assert failed.success is False and "-1" in failed.content and "exit code 1" in failed.content
    assert edited.success and passed.success and "all passed" in passed.content


def test_saying_that_it_is_done_is_checked() -> None:
    model = Scripted("Done.", "Done!", "Really done.")
    trajectory = run(model, max_attempts=2)
    assert "do not pass yet" in model.requests[1]["messages"][-1]["content"] and len(model.requests) == 2
    assert (trajectory.final_response, trajectory.reward, trajectory.is_success) == ("Done!", 0.0, False)


def test_tests_that_the_agent_changed_do_not_count() -> None:
    cheat = call("bash", {"command": "echo 'print(1)' > test_sums.py"})
    trajectory = run(Scripted(asks(cheat), "Done."))
    assert trajectory.reward == 0.0 and trajectory.metadata["tests"]["exit_code"] == 1


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("test_command", ["pytest"], "give text"),
        ("stop_when_tests_pass", "false", "give true or false"),
        ("max_attempts", "3", "give a whole number"),
        ("max_attempts", 0, "give a whole number above 0"),
        ("result_as", "folder", "is not one of modules, files"),
    ],
)
def test_options_of_another_kind_are_refused_at_once(option: str, value: Any, said: str) -> None:
    with pytest.raises(AgentSettingsError, match=f"{option}: .* {said}"):
        make_agent("coding", {option: value})


def test_without_a_sandbox_or_with_odd_files() -> None:
    with pytest.raises(ToolSetupError, match=r"rollout\.sandbox"):
        asyncio.run(CodingAgent(test_command="true").run_trajectory("?", Scripted("x")))
    with pytest.raises(TaskDataError, match="`files`"):
        run(Scripted("x"), {"files": ["a.py"]})
