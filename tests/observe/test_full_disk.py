"""A disk that is full for a while costs records at most, never the run: on a small file system of its own."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from concurrent.futures import wait
from pathlib import Path

import pytest

from ajet.cli.main import main
from ajet.config import Config, make_config
from ajet.observe.episode_store import EpisodeFilter, EpisodeStore
from ajet.observe.episode_tables import EpisodeStoreError
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.export import ExportFormat, OtlpExporter, export_episodes
from ajet.observe.metrics import read_metrics, rewind_metrics
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.run_files import read_events
from ajet.schema.episode import CallTree, Episode, EpisodeStatus, Ledger
from ajet.trainer.checkpoint import CheckpointFolder


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return filler


def episode(name: str, note: str = "") -> Episode:
    return Episode(name, "t", EpisodeStatus.COMPLETED, CallTree(), Ledger(), reward=1.0, metadata={"note": note})


def test_metrics_events_and_log_go_on_when_there_is_room_again(
    small_disk: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config.model_validate({"ajet": {"experiment_name": "run"}})
    with ExperimentFolder.open(config, exp_dir=small_disk, backbone="local") as folder:
        folder.metrics.log(1, {"reward/mean": 0.5})
        filler = fill(small_disk)
        long = "x" * 5000
        for step in (2, 3):
            folder.metrics.log(step, {"reward/mean": 0.5, long: 1.0})
            folder.events.write("checkpoint", step=step, text=long)
            logging.getLogger("ajet.test").info("step %d %s", step, long)
        assert [record["step"] for record in read_metrics(folder.path / "metrics.jsonl")] == [1]
        assert "metrics.jsonl can't be written (No space left on device)" in caplog.text
        assert "Traceback" not in capsys.readouterr().err
        filler.unlink()
        folder.metrics.log(4, {"reward/mean": 1.0})
        folder.events.write("checkpoint", step=4)
        assert [record["step"] for record in read_metrics(folder.path / "metrics.jsonl")] == [1, 2, 3, 4]
        steps = [event["step"] for event in read_events(folder.path / "events.jsonl") if event["event"] == "checkpoint"]
        assert steps == [2, 3, 4]


def test_a_disk_that_stays_full_is_no_traceback(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config.model_validate({"ajet": {"experiment_name": "run"}})
    with ExperimentFolder.open(config, exp_dir=small_disk, backbone="local") as folder:
        folder.metrics.log(1, {"reward/mean": 0.5})
        fill(small_disk)
        for step in (2, 3):
            folder.metrics.log(step, {"reward/mean": 0.5, "x" * 5000: 1.0})
            logging.getLogger("ajet.test").info("step %d %s", step, "x" * 5000)
    said = capsys.readouterr().err
    assert said.count("run.log can't be written (No space left on device)") == 1 and "Traceback" not in said
    (small_disk / "filler").unlink()
    with ExperimentFolder.open(config, exp_dir=small_disk, backbone="local") as folder:
        assert folder.resumed


def test_weights_that_do_not_fit_are_said_so_and_leave_nothing(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "run" / "step_1" / "hf"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    (weights / "model.safetensors").write_bytes(bytes(3_000_000))
    (tmp_path / "run" / "hf").symlink_to("step_1/hf")
    assert main(["export", "weights", str(tmp_path / "run"), str(small_disk / "out")]) == 2
    said = f"error: {small_disk / 'out' / 'model.safetensors'}: No space left on device\n    make room, or choose"
    assert capsys.readouterr().err.startswith(said) and not (small_disk / "out").exists()


def test_a_command_says_that_a_disk_is_full(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(small_disk)
    assert main(["init", str(small_disk / "project")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "No space left on device\n    make room, or choose a place" in said


def test_the_checkpoint_before_stays_in_use(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    import torch
    from safetensors.torch import save_file

    def write(size: int) -> object:
        return lambda folder: save_file({"w": torch.zeros(size)}, folder / "model.safetensors")

    checkpoints = CheckpointFolder(small_disk / "checkpoints")
    assert checkpoints.save(1, {}, write(1000)) is not None  # type: ignore[arg-type]
    assert checkpoints.save(2, {}, write(1_000_000)) is None  # type: ignore[arg-type]
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 1 and "the run goes on" in caplog.text
    assert checkpoints.save(3, {}, write(1000)) is not None  # type: ignore[arg-type]
    assert sorted(path.name for path in (small_disk / "checkpoints").iterdir()) == ["step_1", "step_3"]


@pytest.mark.parametrize("torn", ['{"step": 2, "reward/me', '{"step": 2, "reward/me\n', "\0\0\0\0", "[1]\n"])
def test_a_torn_line_blocks_no_later_start(tmp_path: Path, torn: str) -> None:
    config = Config.model_validate({"ajet": {"experiment_name": "run"}})
    with ExperimentFolder.open(config, exp_dir=tmp_path, backbone="local") as folder:
        folder.metrics.log(1, {"a": 1.0})
    for name in ("metrics.jsonl", "events.jsonl"):
        with (folder.path / name).open("a") as file:
            file.write(torn)
    with ExperimentFolder.open(config, exp_dir=tmp_path, backbone="local") as folder:
        folder.metrics.log(2, {"a": 2.0})
        assert [record["step"] for record in read_metrics(folder.path / "metrics.jsonl")] == [1, 2]
        rewind_metrics(folder.path / "metrics.jsonl", 1)
        folder.metrics.log(2, {"a": 3.0})
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["a"] for line in lines] == [1.0, 3.0]
    assert [event["event"] for event in read_events(folder.path / "events.jsonl")][-2:] == ["resumed", "ended"]


def test_a_run_that_begins_again_drops_its_trajectories(tmp_path: Path) -> None:
    config = Config.model_validate({"ajet": {"experiment_name": "run"}})
    with ExperimentFolder.open(config, exp_dir=tmp_path, backbone="local") as folder:
        assert not folder.resumed
        for step in (0, 1, 2):
            (folder.path / "trajectories" / f"step_{step}").mkdir(parents=True)
            folder.metrics.log(step, {"a": 1.0})
    with ExperimentFolder.open(config, exp_dir=tmp_path, backbone="local") as folder:
        assert folder.resumed
        folder.rewind(1)
        assert sorted(os.listdir(folder.path / "trajectories")) == ["step_0", "step_1"]
        folder.rewind(-1)
        assert os.listdir(folder.path / "trajectories") == [] and read_metrics(folder.path / "metrics.jsonl") == []


@pytest.mark.parametrize("pages", range(0, 50, 3))
def test_a_recorder_that_opens_on_a_nearly_full_disk_answers(small_disk: Path, pages: int) -> None:
    """Whatever there is room for: the file, its journal, or the first episode."""
    filler = fill(small_disk)
    os.truncate(filler, filler.stat().st_size - 4096 * pages)
    try:
        recorder = EpisodeRecorder(small_disk / "episodes.sqlite")
    except EpisodeStoreError as error:
        assert "episodes.sqlite can't be written to: " in str(error)
        return
    done = [recorder.record(episode(str(number), "x" * 5000), 1) for number in range(20)]
    wait(done, timeout=20)
    assert all(each.done() for each in done)
    recorder.flush()
    recorder.close()


def test_episodes_wait_for_room(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = EpisodeRecorder(small_disk / "episodes.sqlite")
    assert recorder.record(episode("first"), 1).result()
    filler = fill(small_disk)
    late = [recorder.record(episode(name, "x" * 50_000), 1) for name in ("second", "third")]
    assert all(isinstance(each.exception(), sqlite3.Error) for each in late), "not acknowledged"
    assert not recorder.flush()
    filler.unlink()
    assert recorder.record(episode("fourth"), 1).result() and recorder.flush()
    recorder.close()
    store = EpisodeStore(small_disk / "episodes.sqlite")
    assert sorted(store.ids()) == ["first", "fourth", "second", "third"]
    store.close()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "episodes.sqlite can't be written" in said[0]


def test_an_episode_whose_json_file_has_no_room_waits_as_well(small_disk: Path) -> None:
    recorder = EpisodeRecorder(
        small_disk / "episodes.sqlite", make_config({"trainer_common.save_trajectory_as_json_file": True}).ajet
    )
    assert recorder.record(episode("first"), 1).result()
    filler = fill(small_disk)
    assert recorder.record(episode("second", "x" * 50_000), 1).exception() is not None
    assert os.listdir(small_disk / "trajectories" / "step_1") == ["first.json"]
    filler.unlink()
    assert recorder.record(episode("third"), 1).result()
    recorder.close()
    assert EpisodeStore(small_disk / "episodes.sqlite").ids() == ["first", "second", "third"]
    assert len(os.listdir(small_disk / "trajectories" / "step_1")) == 3


def test_an_export_that_has_no_room_leaves_nothing(small_disk: Path, tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path / "episodes.sqlite")
    recorder.record(episode("first", "x" * 3_000_000), 1)
    recorder.close()
    store = EpisodeStore(tmp_path / "episodes.sqlite")
    with pytest.raises(OSError, match="No space left"):
        export_episodes(store, EpisodeFilter(), ExportFormat.JSONL, small_disk / "out.jsonl")
    assert os.listdir(small_disk) == []


def test_what_had_no_room_in_memory_either_is_said(
    small_disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ajet.observe.recorder.MOST_WAITING", 2)
    recorder = EpisodeRecorder(small_disk / "episodes.sqlite")
    filler = fill(small_disk)
    for number in range(5):
        assert recorder.record(episode(str(number), "x" * 50_000), 1).exception() is not None
    filler.unlink()
    assert recorder.record(episode("last"), 1).result()
    recorder.close()
    store = EpisodeStore(small_disk / "episodes.sqlite")
    assert store.ids() == ["0", "1", "last"]
    store.close()
    assert "episodes.sqlite lacks 3 episodes" in caplog.text


def test_what_waits_for_room_is_sent_to_a_collector_once(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr(OtlpExporter, "export", lambda _, episode, *_args, **_named: sent.append(episode.episode_id))
    settings = make_config({"observe.otlp_endpoint": "http://127.0.0.1:9"}).ajet
    recorder = EpisodeRecorder(small_disk / "episodes.sqlite", settings)
    filler = fill(small_disk)
    for name in ("first", "second"):
        assert recorder.record(episode(name, "x" * 50_000), 1).exception() is not None
    filler.unlink()
    assert recorder.flush()
    recorder.close()
    assert sent == ["first", "second"]


FILLING = """
from ajet import Workflow, WorkflowOutput

class Fill(Workflow):
    async def execute(self, workflow_task, tuner):
        client = tuner.as_raw_openai_sdk_client()
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 50_000}])
        with open("DISK/filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError:
                return WorkflowOutput(reward=1.0)
"""
FILLED = """
ajet:
  experiment_name: filled
  model: {path: "tiny:qwen2-0.3m"}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {training: {file_path: tasks.jsonl}, validation: {file_path: tasks.jsonl}}
  rollout: {user_workflow: fill.py->Fill, engine: scripted, scripted_replies: replies.yaml, max_model_len: 90000}
  data: {max_prompt_length: 70000}
"""


@pytest.mark.parametrize(
    "command", [("--conf", "run.yaml", "--backbone=debug", "--exp-dir"), ("eval", "run.yaml", "--out")]
)
def test_episodes_that_are_lost_are_no_success(
    small_disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    command: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AJET_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "fill.py").write_text(FILLING.replace("DISK", str(small_disk)))
    (tmp_path / "run.yaml").write_text(FILLED)
    (tmp_path / "replies.yaml").write_text("[hello]")
    (tmp_path / "tasks.jsonl").write_text('{"query": "hello"}\n')
    assert main([*command, str(small_disk / "runs")]) == 1
    assert "episodes.sqlite lacks 1 episodes" in caplog.text


@pytest.mark.slow
def test_a_run_goes_on_and_says_what_is_not_saved(small_disk: Path, tmp_path: Path) -> None:
    for name in ("say_vowels.yaml", "say_vowels.jsonl", "say_vowels.py"):
        shutil.copy(Path("tests/support", name), tmp_path)
    (small_disk / "filler").write_bytes(b"x" * (2 * 1024 - 400) * 1024)
    command = [
        sys.executable,
        "-m",
        "ajet",
        "--conf",
        "say_vowels.yaml",
        "--exp-dir",
        f"{small_disk}/runs",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "trainer_common.save_freq=1"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "step 3/3" in said and "Traceback" not in said, said
    assert "warning: the checkpoint of step 1 could not be written to" in said
    assert "the weights of step 3 are lost" in said and "there is no checkpoint. Make room" in said


def test_a_killed_run_that_resumes_on_a_full_disk_hears_of_the_disk(small_disk: Path, tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path / "e.sqlite")
    recorder.record(episode("e"), 1).result()
    for name in ("e.sqlite", "e.sqlite-wal"):
        shutil.copy(tmp_path / name, small_disk)
    recorder.close()
    filler = fill(small_disk)
    for opened in (EpisodeRecorder, EpisodeStore):
        with pytest.raises(EpisodeStoreError, match="its disk is full: make room there"):
            opened(small_disk / "e.sqlite")
    filler.unlink()
    assert EpisodeStore(small_disk / "e.sqlite").ids() == ["e"]
