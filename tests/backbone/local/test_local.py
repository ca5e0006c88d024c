"""Whole runs of the local backbone: train, validate, save, resume, imitate. A tiny real model, the real stack."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ajet.backbone import LaunchOptions, report
from ajet.backbone.local import run
from ajet.backbone.local.learner import Learner
from ajet.backbone.local.loop import LocalRun
from ajet.cli.main import main
from ajet.cli.targets import weights_folder
from ajet.config.loader import load_config
from ajet.context_tracker import ContextTracker
from ajet.engine.model_source import ModelSource
from ajet.observe.episode_store import EpisodeStore
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.metrics import JsonlSink, read_metrics
from ajet.observe.run_files import is_complete
from ajet.schema.chat import Completion
from ajet.schema.errors import ConfigError, JudgeFailedError, TaskDataError, UserError
from ajet.task_judge.helper import HelperMeter
from ajet.trainer.checkpoint import CheckpointFolder
from support import SUPPORT
from support.waiting import wait_until

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.fixture(autouse=True)
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes as long as a step; the plot has its own test (test_end_report.py)."""
    monkeypatch.setattr(report, "write_plot", lambda *_: None)


def config_file(folder: Path, workflow: str = "Babbler", **overrides: Any) -> tuple[Path, list[str]]:
    """A YAML for two small tasks, and dotted overrides."""
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"id": f"t{i}", "question": f"say {i}"}) + "\n" for i in range(3)))
    yaml = folder / "job.yaml"
    yaml.write_text(f"""
ajet:
  project_name: test
  experiment_name: job
  model: {{path: "tiny:qwen2-0.3m"}}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file:
      training: {{file_path: {tasks}}}
      validation: {{file_path: {tasks}}}
  data: {{train_batch_size: 2, max_prompt_length: 64, max_response_length: 64}}
  rollout:
    user_workflow: {SUPPORT / "talkers.py"}->{workflow}
    num_repeat: 3
    temperature: 1.0
    max_model_len: 128
    max_response_length_in_one_turn: 6
    compute_madness_checklist: []
    deterministic: true
  trainer_common:
    total_training_steps: 2
    save_freq: 1
    test_freq: 2
    use_kl_loss: false
    optim: {{lr: 1.0e-3}}
""")
    return yaml, [f"{key}={value}" for key, value in overrides.items()]


def train(folder: Path, workflow: str = "Babbler", *, fresh: bool = False, **overrides: Any) -> tuple[int, Path]:
    """Train in this process. Returns the exit code and the experiment's folder."""
    yaml, dotted = config_file(folder, workflow, **overrides)
    config = load_config(yaml, dotted, backbone="local")
    with ExperimentFolder.open(config, exp_dir=folder / "runs", source_yaml=yaml, fresh=fresh) as experiment:
        code = run(config, experiment, LaunchOptions(quiet=True))
        return code, experiment.path


def weights_hash(experiment: Path) -> str:
    return hashlib.sha256((experiment / "hf" / "model.safetensors").read_bytes()).hexdigest()


STABLE = ("train/reward/mean", "train/grad_norm", "loss/total", "tokens/trained", "tokens/computed", "train/lr")


@pytest.mark.slow
def test_a_model_without_pad_token_trains(tmp_path: Path) -> None:
    """Nothing of ours fills rows up: neither the engine nor the trainer needs one."""
    model = tmp_path / "model"
    shutil.copytree(ModelSource.resolve("tiny:qwen2-0.3m").path, model)
    for file in ("tokenizer_config.json", "config.json", "generation_config.json"):
        settings = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps({key: value for key, value in settings.items() if "pad_token" not in key}))
    assert ModelSource.resolve(model).tokenizer().pad_token_id is None
    code, experiment = train(tmp_path, **{"ajet.model.path": model})
    assert code == 0
    steps = read_metrics(experiment / "metrics.jsonl")
    (tmp_path / "other").mkdir()
    with_one, other = train(tmp_path / "other")
    assert with_one == 0
    assert [step["train/grad_norm"] for step in steps] == [
        step["train/grad_norm"] for step in read_metrics(other / "metrics.jsonl")
    ]


@pytest.mark.slow
def test_a_fresh_run_does_not_resume_from_checkpoints_that_lie_elsewhere(tmp_path: Path) -> None:
    place = {"ajet.trainer_common.checkpoint_base_dir": tmp_path / "elsewhere"}
    code, experiment = train(tmp_path, **place)
    assert code == 0 and (experiment / "hf").resolve() == tmp_path / "elsewhere" / "job" / "step_2" / "hf"
    first = weights_hash(experiment)
    code, experiment = train(tmp_path, fresh=True, **place)
    assert code == 0 and len(read_metrics(experiment / "metrics.jsonl")) == 2
    assert weights_hash(experiment) == first
    assert weights_folder(experiment, best=True).parent.parent.parent == experiment


def stable(experiment: Path) -> list[dict[str, Any]]:
    """The metrics that must repeat exactly."""
    return [
        {"step": step["step"], **{name: step[name] for name in STABLE if name in step}}
        for step in read_metrics(experiment / "metrics.jsonl")
    ]


def test_a_run_trains_validates_and_saves(tmp_path: Path) -> None:
    code, experiment = train(tmp_path, **{"trainer_common.val_before_train": "true"})
    assert code == 0
    steps = read_metrics(experiment / "metrics.jsonl")
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert {"val/return/mean", "val/reward/mean", "val/success"} <= steps[0].keys() & steps[2].keys()
    for step in steps[1:]:
        assert step["train/updates"] == 1
        assert step["ledger/captured"] == step["ledger/trained"] + step["ledger/masked"] + step["ledger/dropped"] > 0
        assert step["loss/sampler_gap_max"] < 1e-3  # the trainer sees what the engine saw
        assert step["tokens/packing_ratio"] > 1.2
        assert step["train/staleness"] == 0.0, "rollout and update alternate"
    assert sorted(path.name for path in (experiment / "checkpoints").iterdir()) == ["step_1", "step_2"]
    assert (experiment / "hf").resolve().parent.name == "step_2"
    assert load_file(experiment / "hf" / "model.safetensors")
    _exports(tmp_path, experiment)
    with pytest.raises(UserError, match="is complete"):  # with nothing left to train, the exit code must not be 0
        train(tmp_path)


def test_a_trainer_that_differs_from_its_engine_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = {"trainer_common.total_training_steps": 1, "trainer_common.test_freq": 0}
    assert train(tmp_path, **one)[0] == 0
    assert "differs from the engine's" not in caplog.text
    commit = ContextTracker.commit

    def from_elsewhere(tracker: ContextTracker, call_id: str, sampled: Completion, *rest: Any, **more: Any) -> None:
        commit(tracker, call_id, replace(sampled, logprobs=[value - 1.0 for value in sampled.logprobs]), *rest, **more)

    monkeypatch.setattr(ContextTracker, "commit", from_elsewhere)
    assert train(tmp_path, fresh=True, **one)[0] == 0
    (told,) = [line for line in caplog.messages if "differs from the engine's" in line]
    assert told.startswith("step 1:") and "by 1 (loss/sampler_gap_max)" in told and "other weights" in told


def _exports(folder: Path, experiment: Path) -> None:
    """The finished run's weights and episodes can be exported, and `ajet eval` validates the weights."""
    assert main(["export", "weights", str(experiment), str(folder / "weights")]) == 0
    assert "| Steps | 2 |" in (folder / "weights" / "README.md").read_text()
    assert load_file(folder / "weights" / "model.safetensors").keys()
    for form, records in (("jsonl", 18), ("sft", 0)):  # every reply was cut by its length: none is an example
        assert main(["export", "episodes", str(experiment), str(folder / form), "--format", form]) == 0
        assert (folder / form).read_text().count("\n") == records
    yaml, _ = config_file(folder)
    assert main(["eval", str(yaml), "--checkpoint", str(experiment), "--json"]) == 0


@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    straight.mkdir(), stopped.mkdir()
    # three tasks in batches of two: step 3 ends an epoch exactly
    _, one = train(straight, **{"trainer_common.total_training_steps": 5})
    train(stopped, **{"trainer_common.total_training_steps": 3})
    _, other = train(stopped, **{"trainer_common.total_training_steps": 5})
    assert stable(one) == stable(other)
    assert weights_hash(one) == weights_hash(other)


@pytest.mark.slow
def test_a_run_that_ended_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    _, experiment = train(tmp_path, **{"trainer_common.total_training_steps": 2})
    episodes = len(list(EpisodeStore(experiment / "episodes.sqlite").all()))
    shutil.rmtree(experiment / "checkpoints")
    with pytest.raises(ConfigError, match=r"holds no whole checkpoint any more.*Trainer\(fresh=True\)"):
        train(tmp_path, **{"trainer_common.total_training_steps": 2})
    assert len(read_metrics(experiment / "metrics.jsonl")) == 2, "what is recorded doesn't go with them"
    (experiment / "events.jsonl").unlink()
    train(tmp_path, **{"trainer_common.total_training_steps": 2})
    lines = [json.loads(line)["step"] for line in (experiment / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(set(lines)) and max(lines) == 2
    assert len(list(EpisodeStore(experiment / "episodes.sqlite").all())) == episodes


@pytest.mark.slow
def test_a_run_interrupted_in_a_validation_keeps_the_metrics_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(of: LocalRun) -> dict[str, float]:
        raise KeyboardInterrupt

    three = {"trainer_common.total_training_steps": 3, "trainer_common.save_freq": 0}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(LocalRun, "_validate", interrupted)
        train(tmp_path, **three)
    assert (tmp_path / "runs" / "job" / "checkpoints" / "step_2" / "COMPLETE").is_file()
    _, experiment = train(tmp_path, **three)
    steps = read_metrics(experiment / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3] and all("train/reward/mean" in step for step in steps)
    assert ["val/return/mean" in step for step in steps] == [False, True, True], "the resumed run makes up for it"


def test_a_run_interrupted_in_its_last_validation_is_finished_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(of: LocalRun) -> dict[str, float]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(LocalRun, "_validate", interrupted)
        train(tmp_path)
    code, experiment = train(tmp_path)
    assert code == 0 and is_complete(experiment)
    assert [("val/return/mean" in step) for step in read_metrics(experiment / "metrics.jsonl")] == [False, True]
    with pytest.raises(UserError, match="is complete"):
        train(tmp_path)


@pytest.mark.slow
def test_weights_that_were_saved_are_not_lost_where_their_score_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(LocalRun, "_validate", lambda of: signal.raise_signal(signal.SIGINT))
        train(tmp_path)
    monkeypatch.setattr(CheckpointFolder, "save", lambda *_: None)
    code, _ = train(tmp_path)
    assert code == 0 and "are lost" not in caplog.text


@pytest.mark.slow
def test_a_run_that_trained_nothing_says_why_also_where_it_lacked_only_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, experiment = train(tmp_path, "Indifferent")
    events = experiment / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:-1]))  # as if it had been killed
    caplog.clear()
    code, _ = train(tmp_path, "Indifferent")
    assert code == 1 and "every episode earned 0.5" in caplog.text


@pytest.mark.slow
def test_a_last_validation_that_was_interrupted_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HelperMeter, "since_last", lambda of: {"helper/calls": 1.0})
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(LocalRun, "_validate", lambda of: signal.raise_signal(signal.SIGINT))
        train(tmp_path)
    code, experiment = train(tmp_path)
    step = read_metrics(experiment / "metrics.jsonl")[-1]
    assert code == 0 and "val/return/mean" in step
    assert step["helper/calls"] == 2, "the step's, and its validation's"
    checkpoints = experiment / "checkpoints"
    assert "score" in json.loads((checkpoints / "step_2" / "state.json").read_text())
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_1", "step_2"]
    with pytest.raises(UserError, match="is complete"):
        train(tmp_path)


@pytest.mark.slow
def test_a_validation_that_is_made_up_for_may_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early = {f"{EARLY}.target": -1, "trainer_common.total_training_steps": 4, "trainer_common.save_freq": 0}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(LocalRun, "_validate", lambda of: signal.raise_signal(signal.SIGINT))
        train(tmp_path, **early)
    code, experiment = train(tmp_path, **early)
    assert code == 0 and [step["step"] for step in read_metrics(experiment / "metrics.jsonl")] == [1, 2]
    with pytest.raises(UserError, match="stopped early, after step 2"):
        train(tmp_path, **early)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_a_checkpoint_never_holds_a_part_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """An interruption after the weights have changed waits for the step's end; a second one leaves the step unsaved."""
    serve = Learner._serve

    def interrupted(of: Learner, version: int) -> float:
        for _ in range(times * (version == 2)):
            signal.raise_signal(signal.SIGINT)
        return serve(of, version)

    three = {"trainer_common.total_training_steps": 3, "trainer_common.save_freq": 0}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Learner, "_serve", interrupted)
        train(tmp_path, **three)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    saved = (tmp_path / "runs" / "job" / "checkpoints").glob("step_*/COMPLETE")
    assert [file.parent.name for file in saved] == ["step_2"] * (times == 1)
    (tmp_path / "other").mkdir()
    assert weights_hash(train(tmp_path, **three)[1]) == weights_hash(train(tmp_path / "other", **three)[1])


@pytest.mark.slow
def test_a_run_interrupted_while_it_notes_a_step_keeps_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = JsonlSink.log

    def interrupted(of: JsonlSink, step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        note(of, step, metrics)

    three = {"trainer_common.total_training_steps": 3, "trainer_common.save_freq": 0}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(JsonlSink, "log", interrupted)
        train(tmp_path, **three)
    assert (tmp_path / "runs" / "job" / "checkpoints" / "step_2" / "COMPLETE").is_file()
    _, experiment = train(tmp_path, **three)
    steps = read_metrics(experiment / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3] and all("train/reward/mean" in step for step in steps)


@pytest.mark.slow
def test_a_step_that_teaches_nothing_is_completed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its learning rate is used up, though no weight has changed."""
    write = LocalRun._write_episode

    def interrupted(of: LocalRun, *args: Any, **more: Any) -> None:
        if of.step == 1:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
        write(of, *args, **more)

    monkeypatch.setattr(LocalRun, "_write_episode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, "Indifferent", **{"trainer_common.total_training_steps": 3, "trainer_common.save_freq": 0})
    assert (tmp_path / "runs" / "job" / "checkpoints" / "step_2" / "COMPLETE").is_file()


@pytest.mark.slow
def test_a_run_that_goes_on_from_an_earlier_step_leaves_no_later_one(tmp_path: Path) -> None:
    """Its next start takes its own newest checkpoint. A validation of the earlier step takes nothing away."""
    five = {"trainer_common.total_training_steps": 5}
    _, experiment = train(tmp_path, **five)
    earlier = {"trainer_common.resume": experiment / "checkpoints" / "step_3"}
    code, _ = train(tmp_path, **five, **earlier, **{"trainer_common.val_only": "true"})
    steps = read_metrics(experiment / "metrics.jsonl")
    assert code == 0 and [step["step"] for step in steps] == [1, 2, 3, 4, 5] and "val/return/mean" in steps[2]
    assert {path.name for path in (experiment / "checkpoints").iterdir()} == {"step_3", "step_4", "step_5"}
    train(tmp_path, **earlier, **{"trainer_common.total_training_steps": 4})
    kept = {path.name for path in (experiment / "checkpoints").iterdir()}
    assert kept == {"step_3", "step_4", "earlier_step_4", "earlier_step_5"}
    assert (experiment / "hf").resolve().parent.name == "step_4"
    assert len(read_metrics(experiment / "metrics.jsonl")) == 4


@pytest.mark.slow
def test_a_config_that_never_resumes_puts_the_earlier_run_aside(tmp_path: Path) -> None:
    yaml, _ = config_file(tmp_path)
    command = ["--conf", str(yaml), "--exp-dir", str(tmp_path / "runs"), "trainer_common.resume=never"]
    for _ in range(2):
        assert main([*command, "trainer_common.save_freq=2"]) == 0
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(runs) == 2 and runs[0] == "job" and runs[1].startswith("job.")
    assert all((tmp_path / "runs" / run / "checkpoints" / "step_2" / "COMPLETE").is_file() for run in runs)
    assert main([*command, "trainer_common.val_only=true"]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


EARLY, REPLAY = "trainer_common.early_stop", "trainer_common.algorithm.replay"


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_curriculum_replay_and_early_stop(tmp_path: Path) -> None:
    """Episodes fail now and then, so groups are uneven, and a failed try counts for its task."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    straight.mkdir(), stopped.mkdir()
    practice = {"task_reader.curriculum.enabled": "true", f"{REPLAY}.groups": 2, f"{REPLAY}.max_age": 2}
    practice |= {f"{EARLY}.patience": 2, f"{EARLY}.min_delta": 2, "trainer_common.test_freq": 2}
    practice |= {"trainer_common.total_training_steps": 9, "rollout.num_repeat": 4}
    practice |= {"rollout.val_kwargs.temperature": 1, "rollout.val_kwargs.do_sample": "true"}
    _, one = train(straight, "Fickle", **practice)
    train(stopped, "Fickle", **practice | {"trainer_common.total_training_steps": 4})
    _, other = train(stopped, "Fickle", **practice)
    assert stable(one) == stable(other)
    assert weights_hash(one) == weights_hash(other)
    tasks = [[row.episode.task_id for row in EpisodeStore(run / "episodes.sqlite").all()] for run in (one, other)]
    assert sorted(tasks[0]) == sorted(tasks[1])
    # best after step 2, two validations without a rise: the end comes after step 6 of 9
    steps = read_metrics(one / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert any(step["failure/RuntimeError"] for step in steps if "failure/RuntimeError" in step)
    assert steps[-1]["curriculum/tried"] == 1
    assert steps[-1]["curriculum/always_solved"] == 0, "a failed episode is a try that did not succeed"
    assert steps[-1]["curriculum/never_solved"] == pytest.approx(1 / 3)
    assert steps[0]["train/replayed_groups"] == steps[0]["train/staleness"] == 0
    later = [step for step in steps[1:] if step["train/replayed_groups"]]
    assert len(later) >= 4
    for step in later:
        assert 0 < step["train/staleness"] <= 2
        assert step["loss/sampler_gap_max"] > 1e-3, "replayed tokens carry the probabilities of their own policy"
        assert step["loss/correction"] != 1.0
        assert step["episode/count"] == 8, "replayed episodes are trained, not counted again"


@pytest.mark.slow
def test_a_run_that_stopped_early_says_so_and_goes_on_if_it_may(tmp_path: Path) -> None:
    early = {f"{EARLY}.patience": 2, f"{EARLY}.min_delta": 2, "trainer_common.test_freq": 1}
    early |= {"trainer_common.total_training_steps": 9, "trainer_common.val_before_train": "true"}
    early |= {"trainer_common.save_freq": 0}
    code, experiment = train(tmp_path, **early)
    assert code == 0
    assert read_metrics(experiment / "metrics.jsonl")[-1]["step"] == 2
    assert (experiment / "hf").resolve().parent.name == "step_2"
    with pytest.raises(UserError, match=r"(?s)stopped early, after step 2.*early_stop\.patience: 2.*fresh=True"):
        train(tmp_path, **early)
    train(tmp_path, **early | {f"{EARLY}.patience": 4})
    assert read_metrics(experiment / "metrics.jsonl")[-1]["step"] == 4


def test_an_early_stop_without_its_metric_is_an_error_that_keeps_the_steps_so_far(tmp_path: Path) -> None:
    early = {f"{EARLY}.target": 0.5, f"{EARLY}.metric": "val/reward/maen", "trainer_common.save_freq": 0}
    with pytest.raises(UserError, match=r"early_stop\.metric.*'val/reward/maen'; did you mean val/re"):
        train(tmp_path, **early)
    assert (tmp_path / "runs" / "job" / "checkpoints" / "step_2" / "COMPLETE").is_file()
    config = load_config(config_file(tmp_path)[0], [f"{EARLY}.target=1"], backbone="local")
    config.ajet.task_reader.jsonl_dataset_file.validation.file_path = None
    with (
        ExperimentFolder.open(config, exp_dir=tmp_path / "other") as experiment,
        pytest.raises(UserError, match=r"early_stop\.target looks at validations.*no validation tasks"),
    ):
        run(config, experiment, LaunchOptions(quiet=True))


def test_a_run_that_only_validates_needs_something_to_validate_on(tmp_path: Path) -> None:
    config = load_config(config_file(tmp_path)[0], ["trainer_common.val_only=true"], backbone="local")
    config.ajet.task_reader.jsonl_dataset_file.validation.file_path = None
    with (
        ExperimentFolder.open(config, exp_dir=tmp_path / "runs") as experiment,
        pytest.raises(UserError, match=r"val_only: this config has no validation tasks"),
    ):
        run(config, experiment, LaunchOptions(quiet=True))


def test_the_log_says_why_calls_branch_and_that_most_tokens_are_not_trained(tmp_path: Path) -> None:
    code, experiment = train(tmp_path, "Forgetful")
    assert code == 0
    log = (experiment / "run.log").read_text()
    assert log.count("calls that continue no earlier call") == 1 and "reply_changed" in log
    assert log.count("abandoned_calls: train") == 1


def test_equal_rewards_train_nothing_and_say_so(tmp_path: Path) -> None:
    code, experiment = train(tmp_path, "Indifferent")
    assert code == 1
    assert read_metrics(experiment / "metrics.jsonl")[-1]["credit/zero_variance_groups"] == 2


def test_a_run_without_any_finite_gradient_trained_nothing(tmp_path: Path) -> None:
    entropy = {"trainer_common.algorithm.entropy_coef": 1e30, "trainer_common.total_training_steps": 1}
    code, experiment = train(tmp_path, **entropy)
    assert code == 1
    assert "no update had a finite gradient: lower ajet.trainer_common.optim.lr" in (experiment / "run.log").read_text()


def test_a_workflow_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tool server is down"):
        train(tmp_path, "Broken", **{"trainer_common.total_training_steps": 50})


def test_the_return_of_usable_episodes_is_what_a_run_goes_by(tmp_path: Path) -> None:
    early = {f"{EARLY}.target": 1.5, "trainer_common.test_freq": 1, "rollout.num_repeat": 2, "data.train_batch_size": 3}
    code, experiment = train(tmp_path, "PaidByCall", **early)
    assert code == 0
    (step,) = read_metrics(experiment / "metrics.jsonl")
    assert (step["return/mean"], step["return/max"], step["reward/mean"]) == (2.5, 3.5, 0)
    assert (step["val/return/mean"], step["val/reward/mean"]) == (1.5, 0)
    assert step["episode/failed_share"] == step["val/failed_share"] == pytest.approx(1 / 3)
    assert json.loads((experiment / "checkpoints" / "step_1" / "state.json").read_text())["score"] == 1.5


def test_what_the_model_ended_counts_and_is_trained(tmp_path: Path) -> None:
    judge = f"{SUPPORT / 'talkers.py'}->OnlyAnswers"
    steps = {"rollout.multi_turn.max_steps": 2, "data.train_batch_size": 3, "rollout.num_repeat": 10}
    lengths = {"data.max_response_length": 256, "rollout.max_model_len": 512}
    keys = {"task_judge.judge_protocol": judge, "failure_reward.otherwise": 0, "trainer_common.total_training_steps": 1}
    code, experiment = train(tmp_path, "Restless", **keys, **steps, **lengths)
    assert code == 0
    for step in read_metrics(experiment / "metrics.jsonl"):
        assert step["episode/count"] == 30  # nothing was started in place of another
        ended_early = step["outcome/max_steps"]
        assert 3 <= ended_early <= 15
        assert step["train/reward/mean"] == step["train/success"] == pytest.approx(1 - ended_early / 30)
        assert step["train/incomplete_groups"] == 0
        assert step["ledger/trained"] == step["ledger/captured"]
    assert "can't judge an episode that the model ended early (KeyError" in (experiment / "run.log").read_text()


def test_masked_episodes_count_without_being_trained(tmp_path: Path) -> None:
    judge = f"{SUPPORT / 'talkers.py'}->OnlyAnswers"
    lengths = {"data.max_prompt_length": 24, "data.max_response_length": 24, "rollout.max_model_len": 48}
    steps = {"rollout.num_repeat": 10, "trainer_common.total_training_steps": 1}
    more = {"failure_reward.overflow": "mask", "failure_reward.otherwise": -1, "task_judge.judge_protocol": judge}
    code, experiment = train(tmp_path, "Restless", **lengths, **steps, **more)
    assert code == 0
    step = read_metrics(experiment / "metrics.jsonl")[0]
    ended_early = step["outcome/overflow"]
    assert step["train/reward/mean"] == pytest.approx(1 - 2 * ended_early / 20)
    assert step["masked/failure_reward"] > 0
    assert step["ledger/trained"] == step["ledger/captured"] - step["masked/failure_reward"]
    assert step["credit/zero_variance_groups"] == 0  # the masked ones are what the others are compared with
    sft = {"trainer_common.algorithm.policy_loss": "sft", "trainer_common.algorithm.sft.min_reward": -1}
    code, experiment = train(tmp_path, "Restless", fresh=True, **lengths, **steps, **more, **sft)
    assert code == 0
    step = read_metrics(experiment / "metrics.jsonl")[0]
    assert 0 < step["train/imitated_episodes"] == 20 - step["outcome/overflow"] < 20


def test_a_judge_that_fails_ends_the_run(tmp_path: Path) -> None:
    judge = {"task_judge.judge_protocol": f"{SUPPORT / 'talkers.py'}->Unable"}
    with pytest.raises(JudgeFailedError, match=r"(?s)in 6 of 6 episodes of step 1.*OSError.*talkers\.py"):
        train(tmp_path, "Restless", **judge, **{"rollout.multi_turn.max_steps": 30, "rollout.max_model_len": 2000})


def test_a_task_that_stands_twice_in_a_step_is_drawn_twice(tmp_path: Path) -> None:
    batch = {"data.train_batch_size": 6, "rollout.num_repeat": 2, "trainer_common.test_freq": 0}
    batch["trainer_common.total_training_steps"] = 1
    _, experiment = train(tmp_path, **batch)
    recorded = [row.episode for row in EpisodeStore(experiment / "episodes.sqlite").all()]
    drawn: dict[tuple[str, int], list[bytes]] = {}
    for episode in recorded:
        said = b"".join(run.ids.tobytes() for run in episode.tree.runs if run.call >= 0)
        drawn.setdefault((episode.task_id, episode.repeat), []).append(said)
    assert len(drawn) == 6
    assert all(len(set(replies)) == len(replies) == 2 for replies in drawn.values())


@pytest.mark.parametrize("kl", [False, True])
def test_resampling_keeps_the_size_of_the_batch(tmp_path: Path, kl: bool) -> None:
    """Also where the divergence, taken off the rewards, makes groups differ whose rewards are equal."""
    keys = {"zero_variance_groups": "resample", "replay.groups": 0, "use_kl_in_reward": kl}
    overrides: dict[str, Any] = {f"trainer_common.algorithm.{key}": value for key, value in keys.items()}
    code, experiment = train(tmp_path, "Taught", **overrides, **{"trainer_common.total_training_steps": 4})
    assert code == 0
    steps = read_metrics(experiment / "metrics.jsonl")
    assert [step["credit/episodes_trained"] for step in steps] == [2 * 3] * 4
    assert any(step["train/surplus_groups"] for step in steps)
    assert any(step["credit/zero_variance_groups"] for step in steps)
    recorded = EpisodeStore(experiment / "episodes.sqlite").all()
    assert sum(step["episode/count"] for step in steps) == sum(not row.validation for row in recorded)


def test_a_group_of_equal_rewards_is_not_trained_by_the_divergence_in_its_reward(tmp_path: Path) -> None:
    """An estimator that divides by the group's deviation would blow up the smallest difference."""
    keys = {"zero_variance_groups": "skip", "use_kl_in_reward": True}
    overrides: dict[str, Any] = {f"trainer_common.algorithm.{key}": value for key, value in keys.items()}
    code, experiment = train(tmp_path, "Taught", **overrides, **{"trainer_common.total_training_steps": 4})
    assert code == 0
    steps = read_metrics(experiment / "metrics.jsonl")
    equal: dict[tuple[int, str], set[float]] = {}
    for row in EpisodeStore(experiment / "episodes.sqlite").all():
        if not row.validation:
            assert row.episode.reward is not None
            equal.setdefault((row.step, row.episode.task_id), set()).add(row.episode.reward)
    alike = [sum(len(rewards) == 1 for (at, _), rewards in equal.items() if at == step["step"]) for step in steps]
    assert any(alike[1:])
    assert [step["credit/zero_variance_groups"] for step in steps] == alike


def test_a_step_of_equal_rewards_takes_no_divergence_off(tmp_path: Path) -> None:
    code, experiment = train(tmp_path, "Indifferent", **{"trainer_common.algorithm.use_kl_in_reward": True})
    assert code == 1, "nothing was trained"
    assert [step["train/kl_in_reward"] for step in read_metrics(experiment / "metrics.jsonl")] == [0.0, 0.0]


def test_lora_with_kl_to_its_base(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    overrides = {"model.lora.enabled": "true", "model.lora.rank": 4, "trainer_common.use_kl_loss": "true"}
    code, experiment = train(tmp_path, **overrides)
    assert code == 0
    steps = read_metrics(experiment / "metrics.jsonl")
    assert steps[0]["loss/kl"] == pytest.approx(0.0, abs=1e-6) and steps[1]["loss/kl"] > 0
    assert (experiment / "checkpoints" / "step_2" / "adapter").is_dir()


@pytest.mark.slow
def test_kl_in_the_reward_replaces_the_loss_term_and_falls_on_rewards_of_calls(tmp_path: Path) -> None:
    """Step 1 starts from the reference, so nothing is taken off; in step 2 the advantages show what was."""
    algorithm = "trainer_common.algorithm"
    options = {f"{algorithm}.adv_estimator": "drgrpo", f"{algorithm}.zero_variance_groups": "keep"}
    options |= {"trainer_common.optim.lr": "0.01", "trainer_common.use_kl_loss": "true"}
    seen = {"trainer_common.kl_loss_type": "k1", "trainer_common.kl_loss_coef": "1e-9"}
    drift = {f"{algorithm}.use_kl_in_reward": "true", "trainer_common.kl_loss_coef": "0.5"}
    (tmp_path / "plain").mkdir()
    (tmp_path / "drift").mkdir()
    _, plain = train(tmp_path / "plain", "Paid", **options, **seen)
    code, charged = train(tmp_path / "drift", "Paid", **options, **drift)
    without, steps = (
        {step["step"]: step for step in read_metrics(path / "metrics.jsonl")} for path in (plain, charged)
    )
    assert code == 0
    assert steps[1]["train/kl_in_reward"] == pytest.approx(0.0, abs=1e-4)
    total = without[2]["loss/kl"] * without[2]["tokens/trained"]
    assert steps[2]["train/kl_in_reward"] == pytest.approx(0.5 * total / without[2]["episode/count"], rel=1e-3)
    assert steps[2]["train/kl_in_reward"] != pytest.approx(0.0, abs=1e-3)
    assert steps[2]["train/policy_loss"] == steps[2]["loss/policy"] and "train/sampler_gap" in steps[2]
    assert steps[1]["credit/advantage/std"] == pytest.approx(without[1]["credit/advantage/std"], abs=1e-4)
    assert steps[2]["credit/advantage/std"] != pytest.approx(without[2]["credit/advantage/std"], abs=1e-4)
    assert "loss/kl" not in steps[1] and "loss/kl" not in steps[2]


TEACHER = "trainer_common.algorithm.distillation.teacher"


@pytest.mark.slow
def test_a_teacher_trains_where_rewards_do_not(tmp_path: Path) -> None:
    source = ModelSource.resolve("tiny:qwen2-0.3m")
    model: Any = source.model("float32")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    teacher = tmp_path / "teacher"
    model.save_pretrained(teacher)
    tokenizer = source.tokenizer()
    tokenizer.save_pretrained(teacher)
    for mode in ("alone", "add"):
        overrides = {TEACHER: teacher, "trainer_common.algorithm.distillation.mode": mode}
        code, experiment = train(tmp_path, "Indifferent", fresh=True, **overrides)
        assert code == 0
        steps = [step for step in read_metrics(experiment / "metrics.jsonl") if step["step"]]
        assert all(step["loss/teacher_kl"] != 0.0 and step["train/grad_norm"] > 0 for step in steps)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(teacher)
    with pytest.raises(UserError, match=r"distillation\.teacher.*another vocabulary"):
        train(tmp_path, "Indifferent", fresh=True, **{TEACHER: teacher})


def test_imitation_of_conversations(tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"it is {i}"}]}
        for i in range(4)
    ]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    overrides = {
        "trainer_common.algorithm.policy_loss": "sft",
        "trainer_common.algorithm.sft.demonstrations": file,
        "trainer_common.total_training_steps": 6,
        "trainer_common.test_freq": 0,
    }
    code, experiment = train(tmp_path, **overrides)
    assert code == 0
    losses = [step["train/loss"] for step in read_metrics(experiment / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.5


def test_imitation_of_the_best_of_its_own_episodes(tmp_path: Path) -> None:
    overrides = {
        "trainer_common.algorithm.policy_loss": "sft",
        "trainer_common.algorithm.sft.min_reward": 0.5,
        "trainer_common.test_freq": 0,
    }
    code, experiment = train(tmp_path, **overrides)
    assert code == 0
    steps = read_metrics(experiment / "metrics.jsonl")
    assert all(0 < step["train/imitated_episodes"] < 6 for step in steps)
    assert all(step["credit/episodes_trained"] == step["train/imitated_episodes"] for step in steps)
    assert all(step["credit/advantage/mean"] == 1.0 for step in steps)
    # then of what this run recorded
    again = tmp_path / "again"
    again.mkdir()
    overrides["trainer_common.algorithm.sft.demonstrations"] = experiment
    assert train(again, **overrides)[0] == 0
    # its token ids mean nothing to a model whose tokenizer counts otherwise
    other = shutil.copytree(ModelSource.resolve("tiny:qwen2-0.3m").path, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["Ċ"] = vocabulary["Ċ"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(TaskDataError, match=r"another vocabulary \(token 10 is '\\n' there and 'a' in ajet\.model"):
        train(again, fresh=True, **overrides, **{"model.path": other})


@pytest.mark.slow
def test_a_killed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    """SIGKILL in the middle, then the same command again: metrics and weights equal those of an undisturbed run."""
    results = []
    for name, kill in (("straight", False), ("killed", True)):
        folder = tmp_path / name
        folder.mkdir()
        yaml, _ = config_file(folder)
        arguments = ["--conf", str(yaml), "--exp-dir", str(folder / "runs"), "--quiet"]
        arguments.append("trainer_common.total_training_steps=8")
        experiment = folder / "runs" / "job"
        if kill:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen([sys.executable, "-m", "ajet", *arguments], env=environment)
            wait_until(lambda: len(stable(experiment)) >= 4 or process.poll() is not None, seconds=400)  # noqa: B023
            assert process.poll() is None
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert main(arguments) == 0
        results.append((stable(experiment), weights_hash(experiment)))
    assert results[0] == results[1]
