"""Whole runs of the verl backbone on the CPU, as a user starts them. Needs verl (`make test-verl`)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from safetensors import safe_open

from support import ray_runs
from support.ray_runs import (
    DEADLINE_S,
    HERE,
    ROOT,
    command,
    environment,
    installed,
    kill_after,
    left_behind,
    processes_named,
    recorded,
    start,
    steps_of,
    wait_until,
)

needs_verl = pytest.mark.skipif(not installed("verl"), reason="needs verl: run `make test-verl`")
long = pytest.mark.skipif(not os.environ.get("AJET_LONG_TESTS"), reason="takes minutes: run `make test-verl`")
pytestmark = pytest.mark.slow
run = partial(ray_runs.run, "verl")
ONE_STEP = "ajet.trainer_common.total_training_steps=1"


@needs_verl
def test_a_run_trains_saves_and_resumes(tmp_path: Path) -> None:
    run(tmp_path)
    experiment = tmp_path / "say_vowels"
    steps = steps_of(experiment)
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["train/sampler_gap"] < 1e-5  # the sampler's probabilities are the trainer's
        assert step["train/grad_norm"] > 0
        assert 0 <= step["reward/mean"] <= 1
    assert steps[-1]["val/episode/count"] == 8 * 4
    # replies cut by length start new rows, and one episode asks a second agent: 33 rows of 16 episodes, which verl pads
    assert 33.0 in {step["train/rows"] for step in steps}
    assert (experiment / "checkpoints" / "global_step_3" / "actor" / "huggingface" / "model.safetensors").exists()
    assert (experiment / "hf" / "model.safetensors").exists()
    assert recorded(experiment) == {1: 16, 2: 16, 3: 16 + 8 * 4}

    exporting = [sys.executable, "-m", "ajet", "export", "weights", str(experiment), str(tmp_path / "exported")]
    subprocess.run(exporting, env=environment(), check=True, timeout=DEADLINE_S)
    assert (tmp_path / "exported" / "model.safetensors").exists()

    run(tmp_path, "ajet.trainer_common.total_training_steps=4")
    steps = steps_of(experiment)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert steps[-1]["train/sampler_gap"] < 1e-5
    log = (experiment / "verl.log").read_text(errors="replace")
    assert "setting global step to 3" in log
    assert left_behind() == {}


@needs_verl
@pytest.mark.parametrize("victim", ["EpisodeWorker", "CpuServer", "ActorRollout"])
def test_a_killed_process_is_a_named_error_and_leaves_nothing(tmp_path: Path, victim: str) -> None:
    steps = 12 if victim == "ActorRollout" else 1000
    asked = [f"ajet.trainer_common.total_training_steps={steps}", "ajet.trainer_common.save_freq=1"]
    child = start("verl", tmp_path, *asked)
    try:
        experiment = tmp_path / "say_vowels"
        wait_until(lambda: any(experiment.glob("checkpoints/**/latest_checkpointed_iteration.txt")))
        pids = processes_named(f"ray::{victim}") or processes_named("ray::WorkerDict")
        os.kill(pids[0], signal.SIGKILL)
        killed = time.monotonic()
        output, _ = child.communicate(timeout=DEADLINE_S)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 1
    assert "died" in output or "ActorDied" in output, output[-3000:]
    assert time.monotonic() - killed < 60  # a promise of the docs; 7 to 13 s on two busy cores
    assert left_behind() == {}
    if victim == "ActorRollout":
        run(tmp_path, *asked)  # the same command resumes and ends
        assert [step["step"] for step in steps_of(experiment)] == list(range(1, steps + 1))
        assert "setting global step to" in (experiment / "verl.log").read_text(errors="replace")
        assert left_behind() == {}


@needs_verl
def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    child = start("verl", tmp_path)
    log = tmp_path / "say_vowels" / "verl.log"
    wait_until(lambda: log.exists() and "Started a local Ray instance" in log.read_text(errors="replace"))
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert child.returncode == 130
    assert left_behind() == {}


@needs_verl
@long
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    """What it had recorded is dropped; validating alone drops nothing."""
    kill_after(4, "verl", tmp_path, "ajet.trainer_common.save_freq=0", "ajet.trainer_common.total_training_steps=1000")
    experiment = tmp_path / "say_vowels"
    three = "ajet.trainer_common.total_training_steps=3"
    run(tmp_path, three, "ajet.trainer_common.test_freq=-1")
    assert [step["step"] for step in steps_of(experiment)] == [1, 2, 3]
    assert recorded(experiment) == {1: 16, 2: 16, 3: 16}
    run(tmp_path, three, "ajet.trainer_common.val_only=true")
    assert [step["step"] for step in steps_of(experiment)] == [1, 2, 3]
    assert recorded(experiment) == {1: 16, 2: 16, 3: 16 + 8 * 4}


@needs_verl
@long
def test_a_run_that_was_cut_off_at_its_end_is_finished_by_the_same_command(tmp_path: Path) -> None:
    ray_runs.run_that_was_cut_off_at_its_end("verl", tmp_path)


@needs_verl
@long
def test_the_reward_rises(tmp_path: Path) -> None:
    run(
        tmp_path,
        "ajet.trainer_common.total_training_steps=40",
        "ajet.trainer_common.test_freq=-1",
        "ajet.trainer_common.save_freq=-1",
    )
    rewards = [step["reward/mean"] for step in steps_of(tmp_path / "say_vowels")]
    assert sum(rewards[-5:]) / 5 > 2 * sum(rewards[:5]) / 5


@needs_verl
@long
def test_episodes_act_in_environments(tmp_path: Path) -> None:
    ray_runs.run_with_environment("verl", tmp_path)
    assert left_behind() == {}


@needs_verl
@long
def test_episodes_run_in_runners_elsewhere(tmp_path: Path) -> None:
    ray_runs.run_with_remote_runners("verl", tmp_path)
    assert left_behind() == {}


@needs_verl
@long
def test_two_machines_make_a_cluster_and_both_end(tmp_path: Path) -> None:
    """Both on this machine: the second lends what it has until the first is done."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "RAY_PORT": str(port), "NNODES": "2"}
    machines = [
        start("verl", tmp_path / str(rank), ONE_STEP, "--with-ray-cluster", **place, NODE_RANK=str(rank))
        for rank in (1, 0)
    ]
    try:
        outputs = [machine.communicate(timeout=DEADLINE_S)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    steps = steps_of(tmp_path / "0" / "say_vowels")
    assert [step["train/grad_norm"] > 0 for step in steps] == [True]  # verl's own metrics have come too
    assert left_behind() == {}


@needs_verl
@long
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["ajet.verl.trainer.v1.trainer_mode=colocate_async"], id="colocated-async"),
        pytest.param(["ajet.model.lora.enabled=true", "ajet.model.lora.rank=4"], id="lora"),
        pytest.param(["ajet.trainer_common.mini_batch_num=2"], id="two-updates-a-step"),
    ],
)
def test_other_modes_train(tmp_path: Path, overrides: list[str]) -> None:
    run(tmp_path, "ajet.trainer_common.total_training_steps=2", "ajet.trainer_common.test_freq=-1", *overrides)
    steps = steps_of(tmp_path / "say_vowels")
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["train/grad_norm"] > 0 for step in steps)
    # with overlap the sampler may be a step behind
    assert all(step["train/sampler_gap"] < 1e-3 or step["train/staleness/max"] == 1 for step in steps)
    if "lora" in overrides[0]:
        assert all(step["train/sampler_gap"] < 1e-5 for step in steps)  # servers have the weights that are trained
    with safe_open(tmp_path / "say_vowels" / "hf" / "model.safetensors", "pt") as weights:
        assert "model.embed_tokens.weight" in weights.keys()  # noqa: SIM118 - it is no dict
        assert not any("lora" in name for name in weights.keys())  # noqa: SIM118


@needs_verl
@long
@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_workflow_that_always_fails_ends_the_run_with_its_error(tmp_path: Path, mode: str) -> None:
    """Also where verl would put other groups in place of those that failed, without end."""
    ray_runs.run_that_always_fails("verl", tmp_path, f"ajet.verl.trainer.v1.trainer_mode={mode}")


@needs_verl
@long
def test_an_asynchronous_run_that_is_resumed_loses_no_episode(tmp_path: Path) -> None:
    """Groups that had ended when the checkpoint was written, but were not trained yet."""
    ahead = [
        "ajet.verl.trainer.v1.trainer_mode=colocate_async",
        "ajet.verl.trainer.v1.colocate_async.num_warmup_batches=2",
        "ajet.trainer_common.test_freq=-1",
    ]
    run(tmp_path, *ahead, "ajet.trainer_common.total_training_steps=2", "ajet.trainer_common.save_freq=2")
    run(tmp_path, *ahead, "ajet.trainer_common.total_training_steps=4")
    assert recorded(tmp_path / "say_vowels") == {1: 16, 2: 16, 3: 16, 4: 16}
    assert [step["episode/count"] for step in steps_of(tmp_path / "say_vowels")] == [16.0] * 4


@needs_verl
def test_the_tutorials_yaml_runs_unchanged(tmp_path: Path) -> None:
    said = run(tmp_path, conf=ROOT / "tutorial" / "example_math_agent" / "math_agent.yaml", cwd=ROOT, code=1)
    assert len(steps_of(tmp_path / "math_agent")) == 2
    assert "nothing was trained" in said, "random weights solve nothing, and an exit code of 0 would hide that"


@pytest.mark.skipif(installed("verl"), reason="verl is installed")
def test_without_verl_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    done = subprocess.run(
        command("verl", tmp_path), cwd=HERE, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "[verl]" in done.stderr
    assert "Traceback" not in done.stderr


@needs_verl
@long
def test_a_program_is_the_agent(tmp_path: Path) -> None:
    ray_runs.run_with_program("verl", tmp_path)


@needs_verl
@long
def test_a_tutorial_with_an_environment(tmp_path: Path) -> None:
    lake = ray_runs.run_tutorial("verl", tmp_path, "example_frozenlake/frozenlake.yaml")
    assert all(episode.environment is not None and episode.tree.calls for episode in lake)


@needs_verl
@long
def test_a_tutorial_with_a_ready_agent(tmp_path: Path) -> None:
    short = ["rollout.max_response_length_in_one_turn=16", "rollout.agent.max_steps=2"]
    coding = ray_runs.run_tutorial("verl", tmp_path, "example_coding_agent/coding_agent.yaml", *short)
    assert all(episode.reward is not None and episode.tree.calls for episode in coding)
