"""Whole runs on the CPU, as a user starts them, and what they leave behind."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.ports import free_port

if TYPE_CHECKING:
    from ajet.schema.episode import Episode

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONF = HERE / "say_vowels.yaml"
DEADLINE_S = 1200.0
OURS = ("AJET_TEST_OF", uuid.uuid4().hex)
"""A variable that every process of these tests' runs inherits, and no other run's."""


def installed(package: str) -> bool:
    """Asked of the installed packages: a folder of tests named like the module would pass for it."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def enter_trinity_on_cpu() -> None:
    """Before Trinity is imported: as the launcher does on a machine without a GPU."""
    from ajet.backbone.ray.start import PLATFORM
    from ajet.backbone.ray.trinity import install

    os.environ[PLATFORM] = "cpu"
    install()


def command(backbone: str, folder: Path, *overrides: str, conf: Path = CONF) -> list[str]:
    start = [sys.executable, "-m", "ajet", "--conf", str(conf), f"--backbone={backbone}"]
    return [*start, "--exp-dir", str(folder), *overrides]


def environment() -> dict[str, str]:
    own = {"AJET_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # Ray's workers yield to every other program (nice 15 more), so beside other work these runs would hardly go on
    return {**os.environ, **own, "RAY_worker_niceness": "0", OURS[0]: OURS[1]}


def run(
    backbone: str,
    folder: Path,
    *overrides: str,
    conf: Path = CONF,
    cwd: Path = HERE,
    code: int = 0,
    may_learn_nothing: bool = False,
) -> str:
    """Run to the end, and return the output. `may_learn_nothing`: so may a random model whose rewards are all the same,
    which exit code 1 stands for."""
    done = subprocess.run(
        command(backbone, folder, *overrides, conf=conf),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    said = done.stdout[-2000:] + done.stderr[-4000:]
    learnt_nothing = may_learn_nothing and done.returncode == 1 and "nothing was trained" in said
    assert done.returncode == code or learnt_nothing, said
    return done.stdout + done.stderr


def start(backbone: str, folder: Path, *overrides: str, **variables: str) -> subprocess.Popen[str]:
    """Start a run; its output and its errors come as one."""
    return subprocess.Popen(
        command(backbone, folder, *overrides),
        cwd=HERE,
        env=environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_after(steps: int, backbone: str, folder: Path, *overrides: str) -> None:
    """Start a run, kill it once it has reported so many steps, and wait until nothing of it is left."""
    child = start(backbone, folder, *overrides)
    try:
        wait_until(lambda: child.poll() is not None or len(steps_of(folder / "say_vowels")) >= steps)
    finally:
        child.kill()
        child.wait()
    wait_until(lambda: left_behind() == {})


def steps_of(experiment: Path) -> list[dict[str, Any]]:
    from ajet.observe.metrics import read_metrics

    return read_metrics(experiment / "metrics.jsonl")


def recorded(experiment: Path) -> dict[int, int]:
    """Episodes in the recording, by step."""
    with sqlite3.connect(experiment / "episodes.sqlite") as connection:
        return dict(connection.execute("SELECT step, COUNT(*) FROM episode GROUP BY step"))


def run_with_environment(backbone: str, folder: Path) -> None:
    """Two steps whose episodes act in an environment: each is opened, recorded step by step, and closed."""
    from ajet.observe.episode_store import EpisodeStore

    log = folder / "world.log"
    run(
        backbone,
        folder,
        "ajet.rollout.user_workflow=vowel_world.py->SpeaksToTheWorld",
        "ajet.rollout.environment.class=vowel_world.py->VowelWorld",
        f"ajet.rollout.environment.options.log={log}",
        *TWO_STEPS,
    )
    experiment = folder / "say_vowels"
    steps = steps_of(experiment)
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["train/grad_norm"] > 0 for step in steps)
    store = EpisodeStore(experiment / "episodes.sqlite")
    episodes = [one.episode for one in store.all()]
    store.close()
    assert len(episodes) == 2 * 16
    for episode in episodes:
        assert episode.environment is not None
        events = episode.environment.events
        assert [event.what for event in events] == ["reset", "step", "step", "close"]
        assert episode.reward == pytest.approx(sum(event.reward or 0.0 for event in events) / 2)
    lines = log.read_text().splitlines()
    assert lines.count("close") == sum(line.startswith("reset") for line in lines) >= len(episodes)


def run_with_remote_runners(backbone: str, folder: Path) -> None:
    """Two steps whose episodes are run by two `ajet runner` processes, one of which is killed at once and replaced."""
    port = free_port()
    key = "sk-ajet-" + "k" * 40
    keys = {"AJET_RUNNER_KEY": key}
    runner = [
        sys.executable,
        "-m",
        "ajet",
        "runner",
        "--workflow",
        "say_vowels.py->SayVowels",
        "--workers",
        "2",
        "--patience",
        "1h",
    ]
    connect = [*runner, "--connect", f"http://127.0.0.1:{port}"]
    log = folder / "output.log"
    with log.open("wb") as output:
        # the runners' machine is not that of the tests' run: their processes are ended here
        others = {name: value for name, value in environment().items() if name != OURS[0]}
        started = [subprocess.Popen(connect, cwd=HERE, env=others | keys) for _ in range(2)]
        trainer = subprocess.Popen(
            command(
                backbone,
                folder,
                "ajet.task_runner.wrapper_type=remote",
                f"ajet.task_runner.remote.port={port}",
                "ajet.task_runner.remote.lease=5",
                "ajet.rollout.user_workflow=null",
                *TWO_STEPS,
            ),
            cwd=HERE,
            env=environment() | keys,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            experiment = folder / "say_vowels"
            wait_until(lambda: trainer.poll() is not None or bool(recorded_steps(experiment)), DEADLINE_S)
            started[0].kill()
            assert trainer.wait(DEADLINE_S) == 0, log.read_text()[-4000:]
        finally:
            for program in [*started, trainer]:
                program.kill()
                program.wait()
    said = log.read_text()
    assert f"ajet runner --connect http://127.0.0.1:{port}" in said and key not in said
    steps = steps_of(experiment)
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["train/grad_norm"] > 0 for step in steps)
    assert recorded(experiment) == {1: 16, 2: 16}


def recorded_steps(experiment: Path) -> list[int]:
    """Steps with episodes in the recording so far."""
    try:
        return sorted(recorded(experiment))
    except sqlite3.OperationalError:  # nothing is there yet
        return []


def run_that_always_fails(backbone: str, folder: Path, *overrides: str) -> None:
    """A workflow that raises in every episode ends the run as on `local`, with its error."""
    folder.mkdir(exist_ok=True)
    (folder / "broken.py").write_text(
        "from ajet import Workflow\n"
        "class Broken(Workflow):\n"
        "    async def execute(self, workflow_task, tuner):\n"
        "        raise KeyError('the answer is missing')\n"
    )
    broken = f"ajet.rollout.user_workflow={folder / 'broken.py'}->Broken"
    steps = ("ajet.trainer_common.total_training_steps=8", "ajet.trainer_common.test_freq=-1")
    said = run(backbone, folder, *steps, broken, *overrides, code=2)
    assert "error: 5 steps in a row had no usable episode. 80 of 80 episodes failed:\n    80 × workflow_error" in said
    assert "warning: workflow_error in episode" in said  # as soon as the first has failed
    log = (folder / "say_vowels" / "run.log").read_text()
    assert "in execute\\n    raise KeyError" in log, "the traceback is there"
    assert recorded(folder / "say_vowels") == dict.fromkeys(range(1, 6), 16)
    assert left_behind() == {}


def run_that_was_cut_off_at_its_end(backbone: str, folder: Path) -> None:
    """The same command finishes a run that was killed in its last validation."""
    from ajet.observe.run_files import is_complete

    run(backbone, folder)
    experiment = folder / "say_vowels"
    events, metrics = experiment / "events.jsonl", experiment / "metrics.jsonl"
    events.write_text("".join(line for line in events.read_text().splitlines(True) if '"ended"' not in line))
    steps = [{name: step[name] for name in step if not name.startswith("val/")} for step in steps_of(experiment)]
    metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    shutil.rmtree(experiment / "hf")
    run(backbone, folder)
    assert is_complete(experiment) and (experiment / "hf" / "model.safetensors").exists()
    assert steps_of(experiment)[-1]["val/episode/count"] == 8 * 4
    assert recorded(experiment) == {1: 16, 2: 16, 3: 16 + 8 * 4}
    assert left_behind() == {}


PROGRAM = """
import json, os, urllib.request
body = {"model": os.environ["AJET_MODEL"], "messages": [{"role": "user", "content": "Say vowels."}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("reply", "w").write(reply)
"""
"""A program as the agent: it asks the model once, in its sandbox."""


def run_with_program(backbone: str, folder: Path) -> None:
    """Two steps whose agent is a program in a sandbox, judged by a test command."""
    two_vowels = "import sys; sys.exit(sum(letter in 'aeiou' for letter in open('reply').read()) < 2)"
    run(
        backbone,
        folder,
        "ajet.rollout.user_workflow=null",
        "ajet.rollout.agent.type=cli",
        f"ajet.rollout.agent.command={json.dumps(['python3', '-c', PROGRAM])}",
        f"ajet.rollout.agent.options.test_command={json.dumps(f'python3 -c {shlex.quote(two_vowels)}')}",
        "ajet.rollout.agent.options.result_as=files",
        "ajet.rollout.sandbox=bubblewrap",
        *TWO_STEPS,
    )
    for episode in two_steps(folder / "say_vowels", episodes=2 * 16):
        assert episode.metadata["exit_code"] == 0 and episode.reward in (0.0, 1.0)
        (call,) = episode.tree.calls
        assert call.agent == "cli" and call.mask.all()


def run_tutorial(backbone: str, folder: Path, conf: str, *overrides: str) -> list[Episode]:
    """Two small steps of a tutorial, as its README says, with a tiny model. Returns the episodes."""
    small = ["data.train_batch_size=2", "rollout.num_repeat=4", "rollout.max_num_seqs=8", "rollout.engine=torch"]
    random = ["model.path=tiny:qwen2-0.3m", "rollout.compute_madness_checklist=[]"]
    settings = [*random, "trainer_common.val_before_train=false", *small, *overrides]
    file = ROOT / "tutorial" / conf
    run(backbone, folder, *TWO_STEPS, *settings, conf=file, cwd=ROOT, may_learn_nothing=True)
    (experiment,) = (metrics.parent for metrics in folder.glob("*/metrics.jsonl"))
    return two_steps(experiment, episodes=2 * 8)


TWO_STEPS = (
    "ajet.trainer_common.total_training_steps=2",
    "ajet.trainer_common.test_freq=-1",
    "ajet.trainer_common.save_freq=-1",
)


def two_steps(experiment: Path, episodes: int) -> list[Episode]:
    """The episodes of a run of two steps, none of which failed."""
    from ajet.observe.episode_store import EpisodeStore

    assert [step["step"] for step in steps_of(experiment)] == [1, 2]
    store = EpisodeStore(experiment / "episodes.sqlite")
    found = [one.episode for one in store.all()]
    store.close()
    assert len(found) == episodes
    assert [episode.failure for episode in found if episode.failure is not None] == []
    return found


def left_behind() -> dict[int, str]:
    """Command lines of processes that a run of these tests started, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if "=".join(OURS).encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
            except OSError:
                continue
    return found


def processes_named(title: str) -> list[int]:
    """Ray gives each worker process its actor's name as title."""
    return [pid for pid, line in left_behind().items() if line.startswith(title)]


def wait_until(condition: Callable[[], bool], seconds: float = DEADLINE_S) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.2)
