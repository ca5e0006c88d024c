"""A repository written for an older version: the keys, imports and habits of those that users bring."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from support.ports import free_port
from support.waiting import wait_until

SOURCE = Path(__file__).parent.parent.parent
COMMON = """
ajet:
  project_name: example_{name}
  experiment_name: "read_yaml_name"
  task_judge:
    judge_type: customized_protocol
    judge_protocol: {judge}
    alien_llm_model: some-helper
    alien_llm_response_length: 512
  model:
    path: /mnt/data/models/Big-Model-7B
  rollout:
    user_workflow: tutorial.{name}.agent->OldAgent
    force_disable_toolcalls: False
    temperature: 0.7
    max_env_worker: 64
    num_repeat: 6
    agent_madness_reward: 0.0
    agent_madness_termination: True
    compute_madness_checklist: None
    step_skip_action: 0
    ajet_action_when_overflow: truncate
    log_prob_micro_batch_size_per_gpu: 4
    name: vllm
    mode: async
    tensor_model_parallel_size: 1
    n_vllm_engine: 8
    max_num_seqs: 40
    max_response_length_in_one_turn: 16
    max_model_len: 2000
    multi_turn: {{max_steps: 3, expected_steps: 1}}
  data:
    train_batch_size: 32
    max_prompt_length: 1000
    max_response_length: 1000
  debug:
    debug_max_parallel: 1
    debug_first_n_tasks: 2
  context_tracker:
    alien_llm_model: some-helper
    alien_llm_response_length: 512
  trainer_common:
    save_freq: 5
    test_freq: 5
    total_epochs: 99999
    total_training_steps: 25
    nnodes: 2
    n_gpus_per_node: 8
    logger: swanlab
  execute_test: true
  execute_testing_lambda: "tests.bench.some.execute->TestProbe"
  task_reader:
    {reader}
trinity:
  synchronizer: {{sync_interval: 1, sync_offset: 1}}
hydra:
  searchpath: [file://ajet/default_config]
defaults: [verl_default, trinity_default, ajet_default, _self_]
"""


WORLD = """
import re
from ajet.environment import Environment, StepResult

class World(Environment):
    '''Its first state is a system prompt and a request; it runs the first fenced block of an action.'''

    @staticmethod
    def task_ids(split):
        return [f"{split}_{number}" for number in range(3)]

    def reset(self, task):
        self.steps = 0
        return [{"role": "system", "content": "Write Python for the apps."},
                {"role": "user", "content": f"Task {task.task_id}: play a song."}]

    def step(self, action):
        self.steps += 1
        found = re.search(r"```python\\n(.*?)```", action["content"], re.DOTALL)
        said = f"ran {len(found.group(1))} characters" if found else "no code"
        return StepResult(f"Output:\\n```\\n{said}\\n```", 0.0, self.steps == 2, {})

    def evaluate(self):
        return 1.0 if self.steps == 2 else 0.5
"""


@contextmanager
def world_service(folder: Path) -> Iterator[str]:
    """The address of our server of AgentJet's environment protocol, with a small world in it."""
    (folder / "world.py").write_text(WORLD)
    port = free_port()
    command = [sys.executable, "-m", "ajet", "env", "serve", f"{folder / 'world.py'}->World", "--port", str(port)]
    server = subprocess.Popen(command, cwd=SOURCE, stdout=subprocess.DEVNULL)

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(answers)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


class Repository:
    """A folder with `tutorial/<name>/{agent.py, judge.py, <name>.yaml}`."""

    def __init__(self, root: Path, name: str, agent: str, judge: str | None, reader: dict[str, Any]) -> None:
        folder = root / "repository" / "tutorial" / name
        folder.mkdir(parents=True)
        self.yaml = folder / f"{name}.yaml"
        (folder / "agent.py").write_text(textwrap.dedent(agent))
        (folder / "judge.py").write_text(judge or "")
        place = "null" if judge is None else f"tutorial.{name}.judge->ByEye"
        readers = yaml.safe_dump(reader).replace("\n", "\n    ")
        self.yaml.write_text(COMMON.format(name=name, judge=place, reader=readers))
        self.elsewhere = root / "elsewhere"
        self.elsewhere.mkdir()

    def run(
        self, *overrides: str, backbone: str = "debug", helper: str = "http://127.0.0.1:9/v1"
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ajet", "--conf", str(self.yaml), f"--backbone={backbone}"]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OPENAI_BASE_URL": helper, "OPENAI_API_KEY": "k"}
        environment.pop("SWANLAB_API_KEY", None)
        return subprocess.run(
            [*command, "model.path=tiny:qwen2-0.3m", *overrides],
            cwd=self.elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
