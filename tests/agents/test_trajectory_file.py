"""Trajectories as JSON: nothing is lost, and what was written is there after a kill -9."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet.agents import ReActAgent, Trajectory, TrajectoryStatus, read_trajectory, write_trajectory
from ajet.agents.tools import ToolResult, tool
from ajet.schema.trajectory import (
    StepType,
    TrajectoryFile,
    TrajectoryFormatError,
    TrajectoryStep,
    file_name,
    trajectory_files,
)
from support import TESTS
from support.full_disk import files_up_to
from support.scripted_models import Scripted, asks, call


def test_it_is_saved_as_it_grows(tmp_path: Path) -> None:
    lengths: list[int] = []

    def look(step: TrajectoryStep) -> None:
        (file,) = trajectory_files(tmp_path)
        half = read_trajectory(file)
        assert half.steps[-1] == step and half.status is TrajectoryStatus.RUNNING
        lengths.append(len(half.steps))

    model = Scripted(asks(call("calculator", {"expression": "6*7"})), "42")
    agent = ReActAgent(tools=["calculator"])
    trajectory = asyncio.run(agent.run_trajectory("?", model, save_to=tmp_path, on_step=look, request_id="a/b c"))
    assert lengths == [1, 2, 3, 4]
    whole = read_trajectory(tmp_path / file_name("a/b c"))
    assert whole == trajectory and whole.messages == trajectory.messages
    assert Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict()))) == trajectory


KILLED = """
import asyncio, os, signal, sys
sys.path.insert(0, {tests!r})
from support.scripted_models import Scripted, asks, call
from ajet.agents import ReActAgent
class Model(Scripted):
    async def __call__(self, messages, **given):
        if len(self.requests) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().__call__(messages, **given)
model = Model(asks(call("calculator", {{"expression": "6*7"}})))
asyncio.run(ReActAgent(tools=["calculator"]).run_trajectory("?", model, save_to={folder!r}, request_id="killed"))
"""


def test_a_killed_process_leaves_what_happened(tmp_path: Path) -> None:
    program = KILLED.format(tests=str(TESTS), folder=str(tmp_path))
    ran = subprocess.run([sys.executable, "-c", program], check=False)
    assert ran.returncode == -signal.SIGKILL
    trajectory = read_trajectory(tmp_path / "killed.jsonl")
    assert trajectory.status is TrajectoryStatus.RUNNING
    assert len(trajectory.calls) == 2 and len(trajectory.steps) == 5


@given(st.integers(min_value=0))
def test_a_torn_file_reads_up_to_its_last_whole_line(cut: int) -> None:
    import tempfile

    trajectory = Trajectory("t", started=1.0, steps=[TrajectoryStep(StepType.THOUGHT, "é\u2028\n") for _ in range(3)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        write_trajectory(path, trajectory)
        data = path.read_bytes()
        head = data.index(b"\n") + 1
        kept = data[: head + cut % (len(data) - head + 1)]
        path.write_bytes(kept)
        read = read_trajectory(path)
    assert read.steps == trajectory.steps[: len(read.steps)]
    assert len(read.steps) >= kept[head:].count(b"\n") - 1


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"trajectory": {"request_id": "a"}}\nnonsense\n{"step": {}}\n', ":2:"),
        ('{"trajectory": {"request_id": "a"}}\n{"step": {"step_type": "dance"}}\n', "dance"),
        ('{"step": {"step_type": "thought"}}\n', "request_id"),
        ('{"trajectory": {"request_id": "a"}}\n[1]\n{"other": 1}\n', ":2:"),
        (
            '{"trajectory": {"request_id": "a"}}\n{"call": {"new_messages": [], "reply": {}, "extends": 0}}\n',
            "call 0 extends",
        ),
        ('{"trajectory": {"request_id": "a", "repeat": "\\ud800"}}\n', "not a trajectory"),
        (f'{{"trajectory": {{"request_id": "a"}}}}\n{{"step": {"[" * 100_000}}}\n', ":2:"),
    ],
)
def test_a_file_that_is_no_trajectory(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TrajectoryFormatError, match=where):
        read_trajectory(path)


def test_a_file_that_had_no_room_for_a_while_loses_nothing(tmp_path: Path) -> None:
    trajectory = Trajectory("full")
    file = TrajectoryFile(tmp_path / "full.jsonl", trajectory)
    trajectory.steps.append(TrajectoryStep(StepType.THOUGHT, "long " * 1000))
    with files_up_to(2000), pytest.raises(OSError, match=r"full\.jsonl"):
        file.update()
    trajectory.steps.append(TrajectoryStep(StepType.FINAL_ANSWER, "42"))
    file.close()
    assert read_trajectory(file.path) == trajectory


def test_numbers_of_thousands_of_digits(tmp_path: Path) -> None:
    trajectory = Trajectory("long")
    numbers = {"read": 10**4000, "text": 10**5000}
    trajectory.steps.append(TrajectoryStep(StepType.ACTION_RESULT, tool_result=numbers))
    write_trajectory(tmp_path / "long.jsonl", trajectory)
    (step,) = read_trajectory(tmp_path / "long.jsonl").steps
    assert step.tool_result == {"read": 10**4000, "text": hex(10**5000)}


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TrajectoryFormatError, match="No such file"):
        read_trajectory(tmp_path / "none.jsonl")


def test_results_without_a_json_form_are_kept_as_text(tmp_path: Path) -> None:
    class Odd:
        def __repr__(self) -> str:
            return "<odd>"

    @tool
    def odd() -> ToolResult:
        """Returns something that JSON can't hold, and text that UTF-8 can't."""
        return ToolResult("\ud800", data={1: {Odd()}, "nan": float("nan")})

    trajectory: Any = asyncio.run(
        ReActAgent(tools=[odd]).run_trajectory("?", Scripted(asks(call("odd")), "ok"), save_to=tmp_path / "t.jsonl")
    )
    assert trajectory.is_completed
    (step,) = [step for step in read_trajectory(tmp_path / "t.jsonl").steps if step.tool_result is not None]
    assert step.tool_result["1"] == ["<odd>"]


def test_file_names() -> None:
    assert file_name("task-1.2") == "task-1.2.jsonl"
    assert re.fullmatch(r"_\.\._etc_passwd-[0-9a-f]{8}\.jsonl", file_name("../../etc/passwd"))
    assert len({file_name(name) for name in ("a/b", "a_b", "a b", "Ü" * 300, "Ü" * 301)}) == 5
    assert all(len(file_name(character * 300).encode()) < 255 for character in ("x", "Ü", "字"))


def test_the_file_is_json_for_other_programs_too(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    @tool
    def measure() -> dict[str, float]:
        """Measure."""
        return {"loss": float("nan"), "most": float("inf"), "least": 1.5}

    model = Scripted(asks(call("measure", {})), "done")
    asyncio.run(ReActAgent(tools=[measure]).run_trajectory("?", model, save_to=tmp_path, request_id="a"))
    for line in (tmp_path / "a.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    results = [step.tool_result for step in read_trajectory(tmp_path / "a.jsonl").steps]
    assert {"loss": None, "most": None, "least": 1.5} in results
