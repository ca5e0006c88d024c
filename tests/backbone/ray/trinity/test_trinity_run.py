"""Whole runs of the trinity backbone on the CPU, as a user starts them. Needs Trinity (`make test-trinity`).

Explorer, scheduler, buffer, trainer and synchronizer are Trinity's; the rollout model and the train engine are ours.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support import ray_runs
from support.ray_runs import (
    DEADLINE_S,
    ROOT,
    installed,
    kill_after,
    left_behind,
    processes_named,
    recorded,
    start,
    steps_of,
    wait_until,
)

long = pytest.mark.skipif(not os.environ.get("AJET_LONG_TESTS"), reason="takes minutes: run `make test-trinity`")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed("trinity-rft"), reason="needs Trinity: run `make test-trinity`"),
]
run = partial(ray_runs.run, "trinity")


def versions_of_validations(experiment: Path) -> dict[int, set[int]]:
    """By step: the policy versions that its validation's tokens were drawn under."""
    from ajet.observe.episode_store import EpisodeFilter, EpisodeStore

    found: dict[int, set[int]] = {}
    store = EpisodeStore(experiment / "episodes.sqlite")
    for one in store.all(EpisodeFilter(validation=True)):
        drawn = {version for call in one.episode.tree.calls for _, version in call.versions}
        found[one.step] = found.get(one.step, set()) | drawn
    store.close()
    return found


def weights(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def test_a_run_trains_and_synchronises(tmp_path: Path) -> None:
    from ajet.engine.model_source import ModelSource

    run(tmp_path, "--with-ray", "ajet.trainer_common.test_freq=-1")
    experiment = tmp_path / "say_vowels"
    steps = steps_of(experiment)
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["train/staleness/max"] == 0  # each step's episodes were drawn by the weights that it trains
        assert step["train/grad_norm"] > 0
        assert 0 <= step["reward/mean"] <= 1
    # replies cut by length start new rows, and one episode asks a second agent
    assert max(step["train/rows"] for step in steps) > 16
    assert recorded(experiment) == {1: 16, 2: 16, 3: 16}
    before, after = weights(Path(ModelSource.resolve("tiny:qwen2-0.3m").path)), weights(experiment / "hf")
    assert any(not before[name].equal(tensor) for name, tensor in after.items() if name in before)


@long
def test_a_run_resumes(tmp_path: Path) -> None:
    run(tmp_path)
    experiment = tmp_path / "say_vowels"
    assert steps_of(experiment)[-1]["val/episode/count"] == 8 * 4
    assert versions_of_validations(experiment) == {3: {3}}  # by the weights that its step made
    run(tmp_path, "ajet.trainer_common.total_training_steps=4")
    steps = steps_of(experiment)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert steps[-1]["train/staleness/max"] == 0
    assert left_behind() == {}


@long
def test_tokens_of_better_episodes_become_likelier_and_those_of_worse_ones_less(tmp_path: Path) -> None:
    """Sampled, queued, credited, trained and synchronised: the update moved what it was to move."""
    from ajet.engine.model_source import ModelSource
    from support.logprob_change import changes, summary

    run(
        tmp_path,
        "ajet.trainer_common.total_training_steps=4",
        "ajet.trainer_common.test_freq=-1",
        "ajet.trainer_common.save_freq=1",
        "ajet.trainer_common.keep_checkpoints=4",
        "ajet.trainer_common.use_kl_loss=false",
    )
    experiment = tmp_path / "say_vowels"
    saved = {int(hf.parent.name.removeprefix("step_")): hf for hf in experiment.glob("checkpoints/*/run/step_*/hf")}
    assert sorted(saved) == [1, 2, 3, 4]
    found = changes(experiment / "episodes.sqlite", saved | {0: Path(ModelSource.resolve("tiny:qwen2-0.3m").path)})
    assert {change.step for change in found} == {1, 2, 3, 4}
    figures = summary(found)
    assert figures["largest_sampler_gap"] < 1e-4  # the weights before are those that drew the tokens
    assert figures["better_mean_change"] > 0 > figures["worse_mean_change"], figures


@long
def test_episodes_act_in_environments(tmp_path: Path) -> None:
    ray_runs.run_with_environment("trinity", tmp_path)
    assert left_behind() == {}


@long
def test_episodes_run_in_runners_elsewhere(tmp_path: Path) -> None:
    ray_runs.run_with_remote_runners("trinity", tmp_path)
    assert left_behind() == {}


@long
def test_explore_first_and_train_later(tmp_path: Path) -> None:
    common = ["ajet.trainer_common.total_training_steps=2", "ajet.trainer_common.test_freq=-1"]
    run(tmp_path, "ajet.trinity.mode=explore", *common)
    run(tmp_path, "ajet.trinity.mode=train", *common)
    steps = steps_of(tmp_path / "say_vowels")
    assert [step["train/grad_norm"] > 0 for step in steps if "train/grad_norm" in step] == [True, True]


@long
def test_exploring_and_training_overlap_with_bounded_staleness(tmp_path: Path) -> None:
    run(
        tmp_path,
        "ajet.trainer_common.total_training_steps=6",
        "ajet.trainer_common.test_freq=-1",
        "ajet.trinity.synchronizer.sync_style=fully_async",
        "ajet.model.path=tiny:qwen2-3m",  # with less to do, each is done before the other has looked up
        "ajet.rollout.num_repeat=16",
    )
    steps = steps_of(tmp_path / "say_vowels")
    assert len(steps) == 6
    assert all(step["train/staleness/max"] <= 1 for step in steps)
    for step in steps:
        tokens = {int(name.rpartition("@")[2]): value for name, value in step.items() if "staleness/tokens@" in name}
        assert set(tokens) <= {0, 1}
        assert sum(tokens.values()) == step["tokens/trained"]  # each trained token is counted by its own lateness
        assert step["train/staleness"] == pytest.approx(tokens.get(1, 0) / sum(tokens.values()))
    assert any(step["train/staleness"] > 0 for step in steps)
    trained = [(step["time/train_began"], step["time/train_ended"]) for step in steps]
    rolled = [(step["time/rollout_began"], step["time/rollout_ended"]) for step in steps]
    assert any(began < end and start < ended for began, ended in trained for start, end in rolled)


@long
def test_the_quickstarts_yaml_runs_unchanged(tmp_path: Path) -> None:
    run(tmp_path, "trainer_common.total_training_steps=2", conf=ROOT / "configs" / "quickstart.yaml", cwd=ROOT)
    steps = steps_of(tmp_path / "quickstart")
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert steps[0]["val/episode/count"] == 128


@long
@pytest.mark.parametrize("victim", ["AjetExplorer", "AjetTrainer", "CpuRolloutModel"])
def test_a_killed_process_is_a_named_error_and_leaves_nothing(tmp_path: Path, victim: str) -> None:
    child = start("trinity", tmp_path, "ajet.trainer_common.total_training_steps=1000")
    try:
        wait_until(
            lambda: child.poll() is not None or any("train/grad_norm" in s for s in steps_of(tmp_path / "say_vowels"))
        )
        os.kill(processes_named(f"ray::{victim}")[0], signal.SIGKILL)
        output, _ = child.communicate(timeout=DEADLINE_S)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 1
    assert "died" in output, output[-3000:]
    assert left_behind() == {}


@long
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    """Trinity's explorer saves its place at each step, its trainer its weights now and then."""
    without = ["ajet.trainer_common.save_freq=0", "ajet.trainer_common.test_freq=-1"]
    kill_after(4, "trinity", tmp_path, *without, "ajet.trainer_common.total_training_steps=1000")
    experiment = tmp_path / "say_vowels"
    run(tmp_path, *without, "ajet.trainer_common.total_training_steps=3")
    assert [step["step"] for step in steps_of(experiment)] == [1, 2, 3]
    assert recorded(experiment) == {1: 16, 2: 16, 3: 16}


@long
def test_a_run_that_was_cut_off_at_its_end_is_finished_by_the_same_command(tmp_path: Path) -> None:
    ray_runs.run_that_was_cut_off_at_its_end("trinity", tmp_path)


@long
@pytest.mark.parametrize("style", ["fixed", "fully_async"])
def test_a_workflow_that_always_fails_ends_the_run_with_its_error(tmp_path: Path, style: str) -> None:
    ray_runs.run_that_always_fails("trinity", tmp_path, f"ajet.trinity.synchronizer.sync_style={style}")


@long
def test_a_program_is_the_agent(tmp_path: Path) -> None:
    ray_runs.run_with_program("trinity", tmp_path)


@long
def test_a_tutorial_with_an_environment(tmp_path: Path) -> None:
    lake = ray_runs.run_tutorial("trinity", tmp_path, "example_frozenlake/frozenlake.yaml")
    assert all(episode.environment is not None and episode.tree.calls for episode in lake)


@long
def test_a_tutorial_with_a_ready_agent(tmp_path: Path) -> None:
    short = ["rollout.max_response_length_in_one_turn=16", "rollout.agent.max_steps=2"]
    coding = ray_runs.run_tutorial("trinity", tmp_path, "example_coding_agent/coding_agent.yaml", *short)
    assert all(episode.reward is not None and episode.tree.calls for episode in coding)
