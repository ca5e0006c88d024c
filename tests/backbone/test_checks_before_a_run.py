"""What a run and `ajet validate` refuse before PyTorch is imported or weights are loaded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from ajet.backbone.checks import check_start
from ajet.cli.main import main
from ajet.config import make_config
from ajet.engine.model_source import ModelSource
from ajet.engine.tiny_models import write_tokenizer
from ajet.schema.errors import ImportPathError
from support.hybrids import hybrid_config

CONF = """\
ajet:
  experiment_name: checks
  model: {path: "tiny:qwen2"}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {training: {file_path: tasks.jsonl}}
  rollout: {user_workflow: "agents.py->Good", num_repeat: 2}
  data: {train_batch_size: 1}
  trainer_common: {total_training_steps: 1}
"""
AGENTS = """\
from ajet import Workflow
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_reader.task_reader_base import BaseTaskReader

class Good(Workflow):
    async def execute(self, workflow_task, tuner): ...

class Other(Workflow):
    async def run(self, workflow_task, tuner): ...

class Few(Workflow):
    async def execute(self, task): ...

class Judge(BaseJudge):
    def judge(self, workflow_task, workflow_output): ...

class Empty(BaseTaskReader):
    def get_training_tasks(self): return []
    def get_validation_tasks(self): return []

class Nothing(Empty):
    def get_training_tasks(self): return None
"""
SIGNATURE = "define `async def execute(self, workflow_task, tuner)`"
MISTAKES = {
    "no execute": (["rollout.user_workflow=agents.py->Other"], ["Other has no `execute` (it has run)", SIGNATURE]),
    "arguments": (["rollout.user_workflow=agents.py->Few"], ["Few.execute (line 12) takes (self, task)", SIGNATURE]),
    "no class": (["rollout.user_workflow=agents.py->Goood"], ["did you mean 'Good'?"]),
    "no method of a judge": (
        ["task_judge.judge_type=customized_protocol", "task_judge.judge_protocol=agents.py->Judge"],
        ["Judge has no `compute_reward` (it has judge)"],
    ),
    "no such tiny model": (["model.path=tiny:qwen"], ["ajet.model.path", "qwen2, qwen3, llama"]),
    "no tasks": (["task_reader.type=agents.py->Empty"], ["Empty.get_training_tasks() returned no tasks"]),
    "no list of tasks": (["task_reader.type=agents.py->Nothing"], ["should return a list of ajet.Task", "NoneType"]),
    "an empty file": (["task_reader.jsonl_dataset_file.training.file_path=empty.jsonl"], ["contains no tasks"]),
    "a number": (
        ["task_reader.jsonl_dataset_file.training.file_path=number.jsonl"],
        ["number.jsonl:1: 'query' should be text, found a number"],
    ),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONF)
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "tasks.jsonl").write_text('{"query": "two and two?", "answer": "4"}\n')
    (tmp_path / "number.jsonl").write_text('{"query": 22, "answer": "4"}\n')
    (tmp_path / "empty.jsonl").touch()
    return tmp_path


@pytest.mark.parametrize("command", [["validate"], ["--conf"]], ids=["validate", "a run"])
@pytest.mark.parametrize(("overrides", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_refused(
    command: list[str], overrides: list[str], said: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "c.yaml", *overrides]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in said), error


def test_a_run_refuses_it_before_pytorch_is_imported(here: Path) -> None:
    given = {name: MISTAKES[name][0] for name in ("arguments", "no class", "no tasks", "a number")}
    code = (
        "import json, sys; from ajet.cli.main import main\n"
        "for name, overrides in json.loads(sys.argv[1]).items():\n"
        "    code = main(['--conf', 'c.yaml', *overrides])\n"
        "    assert (code, 'torch' in sys.modules) == (2, False), name"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(given)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("family", "why"), [("Qwen3.5", None), ("Granite 4", None), ("MiniMax", "keep their state")])
def test_the_embedded_engine_says_which_models_it_can_serve(
    family: str, why: str | None, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hybrid_config(family).save_pretrained(here / "hybrid")
    write_tokenizer(here / "hybrid", "qwen2")
    main(["validate", "c.yaml", "model.path=hybrid"])
    said, error = capsys.readouterr()
    assert ("served     by the embedded engine, which keeps states" in said) == (why is None)
    rows = "trained    as rows:" in said and "carries a state from token to token (linear_attention)" in said
    assert rows == (family != "Qwen3.5") and ("trained    as trees" in said) == (family == "Qwen3.5")
    assert ("can't serve" in error) == (why is not None)
    assert why is None or (why in error and "rollout.engine: vllm" in error)
    main(["validate", "c.yaml", "model.path=hybrid", "--backbone=verl"])
    said, error = capsys.readouterr()
    assert "can't serve" not in error and "trained  " not in said


@pytest.mark.parametrize("model", ["tiny:qwen3", "Qwen/Qwen3-0.6B"])
def test_the_trainer_says_that_it_shares_what_calls_share(
    model: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "c.yaml", f"model.path={model}", "rollout.max_model_len=18000"]) == 0
    assert "trained    as trees: what calls share is computed once" in capsys.readouterr().out


def test_what_can_not_be_trained_is_refused_with_the_fix(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    AutoConfig.for_model("t5", d_model=32, num_layers=2).save_pretrained(here / "other")
    write_tokenizer(here / "other", "qwen2")
    for command in (["validate", "c.yaml"], ["--conf", "c.yaml"]):
        assert main([*command, "model.path=other"]) == 2
        error = capsys.readouterr().err
        assert "ajet.model.path: model '" in error and "can't be built: Unrecognized configuration class" in error
        assert error.endswith("Choose a causal language model, such as Qwen3 or Llama\n")


@pytest.mark.parametrize("command", [["validate"], ["--conf"]], ids=["validate", "a run"])
@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", "cut off", "model.safetensors is damaged, or not all there"),
        ("config.json", '{"model_type":', "config.json is no JSON"),
        ("config.json", '{"model_type": "llama", "hidden_size": "64"}', "'hidden_size' expected int, got str"),
        ("generation_config.json", "[]", "generation_config.json must hold a JSON object"),
        ("chat_template.jinja", "{% for m in messages %}", "the model's chat template does not accept these messages"),
    ],
)
def test_a_damaged_folder_is_refused_by_the_files_name(
    command: list[str], file: str, content: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(ModelSource.resolve("tiny:llama").path, here / "model")
    (folder / file).write_text(content)
    assert main([*command, "c.yaml", "model.path=model"]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error, error


def test_validate_says_what_it_did_not_check(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "c.yaml", "model.path=somebody/some-model"]) == 0
    assert "unchecked  the model: no files of somebody/some-model" in capsys.readouterr().out
    assert main(["validate", "c.yaml", "trainer_common.algorithm.distillation.teacher=somebody/some-teacher"]) == 0
    assert "unchecked  the teacher: no files of somebody/some-teacher" in capsys.readouterr().out


@pytest.mark.parametrize("runners", ["remote", "outside"])
def test_a_workflow_that_runs_elsewhere_is_not_imported_here(runners: str) -> None:
    check_start(make_config({"rollout.user_workflow": "not_here.py->Agent", "task_runner.wrapper_type": runners}))
    with pytest.raises(ImportPathError):
        check_start(make_config({"rollout.user_workflow": "not_here.py->Agent"}))
