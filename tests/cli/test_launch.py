"""From the command line to a backbone: which one and why, its folder, its exit code, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.screen import Terminal
from support.waiting import wait_until

BACKBONE = """
import os, subprocess, sys, time
from pathlib import Path
from ajet.schema.errors import EngineError

def run(config, experiment, options):
    mine = config.mine
    print("RAN", config.ajet.backbone, experiment.path.name, options.ray_cluster, flush=True)
    if mine.get("child"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        Path(mine.child).write_text(str(child.pid))
    if mine.get("sleep"):
        time.sleep(mine.sleep)
    if mine.get("bug"):
        raise ZeroDivisionError("nobody foresaw this")
    if mine.get("fail"):
        raise EngineError("the engine died")
    return mine.get("code", 0)
"""
CONFIG = """
ajet:
  experiment_name: one
  rollout: {user_workflow: flow.py->Flow}
  task_reader: {type: random_dummy}
mine: {}
"""
FLOW = """
from ajet import Workflow

class Flow(Workflow):
    async def execute(self, workflow_task, tuner): ...
"""
RUN = """
import sys
from ajet.cli.main import main
from ajet.config.kinds import BACKBONES
BACKBONES["debug"] = BACKBONES["local"] = "own_backbone->run"
raise SystemExit(main(sys.argv[1:]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AJET_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "own_backbone.py").write_text(BACKBONE)
    (tmp_path / "flow.py").write_text(FLOW)
    (tmp_path / "one.yaml").write_text(CONFIG)
    return tmp_path


def ajet(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, check=False)


def start(*arguments: str) -> subprocess.Popen[str]:
    def heed_hangup() -> None:  # also where the tests run under nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments], stdout=subprocess.PIPE, text=True, preexec_fn=heed_hangup
    )


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_the_first_line_says_which_backbone_and_why(folder: Path) -> None:
    default = ajet("--conf", "one.yaml")
    first, second = default.stdout.splitlines()[:2]
    assert first == "backbone: local (the default; --backbone takes local, debug, verl, trinity, prompt)"
    assert second == "RAN local one False"
    assert ajet("--conf", "one.yaml", "--backbone=debug").stdout.startswith("backbone: debug (from --backbone)")
    from_yaml = ajet("--conf", "one.yaml", "ajet.backbone=debug", "--with-ray-cluster")
    assert from_yaml.stdout.startswith("backbone: debug (from ajet.backbone in the config)\nRAN debug one-debug True")
    assert ajet("--conf", "one.yaml", "--json").stdout.startswith("RAN")


@pytest.mark.slow
def test_the_folder_holds_config_and_code_and_how_it_ended(folder: Path) -> None:
    assert ajet("--conf", "one.yaml", "--exp-dir", "runs", "rollout.num_repeat=7").returncode == 0
    run = folder / "runs" / "one"
    assert "num_repeat: 7" in (run / "config.resolved.yaml").read_text()
    assert (run / "config.yaml").read_text() == CONFIG
    assert list((run / "code").rglob("flow.py"))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert events[-1]["status"] == "completed"
    assert not list((folder / "state").glob("*.json"))


@pytest.mark.slow
def test_exit_codes(folder: Path) -> None:
    assert ajet("--conf", "one.yaml", "mine.code=3").returncode == 3
    failed = ajet("--conf", "one.yaml", "mine.fail=true")
    assert (failed.returncode, failed.stderr.strip().splitlines()[-1]) == (1, "error: the engine died")
    bug = ajet("--conf", "one.yaml", "mine.bug=true")
    assert bug.returncode == 1
    assert "error: ZeroDivisionError: nobody foresaw this" in bug.stderr and "Traceback" not in bug.stderr
    assert "Traceback" in (folder / "saved_experiments" / "one" / "run.log").read_text()
    events = (folder / "saved_experiments" / "one" / "events.jsonl").read_text()
    assert '"status":"failed"' in events.replace(": ", ":")


@pytest.mark.slow
@pytest.mark.parametrize("errors", ["", " 2>&1"])
def test_a_full_disk_below_the_output_ends_no_run(folder: Path, errors: str) -> None:
    (folder / "program.py").write_text(RUN.replace("main(sys.argv[1:])", "main()"))
    line = f'exec "{sys.executable}" program.py --conf one.yaml mine.code=7 >/dev/full{errors}'
    ran = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    said = "" if errors else "warning: what was printed is incomplete: No space left on device\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "", said)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_cleanly(folder: Path, number: signal.Signals) -> None:
    process = start("--conf", "one.yaml", "mine.sleep=60")
    assert process.stdout is not None
    wait_until(lambda: "RAN" in process.stdout.readline())  # type: ignore[union-attr]
    process.send_signal(number)
    assert process.wait(10) == 130
    last = (folder / "saved_experiments" / "one" / "events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["status"] == "interrupted"


@pytest.mark.slow
def test_a_terminal_that_is_closed_interrupts_the_run(folder: Path) -> None:
    with Terminal([sys.executable, "-c", RUN, "--conf", "one.yaml", "mine.sleep=60"], cwd=folder) as terminal:
        terminal.wait_for("RAN")
        terminal.hang_up()
        assert terminal.process.wait(10) == 130
    last = (folder / "saved_experiments" / "one" / "events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["status"] == "interrupted"


@pytest.mark.slow
def test_a_run_under_nohup_outlives_its_terminal(folder: Path) -> None:
    with Terminal(
        ["nohup", sys.executable, "-c", RUN, "--conf", "one.yaml", "mine.sleep=3", "mine.code=7"], cwd=folder
    ) as terminal:
        wait_until(lambda: (folder / "nohup.out").exists() and "RAN" in (folder / "nohup.out").read_text())
        terminal.hang_up()
        assert terminal.process.wait(20) == 7


@pytest.mark.slow
def test_kill_ends_a_run_and_its_children_and_nothing_else(folder: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    child_file = folder / "child"
    process = start("--conf", "one.yaml", "mine.sleep=60", f"mine.child={child_file}")
    try:
        wait_until(lambda: child_file.exists() and child_file.read_text() != "")
        child = int(child_file.read_text())
        assert "nothing that ajet started" in ajet("--kill", "--prefix", "other").stderr
        assert is_alive(child)
        assert "ended run" in ajet("--kill").stderr
        assert process.wait(10) == 130
        wait_until(lambda: not is_alive(child))
        assert bystander.poll() is None
        assert "nothing that ajet started" in ajet("--kill").stderr
    finally:
        bystander.kill()
        process.kill()


def test_a_process_id_that_was_given_away_is_not_touched(folder: Path) -> None:
    process = start("--conf", "one.yaml", "mine.sleep=60")
    wait_until(lambda: bool(list((folder / "state").glob("*.json"))))
    process.kill()
    process.wait()
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        (record,) = (folder / "state").glob("*.json")
        record.write_text(json.dumps(json.loads(record.read_text()) | {"pid": bystander.pid}))
        assert "nothing that ajet started" in ajet("--kill").stderr
        assert bystander.poll() is None
        assert not record.exists()
    finally:
        bystander.kill()


@pytest.mark.slow
def test_a_service_runs_beside_the_run_and_ends_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = folder / "service"
    service.mkdir()
    (service / "serve.sh").write_text("echo up > up\nsleep 600 & echo $! > pid\nwait\n")
    monkeypatch.setenv("MY_WORLD_PATH", str(service))
    monkeypatch.setenv("MY_WORLD_SCRIPT", "bash serve.sh")
    ran = ajet("--conf", "one.yaml", "--with-my-world", "--prefix", "p-", "mine.sleep=0.5")
    assert ran.returncode == 0, ran.stderr
    assert "started p-my-world (pid " in ran.stderr
    assert (service / "up").exists()
    wait_until(lambda: not is_alive(int((service / "pid").read_text())))


@pytest.mark.slow
def test_the_viewer_beside_the_run(folder: Path) -> None:
    ran = ajet("--conf", "one.yaml", "--with-logview")
    assert ran.returncode == 0, ran.stderr
    assert "viewer: http://127.0.0.1:" in ran.stdout
    ran = ajet("--conf", "one.yaml", "--fresh", "--with-logview", "--json")
    assert "viewer: http://127.0.0.1:" in ran.stderr
    assert ran.stdout.splitlines() == ["RAN local one False"], "nothing stands among the lines of JSON"
    assert "nothing that ajet started" in ajet("--kill").stderr


@pytest.mark.slow
def test_a_service_that_can_not_start_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ajet("--conf", "one.yaml", "--with-bfcl")
    assert missing.returncode == 2
    assert "the environment variable BFCL_PATH is not set" in missing.stderr
    monkeypatch.setenv("BFCL_PATH", str(folder))
    monkeypatch.setenv("BFCL_SCRIPT", "echo no such port >&2; exit 4")
    broken = ajet("--conf", "one.yaml", "--with-bfcl")
    assert broken.returncode == 2
    assert "bfcl ended immediately with exit code 4\n    no such port" in broken.stderr
