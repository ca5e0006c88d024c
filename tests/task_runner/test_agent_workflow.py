"""`rollout.agent`: a ready agent as the workflow of an episode, in threads and in processes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ajet.config import make_config
from ajet.engine.scripted import Reply
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.errors import UserError
from ajet.schema.task import Task
from ajet.task_runner.environments import load_workflow
from support.runner_fakes import played

QUESTION = Task(task_id="t", main_query="What is 6*7?", metadata={"answer": "42"})


def asks(name: str, **arguments: Any) -> Reply:
    return {"content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def run(replies: Sequence[Reply], agent: dict[str, Any], task: Task = QUESTION, **overrides: Any) -> Episode:
    return played({"rollout.agent": {"tools": ["calculator"], **agent}, **overrides}, replies, task)


@pytest.mark.parametrize("wrapper", ["asyncio", "multi-processing"])
def test_an_episode(wrapper: str) -> None:
    replies = [asks("calculator", expression="6*7"), "The answer is \\boxed{42}."]
    episode = run(replies, {"type": "react"}, **{"task_runner.wrapper_type": wrapper})
    assert episode.failure is None, episode.failure
    assert (episode.status, episode.reward, episode.is_success) == (EpisodeStatus.COMPLETED, 1.0, True)
    assert episode.metadata == {"final_answer": "The answer is \\boxed{42}.", "stop_reason": "answer"}
    assert episode.log_metrics["agent/tool_calls"] == 1
    first, second = episode.tree.calls
    assert (first.agent, second.extends) == ("react", 0)  # one conversation, token by token
    assert episode.tree.trained_tokens == episode.tree.sampled_tokens


def test_the_text_format_is_one_conversation_too() -> None:
    replies = ['Thought: I multiply.\nAction: calculator(expression="6*7")', "Thought: Done.\nFinal Answer: 42"]
    episode = run(replies, {"format": "text"})
    assert (episode.reward, [call.extends for call in episode.tree.calls]) == (1.0, [-1, 0])


def test_a_wrong_answer_and_none_at_all() -> None:
    assert run(["41"], {}).reward == 0.0
    endless = run(["", "", "I wonder"], {"type": "tool", "max_steps": 3})
    assert endless.metadata["last_reply"] == "I wonder", "a judge may pay for it"
    endless = run([asks("calculator", expression="1")], {"max_steps": 3})
    assert (endless.reward, endless.metadata["stop_reason"], len(endless.tree.calls)) == (0.0, "max_steps", 3)
    assert endless.metadata["final_answer"] is None


def test_the_judge_decides() -> None:
    judge = "ajet.task_judge.math_answer_as_judge->MathAnswerAsJudge"
    episode = run(["42.0"], {}, **{"task_judge.judge_protocol": judge})
    assert (episode.reward, episode.is_success) == (1.0, True)
    composite = {"task_judge.judge_type": "composite", "task_judge.parts": {"maths": {"judge": judge, "weight": 2.0}}}
    assert run(["42"], {}, **composite).reward == 2.0  # not the 1.0 of a comparison with the task's answer


TOOLS = """
from ajet.agents.tools import ToolResult, tool

@tool
def praise() -> ToolResult:
    "Is rewarded."
    return ToolResult("fine", reward=0.25)
"""


def test_rewards_of_tools(tmp_path: Path) -> None:
    (tmp_path / "own_tools.py").write_text(TOOLS)
    agent = {"tools": [f"{tmp_path}/own_tools.py->praise"]}
    episode = run([asks("praise"), "42"], agent)
    assert episode.reward == 1.0 and [call.reward for call in episode.tree.calls] == [0.25, None]
    alone = run([asks("praise"), asks("praise"), "ok"], agent, Task(task_id="t", main_query="?"))
    assert alone.reward == 0.5 and [call.reward for call in alone.tree.calls] == [None] * 3


def test_an_episode_without_any_reward_says_what_to_do() -> None:
    episode = run(["ok"], {}, Task(task_id="t", main_query="?"))
    assert episode.reward is None and episode.failure is not None
    assert "judge_protocol" in episode.failure.message


def test_a_conversation_that_fills_the_window_becomes_branches() -> None:
    lengths = {"max_model_len": 2048, "max_response_length_in_one_turn": 64}
    data = {"data.max_prompt_length": 1984, "data.max_response_length": 64}
    replies = [asks("calculator", expression="10**600")] * 6 + ["42"]
    given = {f"rollout.{key}": value for key, value in lengths.items()}
    episode = run(replies, {"max_steps": 7}, **given, **data)
    assert episode.failure is None, episode.failure
    assert episode.reward == 1.0 and not episode.outcomes
    extended = [call.extends for call in episode.tree.calls]
    assert len(set(extended)) < len(extended)  # two calls go on from the same one


def test_agents_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own_agent.py").write_text(
        "from ajet.agents import ReActAgent\n\n\nclass Loud(ReActAgent):\n"
        "    def __init__(self, *, mark='!', **settings):\n"
        "        super().__init__(**settings)\n"
        "        self.mark = mark\n\n"
        "    async def answered(self, run, answer, call):\n"
        "        await super().answered(run, answer + self.mark, call)\n"
    )
    named = f"{tmp_path}/own_agent.py->Loud"
    episode = run(["42"], {"type": named, "options": {"mark": "!!"}})
    assert episode.metadata["final_answer"] == "42!!"
    with pytest.raises(UserError, match=r"rollout\.agent: .*did you mean 'mark'"):
        load_workflow(make_config({"rollout.agent": {"type": named, "options": {"mrak": "!"}}}))


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ({"type": "raect"}, "did you mean 'react'"),
        ({"tools": ["calculater"]}, "did you mean 'calculator'"),
        ({"tools": ["calculator", "calculator"]}, "two tools"),
        ({"tools": [{"calculator": {"nmae": "x"}}]}, "did you mean 'name'"),
        ({"type": "json->loads"}, "Agent"),
    ],
)
def test_what_is_refused_before_anything_starts(agent: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refused:
        load_workflow(make_config({"rollout.agent": agent}))
    assert "ajet.rollout.agent: " in str(refused.value) and says in str(refused.value)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_a_coding_agent_works_in_the_episodes_sandbox() -> None:
    metadata = {"files": {"n.py": "N = 1\n"}, "test_command": "python3 -c 'import n; assert n.N == 2'"}
    task = Task(task_id="t", main_query="Make N two.", metadata=metadata)
    edit = asks("bash", command="echo 'N = 2' > n.py")
    given: dict[str, Any] = {"agent": {"type": "coding", "tools": ["bash"]}, "task": task}
    episode = run([edit, asks("run_tests")], **given, **{"rollout.sandbox": "bubblewrap"})
    assert episode.failure is None, episode.failure
    assert (episode.reward, episode.is_success, episode.metadata["stop_reason"]) == (1.0, True, "tool")
    lazy = run(["Done."] * 3, **given, **{"rollout.sandbox": "bubblewrap"})
    assert (lazy.reward, len(lazy.tree.calls)) == (0.0, 3)
