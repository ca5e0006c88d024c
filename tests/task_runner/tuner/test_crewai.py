"""CrewAI, unmodified, from a plain `def execute`: run by `make test-clients`, which builds an environment for it alone.

No version of it can be installed beside AgentScope 2.0.10.
"""

from __future__ import annotations

import importlib.util
import json
import textwrap
from pathlib import Path

import pytest

from ajet.config import load_config
from ajet.context_tracker import linear_samples
from ajet.schema.episode import EpisodeStatus
from ajet.schema.task import Task
from ajet.task_runner.runtime import Runtime

pytestmark = pytest.mark.skipif(importlib.util.find_spec("crewai") is None, reason="needs crewai")
AGENT = """
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

RESULTS = {"17*3": "51", "51+1": "52", "2*2": "4"}


@tool("calculate")
def calculate(expression: str) -> str:
    '''Calculate an arithmetic expression.'''
    return RESULTS[expression]


class Sums(Workflow):
    def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        base_url, api_key, model = tuner.as_oai_baseurl_apikey("solver")
        llm = LLM(model=f"openai/{model}", base_url=base_url, api_key=api_key)
        solver = Agent(role="solver", goal="solve", backstory="Use the calculator.", tools=[calculate], llm=llm)
        task = Task(description=workflow_task.task.main_query, expected_output="a number", agent=solver)
        said = str(Crew(agents=[solver], tasks=[task]).kickoff())
        return WorkflowOutput(reward=float(said == "It is 52."), metadata={"said": said})
"""


def use(*expressions: str) -> str:
    calls = [json.dumps({"name": "calculate", "arguments": {"expression": each}}) for each in expressions]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.parametrize("wrapper", ["asyncio", "multi-processing"])
def test_a_crew_kicked_off_in_a_plain_execute(tmp_path: Path, wrapper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its three calls form one linear sample, in which every sampled token is trained."""
    monkeypatch.setenv("CREWAI_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path))
    (tmp_path / "agent.py").write_text(textwrap.dedent(AGENT))
    (tmp_path / "replies.yaml").write_text(json.dumps([use("17*3"), use("51+1", "2*2"), "It is 52."]))
    rollout = {
        "user_workflow": "agent.py->Sums",
        "engine": "scripted",
        "scripted_replies": "replies.yaml",
        "compute_madness_checklist": [],
        "episode_timeout": 300,
    }
    config = {
        "task_reader": {"type": "random_dummy"},
        "rollout": rollout,
        "task_runner": {"wrapper_type": wrapper},
    }
    (tmp_path / "run.yaml").write_text(json.dumps({"ajet": config}))
    with Runtime(load_config(tmp_path / "run.yaml", backbone="debug")) as runtime:
        episode = runtime.run(runtime.pool.run_episode(Task(task_id="t", main_query="17*3+1?")))
    assert episode.status is EpisodeStatus.COMPLETED, episode.failure
    assert episode.metadata == {"said": "It is 52."} and episode.reward == 1.0
    assert [(call.fork, call.drop) for call in episode.tree.calls] == [(None, None)] * 3
    samples, ledger = linear_samples(episode.tree, max_prompt_length=9000, max_response_length=9000, max_samples=9)
    assert len(samples) == 1 and ledger.trained == episode.tree.sampled_tokens
