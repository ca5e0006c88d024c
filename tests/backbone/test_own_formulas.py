"""A policy loss and an advantage estimator of one's own: the same as the built-in ones, and mistakes named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ajet.backbone.checks import check_formulas
from ajet.backbone.training_settings import credit_settings, loss_settings
from ajet.cli.main import main
from ajet.config import load_config, make_config
from ajet.schema.errors import UserError
from ajet.trainer import loss as losses
from ajet.trainer.credit import CallSummary, EpisodeSummary, compute_credit
from ajet.trainer.loss import EdgeTensors, PolicyLoss, policy_loss

OWN = """\
import torch
from ajet.trainer.credit import AdvantageEstimator, Comparison
from ajet.trainer.loss import LossTokens, PolicyLoss, TokenLoss

def clipped(tokens: LossTokens):
    low, high = 1 - tokens.settings.clip_low, 1 + tokens.settings.clip_high
    gain = torch.minimum(tokens.ratio * tokens.advantage, tokens.ratio.clamp(low, high) * tokens.advantage)
    floor = torch.where(tokens.advantage < 0, tokens.settings.clip_dual * tokens.advantage, -torch.inf)
    return -torch.maximum(gain, floor)

of_sequences = PolicyLoss("mine", clipped, by_trajectory=True)

def weighted(tokens): return TokenLoss(-tokens.new * tokens.advantage, tokens.ratio > 1.2)
def imitates(tokens): return -tokens.new
imitator = PolicyLoss("mine", imitates, imitates=True)
def summed(tokens): return clipped(tokens).sum()
def nothing(tokens): clipped(tokens)
def pair(tokens): return clipped(tokens), 0
def root(tokens): return -torch.log(tokens.advantage) * tokens.new
def constant(tokens): return tokens.advantage * 2
def slope(tokens): return (tokens.new - tokens.new.detach()).abs().sqrt()
def fails(tokens):
    return tokens.reward
def two(tokens, settings): ...
class Loss: ...
number = 3

def median(of: Comparison) -> float:
    return of.value - sorted(of.values)[len(of.values) // 2]

over_batch = AdvantageEstimator("mine", lambda of: of.value - of.mean, whole_batch=True)
def text(of): return str(of.value)
def infinite(of): return 1 / of.value
def nan(of): return float("nan")
"""
ALGORITHM = "trainer_common.algorithm"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path / "mine.py"


def with_loss(own: Path, name: str, **keys: Any) -> Any:
    return make_config({f"{ALGORITHM}.policy_loss": f"{own}->{name}", "backbone": "local", **keys})


def edges(seed: int = 0) -> tuple[torch.Tensor, EdgeTensors]:
    generator = torch.Generator().manual_seed(seed)
    old, gap, drift = (torch.randn(40, generator=generator, dtype=torch.float64) * scale for scale in (1.0, 0.1, 0.5))
    return (old + drift).requires_grad_(), EdgeTensors(
        sampler_E=old + gap,
        trajectory_E=torch.arange(40) // 7,
        entry_edge_M=torch.arange(40),
        advantage_M=torch.randn(40, generator=generator, dtype=torch.float64),
        weight_M=torch.rand(40, generator=generator, dtype=torch.float64),
        old_E=old,
    )


@pytest.mark.parametrize(
    ("name", "built_in"), [("clipped", losses.PPO), ("of_sequences", losses.GSPO)], ids=["a function", "a PolicyLoss"]
)
def test_a_loss_on_the_contract_is_the_built_in_one(own: Path, name: str, built_in: PolicyLoss) -> None:
    config = with_loss(own, name)
    check_formulas(config)
    settings = loss_settings(config)
    assert str(settings.policy_loss) == f"{own}->{name}"
    new, pack = edges()
    mine = policy_loss(new, pack, settings).loss
    theirs = policy_loss(new, pack, losses.LossSettings(built_in, correction=None)).loss
    assert torch.equal(torch.autograd.grad(mine, new)[0], torch.autograd.grad(theirs, new)[0])


def test_what_clips_is_reported(own: Path) -> None:
    new, pack = edges()
    sums = policy_loss(new, pack, loss_settings(with_loss(own, "weighted"))).sums
    beyond = (new.detach() - pack.old_E).exp() > 1.2  # type: ignore[operator]
    assert torch.allclose(sums["clip_fraction/sum"], pack.weight_M[beyond].sum())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("summed", ["returned the shape (), and tokens.new has (8,)", "def summed(tokens: LossTokens) -> Tensor"]),
        ("nothing", ["returned None instead of a Tensor"]),
        ("pair", ["returned a value of type tuple instead of a Tensor, or a TokenLoss of two"]),
        ("root", ["returned a loss that is NaN or infinite"]),
        ("constant", ["depends on neither tokens.new nor tokens.ratio"]),
        ("slope", ["a gradient that is NaN or infinite"]),
        ("fails", ["raised AttributeError", "reward", "mine.py:23"]),
        ("two", ["two (line 24) takes (tokens, settings), and is called with one argument"]),
        ("Loss", ["is a class, not a function or PolicyLoss"]),
        ("number", ["is of type int, not a function"]),
        ("clippd", ["did you mean 'clipped'?"]),
        ("imitator", ["imitates, which only `sft` does"]),
    ],
)
def test_a_mistake_in_a_loss_is_named(own: Path, name: str, said: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        check_formulas(with_loss(own, name))
    message = str(raised.value)
    assert message.startswith("ajet.trainer_common.algorithm.policy_loss: ") and str(own) in message
    assert all(part in message for part in said), message


def group(rewards: list[float], name: str = "g") -> list[EpisodeSummary]:
    return [
        EpisodeSummary(f"{name}{n}", name, reward, [CallSummary("a", 5, leaves=[0])])
        for n, reward in enumerate(rewards)
    ]


def test_an_estimator_sees_all_values_of_its_group(own: Path) -> None:
    config = make_config({f"{ALGORITHM}.adv_estimator": f"{own}->median", "backbone": "local"})
    check_formulas(config)
    credit = compute_credit([group([9.0, 1.0, 0.0])], credit_settings(config))
    assert [episode.calls[0].advantage for episode in credit.episodes] == [8.0, 0.0, -1.0]


def test_an_estimator_may_compare_over_the_batch(own: Path) -> None:
    settings = credit_settings(make_config({f"{ALGORITHM}.adv_estimator": f"{own}->over_batch"}))
    credit = compute_credit([group([1.0, 1.0]), group([0.0, 0.0], "h")], settings)
    assert [episode.calls[0].advantage for episode in credit.episodes] == [0.5, 0.5, -0.5, -0.5]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("text", "returned a value of type str instead of a number"),
        ("infinite", "raised ZeroDivisionError"),
        ("nan", "returned nan for Comparison(value=0.0"),
        ("two", "takes (tokens, settings)"),
        ("number", "not a function or AdvantageEstimator"),
    ],
)
def test_a_mistake_in_an_estimator_is_named(own: Path, name: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        check_formulas(make_config({f"{ALGORITHM}.adv_estimator": f"{own}->{name}", "backbone": "verl"}))
    message = str(raised.value)
    assert message.startswith("ajet.trainer_common.algorithm.adv_estimator: ") and said in message


CONF = """\
ajet:
  task_reader: {type: random_dummy, random_dummy: {num_tasks: 2}}
  rollout: {agent: {type: react}, num_repeat: 2}
  trainer_common: {algorithm: {policy_loss: "mine.py->NAME"}}
"""


def test_files_are_found_beside_the_yaml(own: Path) -> None:
    (own.parent / "c.yaml").write_text(CONF.replace("NAME", "clipped"))
    algorithm = load_config(own.parent / "c.yaml").ajet.trainer_common.algorithm
    assert algorithm.policy_loss == f"{own}->clipped"
    (own.parent / "c.yaml").write_text(CONF.replace("mine.py->NAME", "min.py->clipped"))
    with pytest.raises(UserError, match=r"c.yaml:4: ajet.trainer_common.algorithm.policy_loss: no file 'min.py'"):
        load_config(own.parent / "c.yaml")


@pytest.mark.parametrize("command", [["validate"], ["--conf"]], ids=["validate", "a run"])
def test_it_is_tried_before_a_run(
    command: list[str], own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(own.parent)
    Path("c.yaml").write_text(CONF.replace("NAME", "root"))
    assert main([*command, "c.yaml", "model.path=tiny:qwen2-0.3m"]) == 2
    assert "mine.py->root returned a loss that is NaN" in capsys.readouterr().err
