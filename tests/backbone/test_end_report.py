"""A run that trained nothing fails, whatever the backbone."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from ajet.backbone.report import report_text, trained_nothing, why_nothing_trained, write_plot
from ajet.config import make_config


@pytest.mark.parametrize(
    ("trained", "after", "nothing"),
    [([0, 0], 0, True), ([0, 3], 0, False), ([3, 0], 1, True), ([3], 1, False), ([], 0, False)],
)
def test_only_the_steps_of_this_run_count(tmp_path: Path, trained: list[int], after: int, nothing: bool) -> None:
    lines = [{"step": 0, "time": 0.0, "val/return/mean": 0.5}]
    lines += [{"step": step, "time": 0.0, "credit/episodes_trained": float(n)} for step, n in enumerate(trained, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert trained_nothing(tmp_path, after) is nothing


@pytest.mark.parametrize("name", ["实验", r"cost $\x$"])
def test_the_plot_of_a_run_with_any_name_is_drawn_in_silence(tmp_path: Path, name: str) -> None:
    steps = [{"step": step, "train/return/mean": 0.1 * step} for step in range(4)]
    with warnings.catch_warnings(action="error"):
        assert write_plot(steps, tmp_path / "return.png", name) == tmp_path / "return.png"


@pytest.mark.parametrize("validations", [1, 2])
def test_one_validation_makes_no_curve(tmp_path: Path, validations: int) -> None:
    validated = {"val/return/mean": 0.5, "val/failed_share": 0.0}
    steps = [{"step": step, "train/return/mean": 0.1} | (validated if step < validations else {}) for step in range(4)]
    assert ("validation  " in report_text(steps, tmp_path, None)) == (validations == 2)


WELL = {"episode/count": 16.0, "return/min": 0.0, "return/max": 0.0, "episode/without_calls": 0.0}


@pytest.mark.parametrize(
    ("metrics", "said", "blames_the_reward"),
    [
        ({}, "every episode earned 0", True),
        ({"outcome/length": 3.0}, "3 of 16 episodes had a reply cut", True),
        ({"outcome/length": 12.0}, "max_response_length_in_one_turn", False),
        ({"outcome/length": 12.0, "return/min": 0.7, "return/max": 0.7}, "every episode earned 0.7", True),
        ({"outcome/overflow": 16.0, "failure/BadRequestError": 16.0}, "ajet.rollout.max_model_len", False),
        ({"outcome/abnormal": 16.0}, "compute_madness_checklist", False),
        ({"episode/without_calls": 9.0}, "9 of 16 episodes made no recorded model call", False),
        ({"failure/KeyError": 9.0}, "9 × KeyError", False),
        ({"failure/EpisodeCancelled": 9.0}, "every episode earned 0", True),
        ({"failure/EngineError": 10.0, "failure/EpisodeCancelled": 6.0}, "trained: all 10 episodes failed", False),
    ],
)
def test_rewards_are_blamed_only_if_most_episodes_went_well(
    tmp_path: Path, metrics: dict[str, float], said: str, blames_the_reward: bool
) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 0.0, **WELL, **metrics}) + "\n")
    why = why_nothing_trained(make_config(), tmp_path, 0)
    assert said in why
    assert why.endswith("to begin again: --fresh (in Python: Trainer(fresh=True))")
    assert ("look at how the reward is computed" in why) is blames_the_reward


def test_imitation_lacks_a_reward_that_is_high_enough(tmp_path: Path) -> None:
    steps = [{"step": step, "time": 0.0, **WELL, "return/max": 0.25 * step} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    algorithm = "trainer_common.algorithm"
    config = make_config({f"{algorithm}.policy_loss": "sft", f"{algorithm}.sft.min_reward": 0.75})
    why = why_nothing_trained(config, tmp_path, 0)
    assert why.startswith("nothing was trained: no episode earned as much as ajet.trainer_common.algorithm.sft.min_r")
    assert "(0.75)" in why and "the best earned 0.5: look at how the reward is computed" in why


def test_rewards_are_not_blamed_for_what_else_was_lacking(tmp_path: Path) -> None:
    step = {"step": 1, "time": 0.0, **WELL, "return/max": 1.0}
    passes = make_config({"trainer_common.algorithm.adv_estimator": "pass_at_k"})
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**step, "ledger/trained": 9.0}) + "\n")
    why = why_nothing_trained(passes, tmp_path, 0)
    assert "a success and at least pass_k failures" in why and "differ" not in why
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**step, "ledger/trained": 0.0, "masked/a": 9.0}) + "\n")
    why = why_nothing_trained(make_config(), tmp_path, 0)
    assert "no sampled token was to be trained (masked/a)\n" in why and "differ" not in why
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**step, "masked/not_trainable": 9.0}) + "\n")
    assert "(masked/not_trainable): no target_tag is in " in why_nothing_trained(make_config(), tmp_path, 0)
