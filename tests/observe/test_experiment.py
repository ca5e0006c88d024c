"""The experiment folder: what it holds, who may have it open, and that it holds no secrets."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ajet.config import Config
from ajet.observe.episode_tables import open_for_writing
from ajet.observe.experiment import ExperimentBusyError, ExperimentFolder, ExperimentPlaceError, is_running
from ajet.observe.metrics import read_metrics
from ajet.observe.run_files import read_events
from ajet.schema.errors import ImportPathError

CANARY = "canary-3f9a1c77d2"


def config(**blocks: object) -> Config:
    return Config.model_validate({"ajet": {"experiment_name": "run"}, **blocks})


def test_folder_holds_config_code_metrics_events_and_log(tmp_path: Path) -> None:
    source = tmp_path / "project" / "run.yaml"
    source.parent.mkdir()
    source.write_text("ajet:\n  experiment_name: run  # my first\n")
    workflow = source.parent / "workflow.py"
    workflow.write_text("print('hello')\n")
    with ExperimentFolder.open(config(), exp_dir=tmp_path / "exps", source_yaml=source, backbone="local") as folder:
        folder.save_code([workflow])
        folder.metrics.log(1, {"reward/mean": 0.5, "bad": float("nan")})
        logging.getLogger("ajet.test").info("trained")
    assert folder.path == tmp_path / "exps" / "run"
    assert "# my first" in (folder.path / "config.yaml").read_text()
    assert yaml.safe_load((folder.path / "config.resolved.yaml").read_text())["ajet"]["rollout"]["num_repeat"] == 4
    assert (folder.path / "code" / "project" / "workflow.py").read_text() == "print('hello')\n"
    [step] = read_metrics(folder.path / "metrics.jsonl")
    assert step["step"] == 1 and step["reward/mean"] == 0.5 and step["bad"] == "nan"
    assert [event["event"] for event in read_events(folder.path / "events.jsonl")] == ["started", "ended"]
    records = [json.loads(line) for line in (folder.path / "run.log").read_text().splitlines()]
    assert {"message": "trained", "level": "info"}.items() <= records[-1].items()


def test_a_neighbour_that_may_not_be_read_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workflow = tmp_path / "project" / "workflow.py"
    workflow.parent.mkdir()
    for name in ("workflow.py", "helper.py", "private.txt"):
        (workflow.parent / name).write_text("x = 1\n")
    may = os.access  # to root, no file is closed
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "private.txt" and may(path, mode))
    with ExperimentFolder.open(config(), exp_dir=tmp_path / "exps") as folder:
        folder.save_code([workflow])
    assert sorted(os.listdir(folder.path / "code" / "project")) == ["helper.py", "workflow.py"]


def test_same_command_resumes_and_names_what_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ExperimentFolder.open(config(), exp_dir=tmp_path) as folder:
        for step in (1, 2, 3):
            folder.metrics.log(step, {"reward/mean": float(step)})
    changed = config()
    changed.ajet.rollout.num_repeat = 8
    changed.ajet.trainer_common.optim.lr = 0.5
    with ExperimentFolder.open(changed, exp_dir=tmp_path) as folder:
        folder.rewind(2)
        folder.metrics.log(3, {"reward/mean": 30.0})
    events = read_events(folder.path / "events.jsonl")
    assert [event["event"] for event in events] == ["started", "ended", "resumed", "rewound", "ended"]
    assert events[2]["changed"] == {"ajet.rollout.num_repeat": [4, 8], "ajet.trainer_common.optim.lr": [None, 0.5]}
    told = {record.levelname: record.getMessage() for record in caplog.records}
    assert told["WARNING"].endswith("ajet.trainer_common.optim.lr has changed: None → 0.5")
    assert told["INFO"].endswith("ajet.rollout.num_repeat has changed: 4 → 8")
    assert [step["reward/mean"] for step in read_metrics(folder.path / "metrics.jsonl")] == [1.0, 2.0, 30.0]


def test_a_key_that_an_older_version_did_not_have_is_no_change(tmp_path: Path) -> None:
    with ExperimentFolder.open(config(), exp_dir=tmp_path) as folder:
        folder.metrics.log(1, {"reward/mean": 1.0})
    resolved = folder.path / "config.resolved.yaml"
    lines = resolved.read_text().splitlines()
    older = [line for line in lines if not line.strip().startswith(("episode_retries:", "episode_timeout:"))]
    assert len(older) == len(lines) - 2
    resolved.write_text("\n".join(older))
    changed = config()
    changed.ajet.rollout.episode_timeout = 7.0
    with ExperimentFolder.open(changed, exp_dir=tmp_path) as folder:
        pass
    resumed = [event for event in read_events(folder.path / "events.jsonl") if event["event"] == "resumed"][-1]
    assert resumed["changed"] == {"ajet.rollout.episode_timeout": [1200.0, 7.0]}


def test_another_judge_than_before_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    exact, both = "MathAnswerAsJudge (exact rules alone)", "MathAnswerAsJudge (exact rules, then math-verify 0.9.0)"
    for judge in (exact, exact, both):
        caplog.clear()
        with ExperimentFolder.open(config(), exp_dir=tmp_path, judge=judge) as folder:
            assert json.loads((folder.path / "environment.json").read_text())["judge"] == judge
            folder.metrics.log(1, {"reward/mean": 1.0})
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told.endswith(f"judge has changed: {exact} → {both}")
    resumed = read_events(folder.path / "events.jsonl")[-2]
    assert resumed["changed"] == {"judge": [exact, both]}
    (folder.path / "environment.json").write_text("{")
    with ExperimentFolder.open(config(), exp_dir=tmp_path, judge=both):
        assert "environment.json is damaged" in caplog.text


def test_fresh_keeps_the_former_run_aside(tmp_path: Path) -> None:
    with ExperimentFolder.open(config(), exp_dir=tmp_path) as folder:
        folder.metrics.log(1, {"reward/mean": 1.0})
    with ExperimentFolder.open(config(), exp_dir=tmp_path, fresh=True) as folder:
        assert read_metrics(folder.path / "metrics.jsonl") == []
    former = [path for path in tmp_path.iterdir() if path != folder.path]
    assert len(former) == 1 and len(read_metrics(former[0] / "metrics.jsonl")) == 1


def test_in_a_folder_of_a_group_everybody_may_go_on_with_the_run(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with ExperimentFolder.open(config(), exp_dir=tmp_path) as folder:
            folder.metrics.log(1, {"reward/mean": 1.0})
            connection = open_for_writing(folder.episodes)
            modes = {file.name: file.stat().st_mode & 0o060 for file in folder.path.iterdir()}
            connection.close()
    finally:
        os.umask(before)
    assert {".running", "episodes.sqlite", "episodes.sqlite-wal"} <= set(modes)
    assert set(modes.values()) == {0o060}, modes


def test_checkpoints_elsewhere_are_those_of_their_run(tmp_path: Path) -> None:
    """A link leads to them: the same run goes on there, and `--fresh` begins beside them. A folder that is gone is made
    again, unless the run had results: it would drop them."""
    base = tmp_path / "large disk"

    def opened(*, fresh: bool = False) -> Path:
        with ExperimentFolder.open(config(), exp_dir=tmp_path / "runs", fresh=fresh) as folder:
            folder.keep_checkpoints_in(str(base))
            return folder.checkpoints.resolve()

    first = opened()
    assert first == base / "run"
    (first / "step_1").mkdir()
    assert opened() == first
    second = opened(fresh=True)
    assert second.parent == base and second != first and not list(second.iterdir())
    aside = next(each for each in (tmp_path / "runs").iterdir() if each.name != "run")
    assert (aside / "checkpoints" / "step_1").is_dir()
    second.rmdir()
    assert opened() == second and second.is_dir()
    (second / "step_1").mkdir()
    with ExperimentFolder.open(config(), exp_dir=tmp_path / "runs") as folder:
        folder.metrics.log(1, {"reward/mean": 1.0})
    base.rename(tmp_path / "not mounted")
    with pytest.raises(ExperimentPlaceError, match="isn't there: mount its disk, or delete the link to begin again"):
        opened()
    assert read_metrics(folder.path / "metrics.jsonl") and not base.exists()
    (tmp_path / "not mounted").rename(base)
    assert opened() == second
    with ExperimentFolder.open(config(), exp_dir=tmp_path / "other runs") as folder:  # of the same name
        folder.keep_checkpoints_in(str(base))
        assert folder.checkpoints.resolve() not in (first, second)


def test_a_copied_run_does_not_write_to_the_checkpoints_of_the_first(tmp_path: Path) -> None:
    base, runs = tmp_path / "large disk", tmp_path / "runs"

    def opened(name: str) -> Path:
        named = Config.model_validate({"ajet": {"experiment_name": name}})
        with ExperimentFolder.open(named, exp_dir=runs) as folder:
            folder.keep_checkpoints_in(str(base))
            return folder.checkpoints.resolve()

    first = opened("qwen2.5")
    (first / "step_1").mkdir()
    shutil.copytree(runs / "qwen2.5", runs / "qwen2.5-copy", symlinks=True)
    with pytest.raises(
        ExperimentPlaceError, match=r"copy/checkpoints leads to the checkpoints of .*/qwen2.5, of which"
    ):
        opened("qwen2.5-copy")
    assert opened("qwen2.5") == first
    link = runs / "qwen2.5-copy" / "checkpoints"
    link.unlink()
    shutil.copytree(first, link)  # as the message says
    assert opened("qwen2.5-copy") == link
    (runs / "qwen2.5").rename(runs / "renamed")
    assert opened("renamed") == first


def test_a_place_for_checkpoints_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        ExperimentFolder.open(config(), exp_dir=tmp_path / "runs") as folder,
        pytest.raises(ExperimentPlaceError, match=r"checkpoint_base_dir: .*Not a directory"),
    ):
        folder.keep_checkpoints_in(str(tmp_path / "file"))


def test_debug_runs_have_their_own_folder(tmp_path: Path) -> None:
    for _ in range(2):
        with ExperimentFolder.open(config(), exp_dir=tmp_path, backbone="debug") as folder:
            folder.metrics.log(0, {"reward/mean": 1.0})
    assert folder.path.name == "run-debug"
    assert len(read_metrics(folder.path / "metrics.jsonl")) == 1


def test_no_secret_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_API_KEY", CANARY + "-env")
    source = tmp_path / "run.yaml"
    source.write_text(f"judge_service:\n  api_key: {CANARY}-yaml\n  url: https://me:{CANARY}-url@host/\n")
    secret = config(judge_service={"api_key": f"{CANARY}-yaml", "nested": [{"password": f"{CANARY}-nested"}]})
    workflow = tmp_path / "flow" / "workflow.py"
    workflow.parent.mkdir()
    workflow.write_text(f"KEY = '{CANARY}-yaml'\n")
    with ExperimentFolder.open(secret, exp_dir=tmp_path / "exps", source_yaml=source) as folder:
        folder.save_code([workflow])
        folder.events.write("note", text=f"{CANARY}-env and {CANARY}-nested")
        logging.getLogger("ajet.test").error("failed with %s, not %s-env", f"{CANARY}-yaml", CANARY)
    for file in folder.path.rglob("*"):
        if file.is_file():
            assert CANARY not in file.read_text(), file
    assert "max_prompt_length: 3000" in (folder.path / "config.resolved.yaml").read_text()


def test_one_process_at_a_time_and_a_kill_lets_go(tmp_path: Path) -> None:
    program = (
        "import sys, os, time; from pathlib import Path; from ajet.config import Config\n"
        "from ajet.observe.experiment import ExperimentFolder\n"
        "folder = ExperimentFolder.open(Config.model_validate({'ajet': {'experiment_name': 'run'}}), "
        "exp_dir=sys.argv[1])\n"
        "pid = os.fork()\n"
        "if pid == 0: time.sleep(60); os._exit(0)\n"
        "print(pid, flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        assert is_running(tmp_path / "run")
        with pytest.raises(ExperimentBusyError, match="another process is running"):
            ExperimentFolder.open(config(), exp_dir=tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not is_running(tmp_path / "run"), "a forked child must not hold the folder"
        ExperimentFolder.open(config(), exp_dir=tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)


def _content(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name not in ("run.log", ".running"))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.parametrize("fresh", [False, True])
def test_a_refused_start_leaves_a_finished_run_as_it_was(tmp_path: Path, fresh: bool) -> None:
    workflow = tmp_path / "project" / "workflow.py"
    workflow.parent.mkdir()
    workflow.write_text("first = 1\n")
    with ExperimentFolder.open(config(), exp_dir=tmp_path / "exps", backbone="local") as folder:
        folder.save_code([workflow])
        folder.metrics.log(1, {"reward/mean": 1.0})
    before = _content(folder.path)
    changed = config()
    changed.ajet.rollout.num_repeat = 8
    workflow.write_text("second = 2\n")
    (workflow.parent / "other.py").write_text("third = 3\n")
    refused = ExperimentFolder.open(changed, exp_dir=tmp_path / "exps", backbone="verl", fresh=fresh)
    refused.save_code([workflow])
    refused.withdraw()
    refused.close("failed", error="verl is not installed")
    assert _content(folder.path) == before
    assert [path.name for path in (tmp_path / "exps").iterdir()] == ["run"]


def test_what_a_run_has_recorded_stays_even_if_it_is_refused_later(tmp_path: Path) -> None:
    with ExperimentFolder.open(config(), exp_dir=tmp_path) as folder:
        folder.metrics.log(1, {"reward/mean": 1.0})
    refused = ExperimentFolder.open(config(), exp_dir=tmp_path)
    refused.metrics.log(2, {"reward/mean": 2.0})
    refused.withdraw()
    refused.close("failed")
    assert [event["event"] for event in read_events(folder.path / "events.jsonl")][-1] == "ended"
    assert len(read_metrics(folder.path / "metrics.jsonl")) == 2


@pytest.mark.parametrize("fresh", [False, True])
def test_a_start_that_fails_leaves_the_folder_free_and_as_it_was(tmp_path: Path, fresh: bool) -> None:
    with ExperimentFolder.open(config(), exp_dir=tmp_path, backbone="local") as folder:
        folder.metrics.log(1, {"reward/mean": 1.0})
    before = _content(folder.path)
    wrong = config()
    wrong.ajet.trainer_common.logger = [f"{tmp_path}/nothing.py->Sink"]
    for _ in range(2):
        with pytest.raises(ImportPathError, match=r"trainer_common\.logger"):
            ExperimentFolder.open(wrong, exp_dir=tmp_path, backbone="local", fresh=fresh)
        assert _content(folder.path) == before and not is_running(folder.path)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    ExperimentFolder.open(config(), exp_dir=tmp_path, backbone="local").close()


@pytest.mark.parametrize("kept", [2, 6_000])
def test_a_config_that_was_cut_off_ends_no_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: int) -> None:
    with ExperimentFolder.open(config(), exp_dir=tmp_path) as folder:
        folder.metrics.log(1, {"reward/mean": 1.0})
    file = folder.path / "config.resolved.yaml"
    whole = file.read_text()
    cut = next(size for size in range(kept, len(whole)) if not _is_mapping(whole[:size]))
    file.write_text(whole[:cut])
    with ExperimentFolder.open(config(), exp_dir=tmp_path) as folder:
        assert folder.has_results
    assert "config.resolved.yaml is damaged" in caplog.text and file.read_text() == whole


def _is_mapping(text: str) -> bool:
    try:
        return isinstance(yaml.safe_load(text), dict)
    except yaml.YAMLError:
        return False
