"""Files shaped like two tutorials of older versions: asking a patient by one call, and a world behind a service.

They run on debug with only the model's and the data's paths changed. Nothing comes from the internet: the helper that
judges and the world are small ones on this machine.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from support.old_repository import Repository, world_service
from support.scripted_helper import helper

try:
    AGENTSCOPE = version("agentscope")
except PackageNotFoundError:
    AGENTSCOPE = "absent"

ASKS = """
from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

PROMPT = "Ask the patient one question with two or three options, or answer <stop />."

class OldAgent(Workflow):
    name: str = "asks"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        messages = [{"role": "system", "content": PROMPT}, *workflow_task.task.init_messages]
        client = tuner.as_raw_openai_sdk_client()
        reply = await client.chat.completions.create(messages=messages)
        said = reply.choices[0].message.content
        return WorkflowOutput(reward=None, metadata={"response": said, "messages": messages})
"""
BY_EYE = """
import re
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_rollout.dashscope_llm_bridge import create_external_llm_fn
from ajet.workflow import WorkflowOutput, WorkflowTask

class ByEye(BaseJudge):
    def __init__(self, config):
        self.config = config
        self._llm = create_external_llm_fn(
            alien_llm_model=config.ajet.task_judge.alien_llm_model,
            alien_llm_response_length=config.ajet.task_judge.alien_llm_response_length,
        )

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple:
        truth = workflow_task.task.metadata
        response = workflow_output.metadata["response"]
        decided = "stop" if "<stop />" in response else "continue"
        if decided != truth["decision_truth"]:
            return 0.0, False
        if decided == "stop":
            action, content, form = 1.0, 1.0, float(response.strip() == "<stop />")
        else:
            said = self._llm(
                messages=[{"role": "user", "content": f"{truth['info_truth']}\\n{response}"}],
                custom_sampling_params={"temperature": 0.0},
            )["content"]
            found = [re.search(f"<{name}>(.*?)</{name}>", said) for name in ("content_score", "format_score")]
            action, (content, form) = 1.0, (float(each.group(1)) for each in found)
        return action * (1 + 2 * content) + form, True
"""
ROUNDS = [
    {
        "main_query": "[no query]",
        "init_messages": [{"role": "user", "content": "I have had a headache for two days."}],
        "task_id": f"session_{number}",
        "metadata": {
            "session_id": "session",
            "diagn": "migraine",
            "decision_truth": "continue",
            "info_truth": "symptom: nausea - yes",
        },
    }
    for number in range(3)
]


def reward_of(repository: Repository) -> list[float]:
    """The rewards of the run's episodes."""
    (store,) = repository.elsewhere.glob("saved_experiments/*/episodes.sqlite")
    with sqlite3.connect(store) as connection:
        return [row[0] for row in connection.execute("SELECT reward FROM episode")]


@pytest.mark.slow
def test_asking_a_patient_by_one_call(tmp_path: Path) -> None:
    """Rounds as tasks with messages and no query, a language model as judge, a reward from 0 to 4."""
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, ROUNDS)))
    place = {"file_path": str(path)}
    reader = {"type": "dataset_file", "dataset_file": {"training": place, "validation": place}}
    repository = Repository(tmp_path, "example_learn2ask", ASKS, BY_EYE, reader)
    scores = "<think>it asks</think><format_score>0.5</format_score><content_score>1.0</content_score>"
    with helper(lambda _: scores) as server:
        done = repository.run(helper=server.url)
        asked = [body["messages"][-1]["content"] for _, body, _ in server.seen]
    assert done.returncode == 0, done.stdout + done.stderr
    assert reward_of(repository) == [3.5, 3.5]
    assert len(asked) == 2 and all("nausea" in question for question in asked)


BY_CLIENT = """
from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

class OldAgent(Workflow):
    name: str = "in_a_world"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client()
        tracker = tuner.get_context_tracker()
        env, step = workflow_task.gym_env, 0
        messages = list(workflow_task.task.init_messages)
        for step in range(tuner.config.ajet.rollout.multi_turn.max_steps):
            reply = await client.chat.completions.create(messages=messages)
            content = reply.choices[0].message.content
            obs, _, terminate, _ = env.step(action={"content": content, "role": "assistant"})
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": obs}]
            workflow_task.observation_window["step"][workflow_task.task_thread_index] = step
            if terminate or tracker.context_overflow:
                break
        return WorkflowOutput(reward=None, metadata={"total_step": step})
"""
BY_AGENTSCOPE = """
from agentscope.agent import ReActAgent
from agentscope.formatter import DashScopeChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

class OldAgent(Workflow):
    name: str = "in_a_world"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        env, (first, *rest), step = workflow_task.gym_env, workflow_task.task.init_messages, 0
        interaction = [Msg("user", each["content"], role="user") for each in rest]
        agent = ReActAgent(
            name="Qwen",
            sys_prompt=first["content"],
            model=tuner.as_agentscope_model(),
            formatter=DashScopeChatFormatter(),
            memory=InMemoryMemory(),
            toolkit=None,
            print_hint_msg=False,
        )
        agent.set_console_output_enabled(False)
        for step in range(tuner.config.ajet.rollout.multi_turn.max_steps):
            reply = await agent(interaction)
            obs, _, terminate, _ = env.step(action={"content": reply.content, "role": "assistant"})
            interaction = Msg("env", obs, role="user")
            if terminate or tuner.get_context_tracker().context_overflow:
                break
        return WorkflowOutput(reward=None, metadata={"total_step": step})
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[str]:
    with world_service(tmp_path) as url:
        yield url


@pytest.mark.slow
@pytest.mark.parametrize(
    "agent",
    [
        pytest.param(BY_CLIENT, id="client"),
        pytest.param(
            BY_AGENTSCOPE,
            id="agentscope",
            marks=pytest.mark.skipif(
                not AGENTSCOPE.startswith("1."),
                reason=f"agentscope 1.0.x is needed, here is {AGENTSCOPE}: run `make test-agentscope1`",
            ),
        ),
    ],
)
def test_a_world_behind_a_service(tmp_path: Path, service: str, agent: str) -> None:
    """Tasks, first messages, steps and reward all come from the service."""
    env_service = {
        "env_type": "appworld",
        "env_url": service,
        "env_action_preference": "code",
        "training_split": "train",
        "validation_split": "dev",
    }
    repository = Repository(
        tmp_path, "example_appworld", agent, "", {"type": "env_service", "env_service": env_service}
    )
    text = repository.yaml.read_text()
    own = "ajet.task_judge.env_service_as_judge->EnvServiceJudge"
    repository.yaml.write_text(re.sub(r"judge_protocol: .*", f"judge_protocol: {own}", text))
    done = repository.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert reward_of(repository) == [1.5, 1.5]
