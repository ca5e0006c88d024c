"""`trainer_common.algorithm.recipe`: the papers' values, and that the user's own win."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ajet.backbone.ray.facts import RunPayload
from ajet.backbone.training_settings import credit_settings, train_settings
from ajet.cli.main import main
from ajet.config import load_config, make_config
from ajet.config.contradictions import TRAINING, contradictions
from ajet.config.effects import given_keys, left_to_recipe
from ajet.config.kinds import RECIPES
from ajet.schema.errors import ConfigError
from ajet.trainer import loss as losses
from ajet.trainer.credit import Baseline, LossNorm, Overlong, ZeroVariance, estimators
from ajet.trainer.loss import KLType

RECIPE = "trainer_common.algorithm.recipe"
CONF = """\
ajet:
  task_reader: {type: random_dummy, random_dummy: {num_tasks: 2}}
  rollout: {agent: {type: react}, num_repeat: 4}
  trainer_common: {algorithm: {recipe: dapo, clip_low: 0.1, overlong: {mask: true}}}
"""

PAPERS: dict[str, tuple[Any, Any, LossNorm, tuple[float, float], float, ZeroVariance]] = {
    "grpo": (losses.PPO, estimators.GRPO, LossNorm.SEQUENCE_MEAN, (0.2, 0.2), 0.04, ZeroVariance.KEEP),
    "dapo": (losses.PPO, estimators.GRPO, LossNorm.TOKEN_MEAN, (0.2, 0.28), 0.0, ZeroVariance.RESAMPLE),
    "drgrpo": (losses.PPO, estimators.DR_GRPO, LossNorm.DR_GRPO, (0.2, 0.2), 0.0, ZeroVariance.KEEP),
    "gspo": (losses.GSPO, estimators.GRPO, LossNorm.SEQUENCE_MEAN, (3e-4, 4e-4), 0.0, ZeroVariance.KEEP),
    "cispo": (losses.CISPO, estimators.GRPO, LossNorm.TOKEN_MEAN, (1.0, 5.0), 0.0, ZeroVariance.RESAMPLE),
    "rloo": (losses.PPO, estimators.RLOO, LossNorm.DR_GRPO, (1.0, 100.0), 0.0, ZeroVariance.KEEP),
    "reinforce_pp": (
        *(losses.PPO, estimators.REINFORCE_PLUS_PLUS, LossNorm.TOKEN_MEAN),
        *((0.2, 0.2), 0.0, ZeroVariance.KEEP),
    ),
    "gigpo": (losses.PPO, estimators.GRPO, LossNorm.TOKEN_MEAN, (0.2, 0.2), 0.01, ZeroVariance.KEEP),
    "sft": (losses.SFT, estimators.GRPO, LossNorm.TOKEN_MEAN, (0.2, 0.2), 0.0, ZeroVariance.KEEP),
    "distill": (losses.PPO, estimators.GRPO, LossNorm.TOKEN_MEAN, (1.0, 100.0), 0.0, ZeroVariance.KEEP),
}


def with_recipe(name: str, **keys: Any) -> Any:
    teacher = {"trainer_common.algorithm.distillation.teacher": "some/model"} if name == "distill" else {}
    return make_config({RECIPE: name, "backbone": "local", "rollout.num_repeat": 4, **teacher, **keys})


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_its_papers_settings(name: str) -> None:
    config = with_recipe(name)
    credit, loss = credit_settings(config), train_settings(config, 1).loss
    found = (
        *(loss.policy_loss, credit.estimator, credit.loss_norm),
        *((loss.clip_low, loss.clip_high), loss.kl_coef, credit.zero_variance),
    )
    assert found == PAPERS[name]
    assert loss.clip_dual is None and loss.entropy_coef == 0 and loss.sequence_mask is None
    assert loss.kl_type is KLType.LOW_VAR_KL
    in_reward = {"rloo": 0.03, "reinforce_pp": 0.01}.get(name)
    common = config.ajet.trainer_common
    assert (common.kl_loss_coef if common.algorithm.use_kl_in_reward else None) == in_reward
    assert credit.overlong == (Overlong(15000, 3000, 1.0) if name in ("dapo", "cispo") else None)
    assert credit.baseline is (Baseline.STATE if name == "gigpo" else Baseline.EPISODE)
    assert credit.gamma == (0.95 if name == "gigpo" else 1.0)
    assert not list(contradictions(config.ajet, "local"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_same_as_its_keys_written_out(name: str) -> None:
    short = with_recipe(name)
    written = make_config({**left_to_recipe(short.ajet), "backbone": "local", "rollout.num_repeat": 4})
    written.ajet.trainer_common.algorithm.recipe = short.ajet.trainer_common.algorithm.recipe
    teacher = short.ajet.trainer_common.algorithm.distillation.teacher
    written.ajet.trainer_common.algorithm.distillation.teacher = teacher
    assert written.model_dump() == short.model_dump()


def test_what_the_user_sets_wins(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONF)
    algorithm = load_config(tmp_path / "c.yaml").ajet.trainer_common.algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.overlong.mask) == (0.1, 0.28, True)
    assert (algorithm.overlong.buffer, algorithm.zero_variance_groups) == (3000, "resample")
    overrides = ["trainer_common.algorithm.clip_high=0.5", f"{RECIPE}=gspo", "data.max_response_length=100"]
    algorithm = load_config(tmp_path / "c.yaml", overrides).ajet.trainer_common.algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.loss_norm) == (0.1, 0.5, "sequence_mean")


def test_only_what_the_user_wrote_counts_as_given(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONF)
    config = load_config(tmp_path / "c.yaml")
    assert [key for key in given_keys(config.ajet) if key.startswith("trainer_common")] == [
        "trainer_common.algorithm.recipe",
        "trainer_common.algorithm.clip_low",
        "trainer_common.algorithm.overlong.mask",
    ]


@pytest.mark.parametrize("backbone", TRAINING)
def test_other_processes_have_the_same_settings(backbone: str) -> None:
    config = with_recipe("gspo", backbone=backbone)
    there = RunPayload(config.model_dump(mode="json"), "", "", config.ajet.model.path).load_config()
    assert train_settings(there, 1) == train_settings(config, 1)
    assert credit_settings(there) == credit_settings(config)


def test_an_unknown_recipe_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONF.replace("dapo", "dpao"))
    with pytest.raises(ConfigError, match=r"c.yaml:4: ajet.trainer_common.algorithm.recipe(.|\n)*did you mean `dapo`"):
        load_config(tmp_path / "c.yaml")


def test_distillation_needs_a_teacher() -> None:
    (found,) = contradictions(make_config({RECIPE: "distill", "rollout.num_repeat": 4}).ajet, "local")
    assert "there is none" in found.what


def test_validate_lists_what_a_recipe_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONF)
    main(["validate", "c.yaml", "model.path=tiny:qwen2-0.3m"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  recipe "))
    assert "dapo sets policy_loss: ppo" in line and "clip_high: 0.28" in line and "overlong.buffer: 3000" in line
    assert "clip_dual: null" in line and line.endswith("; yours: clip_low, overlong.mask")
    main(["validate", "c.yaml", "model.path=tiny:qwen2-0.3m", "--backbone=debug"])
    assert "dapo sets" not in capsys.readouterr().out
