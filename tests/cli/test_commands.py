"""`ajet init`, `validate`, `doctor` and `config`, as a new user meets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ajet.backbone.plan import installed, requirement, version_range
from ajet.cli import doctor
from ajet.cli.main import main
from ajet.config import load_config

ROOT = Path(__file__).parents[2]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A new project, as the working directory."""
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "init", "my-agent")[0] == 0
    monkeypatch.chdir(tmp_path / "my-agent")
    return tmp_path / "my-agent"


@pytest.mark.slow
def test_a_new_project_is_valid_and_its_test_passes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "validate", "my-agent.yaml")
    assert code == 0
    assert "MyWorkflow (workflow.py)" in out
    assert "64 to train on, 16 to validate on" in out
    assert "20 steps" in out
    assert "320 episodes" in out
    assert "PROJECT" not in "".join(
        path.read_text() for path in project.rglob("*") if path.is_file() and path.suffix != ".pyc"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
def test_a_new_project_runs_as_it_is(project: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "ajet", "--conf", "my-agent.yaml", "--backbone=debug"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("backbone: debug (from --backbone)\n")
    assert "2 episodes, 0 without a reward" in ran.stdout
    assert (project / "saved_experiments" / "my-agent-debug" / "episodes.sqlite").exists()


def test_validate_names_what_is_wrong_beyond_the_config(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workflow = (project / "workflow.py").read_text()
    (project / "other.py").write_text(workflow.replace("class MyWorkflow(", "class YourWorkflow("))
    other = "rollout.user_workflow=other.py->MyWorkflow"
    assert "did you mean 'YourWorkflow'?" in run(capsys, "validate", "my-agent.yaml", other)[2]
    (project / "broken.py").write_text(workflow + "\nimport no_such_package\n")
    broken = "rollout.user_workflow=broken.py->MyWorkflow"
    assert "no_such_package" in run(capsys, "validate", "my-agent.yaml", broken)[2]
    with (project / "data" / "train.jsonl").open("a") as data:
        data.write('{"question": }\n')
    code, _, error = run(capsys, "validate", "my-agent.yaml")
    assert code == 2
    assert "train.jsonl:65: not JSON" in error


def test_validate_counts_as_the_config_says(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(
        capsys,
        "validate",
        "my-agent.yaml",
        "trainer_common.total_training_steps=null",
        "trainer_common.total_epochs=3",
        "data.train_batch_size=10",
        "trainer_common.val_before_train=true",
        "trainer_common.val_pass_n=2",
    )
    assert "10 tasks × 4 = 40 episodes in 10 groups" in out
    assert "20 steps (3.12 epochs), 800 episodes" in out
    assert "3 × 32 episodes" in out
    _, out, _ = run(capsys, "validate", "my-agent.yaml", "--backbone=debug", "debug.debug_first_n_tasks=100")
    assert "64 episodes, one for each of the first tasks" in out


def test_validate_can_run_one_task_without_a_model(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "replies.yaml").write_text("- It is 48\n")
    code, out, _ = run(capsys, "validate", "my-agent.yaml", "--replies", "replies.yaml")
    assert code == 0, out
    assert "completed · reward 1 · 1 turn" in out
    workflow = (project / "workflow.py").read_text()
    (project / "raises.py").write_text(workflow.replace('metadata["answer"]', 'metadata["solution"]'))
    code, out, _ = run(capsys, "validate", "my-agent.yaml", "--run", "rollout.user_workflow=raises.py->MyWorkflow")
    assert code == 1
    assert "workflow_error" in out
    assert "KeyError: 'solution'" in out
    assert "is valid" not in out


def test_the_documentation_of_all_keys_is_current(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "config", "docs", str(tmp_path / "config"))
    assert (code, out) == (0, "")
    written = {file.name: file.read_text() for file in (tmp_path / "config").iterdir()}
    current = {file.name: file.read_text() for file in (ROOT / "docs" / "config").iterdir()}
    assert written == current, "run: ajet config docs docs/config"
    _, out, _ = run(capsys, "config", "docs")
    assert all(text in out for text in written.values())


def test_the_json_schema_describes_the_ready_configs(capsys: pytest.CaptureFixture[str]) -> None:
    import yaml
    from jsonschema import Draft202012Validator

    schema = json.loads(run(capsys, "config", "schema")[1])
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    for file in (ROOT / "configs").glob("*.yaml"):
        assert not list(validator.iter_errors(yaml.safe_load(file.read_text())))
    assert validator.is_valid({"ajet": {"rollout": {"num_repeat": "${oc.env:N}"}}, "mine": 1})
    assert not validator.is_valid({"ajet": {"rollout": {"num_repeat": "four"}}})
    assert not validator.is_valid({"ajet": {"rolout": {}}})
    short = {"sandbox": "bubblewrap", "environment": "gymnasium:CartPole-v1", "compute_madness_checklist": None}
    lists = {"trainer_common": {"logger": "tensorboard"}, "task_reader": {"fields": {"main_query": "q"}}}
    assert validator.is_valid({"ajet": {"rollout": short, **lists, "debug": None}})
    assert not validator.is_valid({"ajet": {"rollout": {"sandbox": "bubblewra"}}})


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.name)
def test_the_ready_configs_are_valid(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    code, _, error = run(capsys, "validate", str(file), "model.path=tiny:qwen2-0.3m")
    assert code == 0, error


def test_show_fills_in_defaults_and_masks_secrets(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = r"prompt_tuning.templates={a: 'for \${q}'}"
    overrides = (template, "rollout.num_repeat=9", "+mine.api_key=sk-abcdefghijklmnopqrst")
    code, out, _ = run(capsys, "config", "show", "my-agent.yaml", *overrides)
    assert code == 0
    assert "num_repeat: 9" in out
    assert "top_p: 1.0" in out
    assert "abcdefghij" not in out
    Path("shown.yaml").write_text(out)
    assert load_config("shown.yaml").ajet.prompt_tuning.templates == {"a": "for ${q}"}, "it means the same"


@pytest.mark.slow
def test_doctor_finds_this_machine_usable(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0, out
    for word in ("Python", "memory", "disk", "torch", "transformers", "verl"):
        assert word in out


def test_doctor_names_conflicts_and_their_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"transformers": "5.23.0", "verl": "0.9.1", "torch": "2.13.0"}
    monkeypatch.setattr(doctor, "installed", versions.get)
    (conflict,) = doctor.check_conflicts()
    assert conflict.level is doctor.Sign.PROBLEM
    assert conflict.fix == "pip install 'transformers>=5.5,<5.11'"
    versions["trinity-rft"] = "0.6.0"
    (conflict,) = doctor.check_conflicts()
    assert "pip uninstall verl" in conflict.fix
    del versions["verl"]
    versions["transformers"] = "5.10.4"
    (conflict,) = doctor.check_conflicts()
    assert "5.12.1" in conflict.fix
    findings = {finding.what: finding for finding in doctor.check_core()}
    assert findings["openai"].fix == "pip install 'openai>=1.60'"
    versions["agentscope"] = "2.0.11"
    findings = {finding.what: finding for finding in doctor.check_optional()}
    assert findings["agentscope"].level is doctor.Sign.WARNING
    assert findings["agentscope"].fix == "pip install 'agentscope>=1.0.8,<2.0.11'"
    assert findings["vllm"].level is doctor.Sign.ABSENT


def test_doctor_takes_versions_from_the_package_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [text for texts in project["optional-dependencies"].values() for text in texts]
    declared = {one.name.lower(): one for one in map(Requirement, [*project["dependencies"], *optional])}
    for package in [*doctor.CORE, *doctor.TRAINING, *(option.package for option in doctor.OPTIONAL)]:
        assert requirement(package).specifier == declared[package].specifier, package
    monkeypatch.setattr(doctor, "installed", {"verl": "0.8.0"}.get)
    (finding,) = [finding for finding in doctor.check_optional() if finding.what == "verl"]
    assert finding.level is doctor.Sign.WARNING and finding.fix == "pip install 'verl>=0.9.1,<0.10'"
    assert doctor.pip("x>=1") == "pip install 'x>=1'"


def test_local_versions_of_torch_are_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    assert version_range(requirement("torch")) == ">=2.11"
    assert requirement("torch").specifier.contains("2.11.0+cpu")
    assert installed("surely-not-installed") is None
    assert installed("pytest") == metadata.version("pytest")


def test_the_template_is_part_of_the_package() -> None:
    own = {"project_template": {"workflow.py", "test_workflow.py"}, "agent_template": {"judge.py", "test_agent.py"}}
    for name, files in own.items():
        template = Path(doctor.__file__).parent / name
        present = {path.name for path in template.rglob("*.*") if "__pycache__" not in path.parts}
        assert present >= {"project.yaml", "README.md", *files}


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["react", "tool"])
def test_a_project_with_a_ready_agent_runs(
    agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "quiz", "--agent", agent]) == 0
    monkeypatch.chdir(tmp_path / "quiz")
    assert main(["validate", "quiz.yaml"]) == 0
    assert f"{agent}, tools: calculator, at most 4 steps" in capsys.readouterr().out
    assert main(["--conf", "quiz.yaml", "--backbone=debug"]) == 0
    out = capsys.readouterr().out
    assert out.count(f"{agent} · turn 1 (") == 2, out
    ran = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert main(["init", "other", "--agent", "raect"]) == 2
    assert "invalid choice: 'raect'" in capsys.readouterr().err
