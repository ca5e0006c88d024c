"""AgentJet's own tutorials, unmodified, from a folder that `make test-upstream FOLDER=…` names: each YAML is validated,
run on debug, and trained for two steps on local.

Only the command line differs: a tiny model, small data of our own, small numbers. A helper model and a world on this
machine answer.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.http_server import Answer, Server
from support.old_repository import SOURCE, world_service
from support.scripted_helper import reply

FOLDER = os.environ.get("AJET_UPSTREAM")
YAMLS = sorted(file for file in Path(FOLDER).glob("tutorial/**/*.yaml") if file.stat().st_size) if FOLDER else []
try:
    AGENTSCOPE = version("agentscope")
except PackageNotFoundError:
    AGENTSCOPE = "absent"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not YAMLS, reason="run `make test-upstream FOLDER=path/to/AgentJet`"),
    pytest.mark.skipif(not AGENTSCOPE.startswith("1."), reason=f"needs agentscope 1.0.x, here is {AGENTSCOPE}"),
]

SUM = {"question": "What is 3 + 4?", "answer": "3 + 4 = 7 #### 7"}
COUNTDOWN = {"target": 24, "nums": [4, 6]}
ROUND = {
    "main_query": "[no query]",
    "init_messages": [{"role": "user", "content": "I have had a headache for two days."}],
    "metadata": {"decision_truth": "continue", "info_truth": "symptom: nausea - yes"},
}
REPORT = {"task": {"query": "How did the price of copper move?", "metadata": {"domain": "metals"}}}
ANSWER = json.dumps({"good": True, "reason": "because", "score": 1, "rubrics": ["The sum must be right."]})
SCORES = "<think>it asks</think><format_score>1.0</format_score><content_score>1.0</content_score>"
NUMBERS = (
    "model.path=tiny:qwen2-0.3m",
    "data.train_batch_size=2",
    "rollout.num_repeat=2",
    "rollout.max_response_length_in_one_turn=16",
    "rollout.compute_madness_checklist=[]",  # random weights write nonsense
    "rollout.multi_turn.max_steps=12",
    "rollout.max_env_worker=4",
    "rollout.name=torch",
    "trainer_common.total_training_steps=2",
    "trainer_common.test_freq=-1",
    "trainer_common.nnodes=1",
    "trainer_common.n_gpus_per_node=1",
    "debug.debug_first_n_tasks=1",
)


class Place(NamedTuple):
    """What the tutorials need besides their own files."""

    folder: Path
    helper: Server
    world: str

    def run(self, *arguments: str) -> None:
        """Run `ajet` as in a shell in another folder. Every episode ends well. That random weights solve nothing, so
        that all rewards of a group are equal, is no fault of the files."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "OPENAI_BASE_URL": self.helper.url,
            "OPENAI_API_KEY": "k",
            "OPENJUDGE_BASE_URL": self.helper.url,
            "OPENJUDGE_API_KEY": "k",
            "HTTP_PROXY": self.helper.url.removesuffix("/v1"),  # an opponent has a fixed address
            "NO_PROXY": "127.0.0.1,localhost",
        }
        environment.pop("DASHSCOPE_API_KEY", None)
        done = subprocess.run(
            [sys.executable, "-m", "ajet", *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        said = (done.stdout + done.stderr)[-6000:]
        assert "episodes failed" not in said, said
        assert done.returncode == 0 or "no step had a group whose episodes earned different rewards" in said, said

    def data(self, name: str) -> list[str]:
        """The overrides that name the data, and what else the tutorial's own folder doesn't say."""
        makers = {
            "example_appworld": self._world,
            "example_countdown": lambda: self._hub(COUNTDOWN),
            "example_deep_finance": self._deep_finance,
            "example_feedback_tracing": self._traces,
            "example_frozenlake": self._dummies,
            "example_learn2ask": lambda: self._lines("dataset_file", ROUND),
            "example_math_agent": lambda: self._hub(SUM),
            "example_rubrics_judge": lambda: self._hub(SUM),
            "example_werewolves": self._dummies,
        }
        if name not in makers:
            pytest.skip(f"{name} is newer than these tests, which have no data for it")
        return makers[name]()

    def _dummies(self) -> list[str]:
        return ["task_reader.random_dummy.num_tasks=4"]

    def _world(self) -> list[str]:
        return [f"task_reader.env_service.env_url={self.world}"]

    def _hub(self, row: dict[str, Any]) -> list[str]:
        (self.folder / "data").mkdir()
        for split in ("train", "test"):
            (self.folder / "data" / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
        return [f"task_reader.huggingface_dat_repo.dataset_path={self.folder / 'data'}"]

    def _lines(self, block: str, row: dict[str, Any]) -> list[str]:
        path = self.folder / "rows.jsonl"
        path.write_text("".join(json.dumps({**row, "task_id": str(number)}) + "\n" for number in range(4)))
        return [f"task_reader.{block}.{split}.file_path={path}" for split in ("training", "validation")]

    def _traces(self) -> list[str]:
        path = self.folder / "studio.sqlite"
        printed = "Msg(id='1', name='{}', content='{}', role='{}')"
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE span_table (name TEXT, attributes TEXT)")
            for number in range(8):
                asked, said = f"Which number comes after {'x' * number} {number}00?", f"\\boxed{{{number}01}}"
                attributes = {
                    "input": {"kwargs": {"msg": printed.format("user", asked, "user")}},
                    "output": printed.format("Friday", said.replace("\\", "\\\\"), "assistant"),
                }
                connection.execute("INSERT INTO span_table VALUES ('ReActAgent.reply', ?)", (json.dumps(attributes),))
        reader = "task_reader.feedback_tracing"
        return [f"{reader}.base_url={path}", f"{reader}.train_output_path={self.folder / 'tasks.jsonl'}"]

    def _deep_finance(self) -> list[str]:
        overrides = [
            "judge.openjudge_llm=m",
            "judge.rm_llm=m",
            "judge.concurrency=2",
            "judge.train_ref_ans_path=",
            "judge.val_ref_ans_path=",
            "presentation_quality_weight=0.5",
            "grounding_weight=0.5",
            "rollout.max_model_len=30000",
            "data.max_response_length=22000",
            "rm_weight=0",  # its package can't be installed beside the others
            f"task_reader.env_service.env_url={self.world}",
        ]
        for split, name in (("training", "train"), ("validation", "val")):
            path = self.folder / f"{name}.json"
            tasks = {f"{name}_{number}": REPORT for number in range(4)}
            path.write_text(json.dumps(tasks))
            overrides.append(f"task_reader.deep_finance.{split}.file_path={path}")
        return overrides


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    def answer(_path: str, body: dict[str, Any], _key: str) -> Answer:
        return reply(SCORES if "format_score" in json.dumps(body) else ANSWER)

    helper = Server(answer)
    try:
        with world_service(tmp_path) as world:
            yield Place(tmp_path, helper, world)
    finally:
        helper.http.shutdown()


OTHER_WORKFLOWS = {
    "example_math_agent/math_agent.yaml": (
        "math_agent_langchain.py->ExampleMathLearn",
        "math_agent_oai_sdk.py->ExampleMathLearn_Simple_NoToolCall",
        "math_agent_oai_sdk.py->ExampleMathLearn",
        "math_agent_raw_http.py->ExampleMathLearn",
        "math_agent_simplify.py->MathToolWorkflow",
        "math_agentscope_urlkey.py->MathToolWorkflow",
    ),
    "example_learn2ask/learn2ask.yaml": ("learn2ask_langchain.py->ExampleLearn2Ask",),
}


@pytest.mark.parametrize(
    ("yaml", "workflow"), [(yaml, workflow) for yaml, workflows in OTHER_WORKFLOWS.items() for workflow in workflows]
)
def test_another_workflow_of_a_tutorial(place: Place, yaml: str, workflow: str) -> None:
    """The variants that a YAML names in comments, or that stand beside its own."""
    path = Path(str(FOLDER)) / "tutorial" / yaml
    overrides = [*NUMBERS, *place.data(path.parent.name), f"rollout.user_workflow={path.parent / workflow}"]
    place.run("validate", str(path), *overrides)
    place.run("--conf", str(path), "--backbone=debug", *overrides, "experiment_name=run")


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_tutorial(place: Place, path: Path) -> None:
    assert FOLDER is not None
    (name,) = Path(path).relative_to(Path(FOLDER) / "tutorial").parts[:1]
    overrides = [*NUMBERS, *place.data(name)]
    place.run("validate", str(path), *overrides)
    place.run("--conf", str(path), "--backbone=debug", *overrides, "experiment_name=run")
    place.run("--conf", str(path), "--backbone=local", *overrides, "experiment_name=run")
    steps = (place.folder / "saved_experiments" / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(steps) >= 2
