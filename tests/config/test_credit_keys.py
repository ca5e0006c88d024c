"""Keys of credit: what `auto` means, and what can't be meant together."""

from __future__ import annotations

from typing import Any

import pytest

from ajet.backbone.training_settings import credit_settings, train_settings
from ajet.config import make_config
from ajet.config.contradictions import contradictions
from ajet.trainer.credit import Baseline, LossNorm

ALGORITHM = "trainer_common.algorithm"
REPLAY = {f"{ALGORITHM}.replay.groups": 2}
RESAMPLE = {f"{ALGORITHM}.zero_variance_groups": "resample"}


@pytest.mark.parametrize(
    ("asked", "gamma", "baseline"),
    [
        ("auto", 1.0, Baseline.EPISODE),
        ("auto", 0.9, Baseline.TURN),
        ("turn", 1.0, Baseline.TURN),
        ("state", 0.9, Baseline.STATE),
    ],
)
def test_the_configuration_alone_chooses_the_baseline(asked: str, gamma: float, baseline: Baseline) -> None:
    config = make_config({f"{ALGORITHM}.baseline": asked, "rollout.gamma": gamma})
    assert credit_settings(config).baseline is baseline


def test_kl_in_the_reward_switches_the_loss_term_off() -> None:
    both = {"trainer_common.use_kl_loss": True, f"{ALGORITHM}.loss_norm": "dr_grpo"}
    assert train_settings(make_config(both), 1).loss.kl_coef > 0
    settings = train_settings(make_config({**both, f"{ALGORITHM}.use_kl_in_reward": True}), 1)
    assert settings.loss.kl_coef == 0
    assert credit_settings(make_config(both)).loss_norm is LossNorm.DR_GRPO


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({f"{ALGORITHM}.baseline": "episode", "rollout.gamma": 0.9}, "undiscounted returns"),
        ({f"{ALGORITHM}.baseline": "state", f"{ALGORITHM}.adv_estimator": "reinforce_plus_plus"}, "over the batch"),
        ({f"{ALGORITHM}.adv_estimator": "pass_at_k", "rollout.num_repeat": 4}, "not below rollout.num_repeat"),
        ({f"{ALGORITHM}.adv_estimator": "pass_at_k", "rollout.num_repeat": 8, "rollout.gamma": 0.9}, "rollout.gamma"),
        ({f"{ALGORITHM}.adv_estimator": "reinforce_plus_plus_baseline", "rollout.num_repeat": 1}, "nothing would be"),
        ({**RESAMPLE, f"{ALGORITHM}.adv_estimator": "reinforce_plus_plus"}, "trains groups whose rewards"),
        ({**RESAMPLE, f"{ALGORITHM}.policy_loss": "sft"}, "compares no rewards"),
        ({**RESAMPLE, f"{ALGORITHM}.distillation.teacher": "some/model"}, "whatever the rewards"),
        ({**REPLAY, f"{ALGORITHM}.rollout_correction.mode": "none"}, "without a correction"),
        ({**REPLAY, f"{ALGORITHM}.policy_loss": "sft"}, "no probability ratios"),
        ({**REPLAY, f"{ALGORITHM}.adv_estimator": "reinforce_plus_plus"}, "rewards of several policies"),
        ({**REPLAY, f"{ALGORITHM}.use_kl_in_reward": True}, "divergence of the present policy"),
        ({**REPLAY, "rollout.top_p": 0.9}, "not the sampler's"),
        ({**REPLAY, "rollout.top_k": 50}, "not the sampler's"),
        (
            {f"{ALGORITHM}.policy_loss": "dppo_tv", f"{ALGORITHM}.rollout_correction.mode": "sequence_tis"},
            "nothing left to correct",
        ),
        ({f"{ALGORITHM}.policy_loss": "sft", f"{ALGORITHM}.sequence_mask": 0.5}, "uses no advantages"),
        ({f"{ALGORITHM}.sft.demonstrations": "talks.jsonl"}, "nothing would be imitated: policy_loss ppo"),
        ({f"{ALGORITHM}.policy_loss": "sft", f"{ALGORITHM}.use_kl_in_reward": True}, "uses none"),
        ({f"{ALGORITHM}.distillation.teacher": "some/model", f"{ALGORITHM}.use_kl_in_reward": True}, "uses none"),
        ({f"{ALGORITHM}.policy_loss": "sft", "trainer_common.kl_adaptive.target": 0.1}, "there is none"),
        ({"trainer_common.early_stop.target": 0.5, "trainer_common.test_freq": 0}, "there are none"),
        ({"task_reader.curriculum.enabled": True, "task_reader.shuffle": False}, "in file order"),
        (
            {
                "task_reader.curriculum.enabled": True,
                f"{ALGORITHM}.policy_loss": "sft",
                f"{ALGORITHM}.sft.demonstrations": "talks.jsonl",
            },
            "no solve rates",
        ),
    ],
)
def test_what_cannot_be_meant_together_is_refused(keys: dict[str, Any], message: str) -> None:
    (found,) = contradictions(make_config(keys).ajet, "local")
    assert message in found.what
