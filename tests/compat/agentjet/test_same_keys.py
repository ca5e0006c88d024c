"""Files with the keys and imports of AgentJet's two tutorials with a reader of their own: a template whose reader,
judge and weights are in its folder, and traces. `make test-upstream` runs AgentJet's own files."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from ajet.cli.main import main
from support.http_server import Server
from support.old_repository import SOURCE, world_service
from support.scripted_helper import helper

TEMPLATE = """
ajet:
  project_name: "{{PREFIX}}"
  judge:
    openjudge_llm: {{OPENJUDGE_LLM}}
    concurrency: {{JUDGE_CONCURRENCY}}     # not more than the service allows
    train_ref_ans_path: {{TRAIN_REF_ANS_PATH}}
  presentation_quality_weight: {{PRESENTATION_QUALITY_WEIGHT}}
  grounding_weight: {{GROUNDING_WEIGHT}}
  rm_weight: {{RM_WEIGHT}}
  task_judge: {judge_protocol: tutorial.example_deep_finance.report_judge->ReportJudge}
  model: {path: {{MODEL_PATH}}}
  trainer_common:
    nnodes: {{NNODES}}
    n_gpus_per_node: 8
    val_pass_n: 8
    save_freq: 10
    total_epochs: 200
    save_trajectory_as_json_file: True
    logger: swanlab
  rollout:
    user_workflow: tutorial.example_deep_finance.reporter->Reporter
    force_disable_toolcalls: False
    enable_oversample: False
    tensor_model_parallel_size: 8
    num_repeat: {{NUM_REPEAT}}
    max_response_length_in_one_turn: 8000
    agent_madness_reward: 0.0
    compute_madness_checklist: None
    multi_turn: {max_steps: {{NUM_STEPS}}}
  interchange_server: {interchange_method: 'tcp'}
  data: {train_batch_size: {{TRAIN_BATCH_SIZE}}}
  task_reader:
    type: deep_finance
    deep_finance:
      training: {file_path: {{TRAIN_DATA_PATH}}}
      validation: {file_path: {{VAL_DATA_PATH}}}
    env_service: {env_type: "finworld", env_url: {{ENV_SERVICE_URL}}, env_action_preference: code}
trainer: {default_local_dir: "{{CKPT_SAVE_PATH}}/{{PREFIX}}"}
actor_rollout_ref: {rollout: {tensor_model_parallel_size: 8}}
hydra: {searchpath: [file://ajet/default_config]}
defaults: [verl_default, trinity_default, ajet_default, _self_]
"""
READER = """
import json
from ajet.schema.task import Task
from ajet.task_reader.task_reader_base import BaseTaskReader

class DeepFinanceReader(BaseTaskReader):
    def __init__(self, reader_config):
        super().__init__(reader_config)
        self.reader_config = reader_config

    def _read(self, path):
        with open(path) as file:
            tasks = json.load(file)
        return [
            Task(
                main_query=one["task"]["query"],
                init_messages=[
                    {"role": "system", "content": "Report."},
                    {"role": "user", "content": one["task"]["query"]},
                ],
                task_id=name,
                env_type="deep_finance",
                metadata={"raw_task_data": json.dumps(one), "rubrics": None},
            )
            for name, one in tasks.items()
        ]

    def get_training_tasks(self):
        return self._read(self.reader_config.deep_finance.training.file_path)

    def get_validation_tasks(self):
        return self._read(self.reader_config.deep_finance.validation.file_path)
"""
REPORTER = """
from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

class Reporter(Workflow):
    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client, env = tuner.as_raw_openai_sdk_client(), workflow_task.gym_env
        messages = list(workflow_task.task.init_messages)
        assert messages[0]["content"] == "Report."  # the reader's, not the service's
        for _ in range(tuner.config.ajet.rollout.multi_turn.max_steps):
            reply = await client.chat.completions.create(messages=messages)
            said = reply.choices[0].message.content
            obs, reward, terminate, info = env.step(action={"content": said, "role": "assistant"})
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": obs}]
            if terminate or tuner.get_context_tracker().context_overflow:
                break
        stats = {"tool_stats": {"total_calls": 1}}
        return WorkflowOutput(reward=None, metadata={"history": messages}, log_metrics=stats)
"""
REPORT_JUDGE = """
from ajet.task_judge import BaseJudge

class ReportJudge(BaseJudge):
    def __init__(self, config):
        super().__init__(config)
        ajet = config.ajet
        weights = [getattr(ajet, f"{name}_weight", 1.0) for name in ("rm", "presentation_quality", "grounding")]
        assert weights == [0.5, 0.25, 0.75] and ajet.judge.openjudge_llm == "m" and ajet.judge.concurrency == 2
        assert getattr(ajet.judge, "train_ref_ans_path", "") is None

    def compute_reward(self, workflow_task, workflow_output):
        return len(workflow_output.metadata["history"][2]["content"]) / 100, False
"""
TRACING = """
ajet:
  project_name: example_feedback_training
  task_reader:
    type: tracing
    feedback_tracing:
      base_url: ./tutorial/example_feedback_tracing/studio.sqlite
      train_output_path: ./tasks.jsonl
      alien_llm_model: some-helper
      alien_llm_response_length: 2048
      filters:
        - type: llm_evaluate
          enabled: true
          params: {custom_rubrics: "1. Drop guesses.", temperature: 0.5, print_reason: false, max_thread: 16}
        - type: deduplication
          enabled: true
          params: {similarity_threshold: 0.8, db_path: ./.db, model: m, api_key: null, base_url: https://nowhere.invalid}
  task_judge: {judge_protocol: tutorial.example_feedback_tracing.judge->ByLength}
  model: {path: /mnt/models/Big-Model-14B}
  rollout:
    user_workflow: tutorial.example_feedback_tracing.train->Trained
    max_env_worker: 256
    num_repeat: 8
    agent_madness_reward: -1.0
    tensor_model_parallel_size: 4
    compute_madness_checklist: ["nonsense", "wrong_toolcall"]
  data: {train_batch_size: 240}
trainer: {logger: [console]}
hydra: {searchpath: [file://ajet/default_config]}
defaults: [verl_default, trinity_default, ajet_default, _self_]
"""
TRAINED = """
from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

class Trained(Workflow):
    name: str = "trained"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        reply = await tuner.as_raw_openai_sdk_client().chat.completions.create(messages=messages)
        return WorkflowOutput(reward=None, metadata={"final_answer": reply.choices[0].message.content})
"""
BY_LENGTH = """
from ajet.task_judge.base_judge import BaseJudge

class ByLength(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        return len(workflow_output.metadata["final_answer"]) / 100, False
"""
SMALL = (
    "data.train_batch_size=2",
    "rollout.num_repeat=4",
    "rollout.max_response_length_in_one_turn=16",
    "rollout.compute_madness_checklist=[]",
    "model.path=tiny:qwen2-0.3m",
    "trainer_common.total_training_steps=2",
    "trainer_common.test_freq=-1",
    "debug.debug_first_n_tasks=1",
)


class Files(NamedTuple):
    """A tutorial's YAML, and what the command line says for it."""

    yaml: Path
    overrides: tuple[str, ...]


def written(folder: Path, name: str, text: str, **modules: str) -> Path:
    home = folder / "repository" / "tutorial" / name
    home.mkdir(parents=True)
    for module, source in modules.items():
        (home / f"{module}.py").write_text(source)
    (home / f"{name}.yaml").write_text(text)
    return home / f"{name}.yaml"


def template(folder: Path, world: str) -> Files:
    modules = {"deep_finance_reader": READER, "reporter": REPORTER, "report_judge": REPORT_JUDGE}
    yaml = written(folder, "example_deep_finance", TEMPLATE, **modules)
    for split in ("train", "val"):
        tasks = {f"{split}_{number}": {"task": {"query": f"Copper {number}?"}} for number in range(3)}
        (folder / f"{split}.json").write_text(json.dumps(tasks))
    reader = "task_reader.deep_finance"
    return Files(
        yaml,
        (
            *SMALL,
            *("judge.openjudge_llm=m", "judge.concurrency=2", "judge.train_ref_ans_path=", "trainer_common.nnodes=1"),
            *("presentation_quality_weight=0.25", "grounding_weight=0.75", "rm_weight=0.5"),
            *(f"{reader}.training.file_path={folder}/train.json", f"{reader}.validation.file_path={folder}/val.json"),
            *(f"task_reader.env_service.env_url={world}", "rollout.multi_turn.max_steps=3"),
        ),
    )


def traces(folder: Path) -> Files:
    yaml = written(folder, "example_feedback_tracing", TRACING, train=TRAINED, judge=BY_LENGTH)
    with sqlite3.connect(yaml.parent / "studio.sqlite") as connection:
        connection.execute("CREATE TABLE span_table (name TEXT, attributes TEXT)")
        for place in ("France", "the Philippines", "Burkina Faso", "Uruguay", "old Persia"):
            asked, said = f"What is the capital of {place}?", f"It is {place[::-1]}."
            message = "Msg(id='1', name='{}', content='{}', role='{}')"
            attributes = {
                "input": {"kwargs": {"msg": message.format("user", asked, "user")}},
                "output": message.format("Friday", said, "assistant"),
            }
            connection.execute("INSERT INTO span_table VALUES ('ReActAgent.reply', ?)", (json.dumps(attributes),))
    return Files(yaml, SMALL)


def run(folder: Path, files: Files, backbone: str, server: Server | None = None) -> None:
    url = "http://127.0.0.1:9/v1" if server is None else server.url
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "k"}
    environment.pop("DASHSCOPE_API_KEY", None)
    command = [sys.executable, "-m", "ajet", "--conf", str(files.yaml), f"--backbone={backbone}", *files.overrides]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert backbone == "debug" or re.search(r"step 2/2", done.stdout), done.stdout


def test_a_template_is_valid_once_it_is_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with world_service(tmp_path) as world:
        files = template(tmp_path, world)
        assert main(["validate", str(files.yaml)]) == 2
        assert "rm_weight: {{RM_WEIGHT}} stands for a value" in capsys.readouterr().err
        assert main(["validate", str(files.yaml), *files.overrides]) == 0
    said = capsys.readouterr().out
    assert "3 to train on, 3 to validate on" in said and "'swanlab' is left out" in said


@pytest.mark.slow
def test_a_template_runs(tmp_path: Path) -> None:
    with world_service(tmp_path) as world:
        files = template(tmp_path, world)
        run(tmp_path, files, "debug")
        run(tmp_path, files, "local")


@pytest.mark.slow
def test_traces_run(tmp_path: Path) -> None:
    with helper(lambda _: json.dumps({"good": True, "reason": "because"})) as server:
        files = traces(tmp_path)
        run(tmp_path, files, "debug", server)
        run(tmp_path, files, "local", server)
    assert len((tmp_path / "tasks.jsonl").read_text().splitlines()) == 5
