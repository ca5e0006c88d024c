"""What `ajet validate` finds before a run would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ajet.task_judge.helper
from ajet.backbone.launch import memory_advice
from ajet.cli.main import main
from ajet.engine.tiny_models import tiny_folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A new project with its own copy of the model, as the working directory."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my-agent"]) == 0
    capsys.readouterr()
    shutil.copytree(tiny_folder("qwen2-0.3m"), tmp_path / "my-agent" / "model")
    monkeypatch.chdir(tmp_path / "my-agent")
    return tmp_path / "my-agent"


def validated(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    code = main(["validate", "my-agent.yaml", "model.path=./model", *more])
    said = capsys.readouterr()
    return code, said.out, said.err


def change(file: Path, **values: Any) -> None:
    settings = json.loads(file.read_text())
    settings.update(values)
    file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def test_a_model_that_is_fit(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = validated(capsys, "user.name=a b", "+mine.api_key=sk-abcdefghijklmnopqrst")
    assert (code, error) == (0, "")
    assert "is valid. To run it: ajet --conf my-agent.yaml model.path=./model 'user.name=a b' +mine.api_key=" in out
    assert "abcdefghij" not in out


def test_a_model_without_chat_template_or_end(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in ("chat_template.jinja", "generation_config.json"):
        (project / "model" / file).unlink(missing_ok=True)
    change(project / "model" / "tokenizer_config.json", chat_template=None, eos_token=None)
    code, out, error = validated(capsys)
    assert code == 2
    assert "has no chat template" in error
    assert "which token ends a reply" in error
    assert "is valid" not in out


def test_a_model_without_pad_token_is_fit_and_debugged(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("tokenizer_config.json", "config.json", "generation_config.json"):
        change(project / "model" / file, **{key: None for key in ("pad_token", "pad_token_id")})
    code, out, error = validated(capsys)
    assert (code, error) == (0, "") and "is valid" in out
    code = main(["--conf", "my-agent.yaml", "--backbone=debug", "model.path=./model", "--quiet"])
    assert code == 0, capsys.readouterr().err


def test_a_model_without_tokenizer(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (project / "model").glob("token*"):
        file.unlink()
    code, _, error = validated(capsys)
    assert code == 2
    assert "tokenizer" in error and "ajet.model.path" in error


def test_longer_than_the_models_positions(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(project / "model" / "config.json", max_position_embeddings=256)
    code, _, error = validated(capsys)
    assert code == 2
    assert "512 tokens, but ./model was made for 256" in error.replace(str(project), ".")
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    change(project / "model" / "config.json", rope_scaling=stretched)
    assert validated(capsys)[0] == 0


def test_layers_for_adapters_that_the_model_lacks(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = ("--backbone=local", "model.lora.enabled=true")
    code, _, error = validated(capsys, *lora, "model.lora.target_modules=[q_proj,gate_prj]")
    assert code == 2 and "ajet.model.lora.target_modules: the model has no module 'gate_prj'" in error
    assert validated(capsys, *lora, "model.lora.target_modules=[q_proj,gate_proj]")[0] == 0
    for pattern in ("q_proj", "("):
        code, _, error = validated(capsys, *lora, f"model.lora.target_modules='{pattern}'")
        assert (
            code == 2 and "no module's whole name matches the pattern" in error and "As a list, write q_proj" in error
        )
    assert validated(capsys, *lora, r"model.lora.target_modules='.*\.q_proj'")[0] == 0


def test_a_cache_without_room_for_one_conversation(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = validated(capsys, "rollout.kv_cache_gb=0.00001")
    assert code == 2 and "ajet.rollout.kv_cache_gb: 1e-05 has no room for one conversation" in error
    assert "(512 tokens), which takes 0.01 GB: raise it" in error, "rounded up: so much is enough"
    assert validated(capsys, "rollout.kv_cache_gb=0.1")[0] == 0


def test_a_tracker_that_is_not_there(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ajet.observe import metrics as trackers

    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda _name: None)
    code, shown, _ = validated(capsys, "trainer_common.logger=wandb")
    assert code == 0, "metrics go elsewhere, too: no reason to refuse a run"
    assert "'wandb' is left out" in shown and "trainer_common.logger=console" in shown
    assert validated(capsys, "trainer_common.logger=wandb", "--backbone=debug")[0] == 0


JUDGE = """
from ajet.task_judge.base_judge import BaseJudge

class Exact(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        return float(workflow_output.metadata["final_answer"] == workflow_task.task.metadata["answer"]), None
"""


def test_a_sink_that_is_not_there(project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    (project / "sink.py").write_text("class Mine: ...")
    for named, said in (("sinc.py->Mine", "did you mean 'sink.py'"), ("sink.py->Mein", "did you mean 'Mine'")):
        code, _, error = validated(capsys, f"trainer_common.logger={named}")
        assert code == 2 and "trainer_common.logger" in error and said in error
    (project / "above").mkdir()
    monkeypatch.chdir(project / "above")
    assert main(["validate", "../my-agent.yaml", "trainer_common.logger=sink.py->Mine"]) == 0, "beside the YAML"


def test_an_early_stop_that_no_validation_knows(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = "trainer_common.early_stop.target=1", "trainer_common.val_pass_n=4"
    metric = "trainer_common.early_stop.metric=val/{}"
    for name in ("success", "success/pass@4", "all_pass@2", "return/min", "user/mine", "reward/part"):
        assert validated(capsys, *stop, metric.format(name))[0] == 0
    code, _, error = validated(capsys, *stop, metric.format("sucess"))
    assert code == 2 and "a validation has no metric 'val/sucess'; did you mean val/success" in error


def test_a_judge_that_reads_what_the_workflow_does_not_give(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "judge.py").write_text(JUDGE)
    own = "task_judge.judge_protocol=judge.py->Exact"
    code, out, _ = validated(capsys, own)
    assert code == 0
    assert "Exact reads 'final_answer' of the workflow's metadata, and MyWorkflow gives 'answer'" in out
    built_in = "task_judge.judge_protocol=ajet.task_judge.math_answer_as_judge->MathAnswerAsJudge"
    assert "MathAnswerAsJudge reads 'final_answer'" in validated(capsys, built_in)[1]
    workflow = project / "workflow.py"
    workflow.write_text(workflow.read_text().replace('{"answer": answer}', '{"final_answer": answer}'))
    assert "warning" not in validated(capsys, own)[1]
    tasks = project / "data" / "train.jsonl"
    tasks.write_text(tasks.read_text().replace('"answer"', '"solution"'))
    code, _, error = validated(capsys, built_in)
    assert code == 2
    assert "MathAnswerAsJudge reads 'answer' of a task's metadata, and task 'train-0' has 'solution'" in error


def test_tasks_of_a_helper_model_that_does_not_answer(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ajet.task_judge.helper, "MAX_RETRIES", 0)
    (project / "about.txt").write_text("The library opens at nine on weekdays. On Sunday it stays closed.")
    helper = ["helper.model=big", "helper.base_url=http://127.0.0.1:9/v1", "helper.api_key=none"]
    documents = "task_reader.data_generation.document_reader.document_path=[about.txt]"
    code, _, error = validated(capsys, *helper, "task_reader.type=data_generation", documents)
    assert code == 1
    assert "error: helper model 'big' at http://127.0.0.1:9/v1: APIConnectionError" in error


def test_a_rehearsal_without_a_model_call(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "silent.py").write_text(
        "from ajet import Workflow, WorkflowOutput\n\n\nclass Silent(Workflow):\n"
        "    async def execute(self, workflow_task, tuner):\n        return WorkflowOutput(reward=1.0)\n"
    )
    code, out, error = validated(capsys, "rollout.user_workflow=silent.py->Silent", "--run")
    assert code == 1
    assert "made no model call" in error
    assert "is valid" not in out


def test_out_of_memory_is_said_with_what_to_change() -> None:
    said = memory_advice(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines"))
    assert said is not None and said.startswith("out of memory: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    assert "max_tokens_per_step" in said and "--plan" in said and "More lines" not in said
    assert memory_advice(RuntimeError("something else")) is None


@pytest.mark.parametrize(
    ("backbone", "setting", "said"),
    [
        ("verl", "trainer_common.algorithm.use_kl_in_reward=true", "set use_kl_loss: true instead"),
        ("trinity", "task_reader.curriculum.enabled=true", "Trinity reads tasks ahead"),
    ],
)
def test_what_a_library_refuses(
    project: Path, capsys: pytest.CaptureFixture[str], backbone: str, setting: str, said: str
) -> None:
    code, _, error = validated(capsys, f"--backbone={backbone}", setting)
    assert code == 2
    assert f"ajet.{setting.partition('=')[0]}: " in error
    assert said in error


def test_what_a_library_does_otherwise_is_a_note(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = validated(capsys, "--backbone=verl", "trainer_common.algorithm.zero_variance_groups=resample")
    assert code == 0
    assert "with verl this is `skip`" in out
