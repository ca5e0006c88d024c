"""One batch, as the embedded trainer, verl and Trinity are given it: what each makes of it must be the same.

Uneven lengths, branches, two agents, a group that lost an episode, a group that teaches nothing, two updates a step.
Some groups were really played: replies end at stop strings, episodes failed, and of one group everything is masked.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from support.episodes import BRANCHING, LINEAR, make_groups

MODEL = "tiny:qwen2-0.3m"
STEPS = 10
LR = 0.3
"""Of plain descent: far enough that the second update's ratios are clipped."""
BOUND = 2e-4
"""Largest difference of a parameter's change, relative to its largest change."""
ROUNDING = 2**-23
"""Steps in which a float32 weight of about 1 can change."""

CASES = {
    "ppo": {},
    "kl": {"use_kl_loss": True, "kl_loss_coef": 0.5},
    "k2-entropy": {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k2", "algorithm.entropy_coef": 0.05},
    "sequence-mean-kl-entropy": {
        "use_kl_loss": True,
        "kl_loss_coef": 0.5,
        "algorithm.entropy_coef": 0.05,
        "algorithm.loss_norm": "sequence_mean",
    },
    "dr-grpo": {"algorithm.loss_norm": "dr_grpo"},
    "dr-grpo-kl-entropy": {
        "use_kl_loss": True,
        "kl_loss_coef": 0.5,
        "algorithm.entropy_coef": 0.05,
        "algorithm.loss_norm": "dr_grpo",
    },
    "cispo": {"algorithm.policy_loss": "cispo"},
    "sft": {"algorithm.policy_loss": "sft"},
    "dppo-tv": {"algorithm.policy_loss": "dppo_tv", "algorithm.clip_low": 0.01, "algorithm.clip_high": 0.01},
    "dppo-kl": {"algorithm.policy_loss": "dppo_kl", "algorithm.clip_low": 0.001, "algorithm.clip_high": 0.001},
    "sapo": {"algorithm.policy_loss": "sapo"},
    "corrected-kl": {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k3_corrected"},
    "own": {"algorithm.policy_loss": "support.own_loss->fading"},
    "one-update": {"mini_batch_num": 1, "use_kl_loss": True, "kl_loss_coef": 0.5, "algorithm.entropy_coef": 0.05},
}


def make_case(name: str, **more: Any) -> Any:
    """The configuration of a case."""
    from ajet.config import make_config

    given = {
        "mini_batch_num": 2,
        "use_kl_loss": False,
        "optim.lr": LR,
        "optim.weight_decay": 0.0,
        "optim.clip_grad": 1e9,
        **CASES[name],
        **more,
    }
    own = {f"trainer_common.{key}": value for key, value in given.items()}
    return make_config({"data.max_response_length": 60, "model.path": MODEL, **own})


def make_batch(*, sampler_gap: float = 0.05) -> list[list[Any]]:
    """Groups of episodes. Recorded logprobs are the model's, or so far off."""
    groups = [
        *make_groups(LINEAR, groups=2, size=4, seed=5),
        *make_groups(BRANCHING, groups=2, size=3, seed=6),
    ]
    for number, group in enumerate(groups):
        for episode in group:
            episode.group_id, episode.task_id = f"g{number}", f"task{number}"
            episode.episode_id = f"e{number}-{episode.repeat}"
    del groups[1][1]  # it failed, and was left out of its group
    for episode in groups[2]:
        episode.reward = 1.0  # nothing to compare: not trained
    groups += deepcopy(played())
    _sample_anew(groups, sampler_gap)
    return groups


@cache
def played() -> list[list[Any]]:
    """Groups that the embedded engine played: the last one's episodes are masked, because they were cut."""
    from ajet.config import make_config
    from ajet.schema.task import Task
    from ajet.task_runner.runtime import Runtime

    config = make_config(
        {
            "model.path": MODEL,
            "failure_reward.truncated": "mask",
            "rollout.user_workflow": f"{Path(__file__).with_name('stoppers.py')}->Stopper",
            "rollout.num_repeat": 6,
            "rollout.temperature": 1.0,
            "rollout.max_response_length_in_one_turn": 24,
            "rollout.compute_madness_checklist": [],
            "rollout.deterministic": True,
        }
    )
    tasks = [Task(main_query=query, task_id=query) for query in ("say it", "say more", "long")]
    with Runtime(config) as runtime:
        groups = runtime.run(runtime.pool.run_groups(tasks, step=1))
    assert any(group.failed for group in groups if group.complete)
    groups = [group for group in groups if group.complete]
    stopped, cut = groups[:-1], groups[-1]
    calls = [call for group in stopped for episode in group.episodes for call in episode.tree.calls]
    assert len({int(call.mask.sum()) for call in calls if call.sampling.stop and call.finish_reason == "stop"}) > 2
    assert cut.task_id == "long" and not any(call.mask.any() for episode in cut.episodes for call in episode.tree.calls)
    for number, group in enumerate(groups):
        for episode in group.episodes:
            episode.group_id = f"p{number}"
            episode.episode_id = f"p{number}-{episode.repeat}"
    return [group.episodes for group in groups]


def _sample_anew(groups: list[list[Any]], gap: float) -> None:
    from ajet.engine.model_source import ModelSource
    from ajet.trainer.trainer import TrainSettings, Updater

    trainer = Updater(ModelSource.resolve(MODEL).model("float32", "sdpa", "cpu"), TrainSettings())
    rng = np.random.default_rng(1)
    trees = [episode.tree for group in groups for episode in group]
    for (index, call), values in trainer.logprobs([(tree, _everything(tree)) for tree in trees]).items():
        recorded = trees[index].calls[call]
        recorded.logprobs[recorded.mask] = values + rng.normal(0, gap, len(values))


def _everything(tree: Any) -> Any:
    from ajet.trainer.credit import CallCredit, EpisodeCredit

    return EpisodeCredit("", [CallCredit([(1.0, 1.0)]) for _ in tree.calls])


def credited(groups: list[list[Any]], config: Any) -> list[tuple[Any, Any]]:
    """Trees and their credit, as the local backbone computes it."""
    from ajet.backbone.training_settings import credit_settings
    from ajet.trainer.credit import compute_credit, imitation_credit, summarise

    summaries = [[summarise(episode) for episode in group] for group in groups]
    algorithm = config.ajet.trainer_common.algorithm
    if algorithm.policy_loss == "sft":
        chosen = [[one for one in group if one.reward >= algorithm.sft.min_reward] for group in summaries]
        credit = imitation_credit(chosen, credit_settings(config))
    else:
        credit = compute_credit(summaries, credit_settings(config))
    by_id = {episode.episode_id: episode for episode in credit.episodes}
    episodes = [episode for group in groups for episode in group]
    return [(episode.tree, by_id[episode.episode_id]) for episode in episodes if episode.episode_id in by_id]


def reference_model() -> Any:
    """The model, a little off."""
    import torch

    from ajet.engine.model_source import ModelSource

    model = ModelSource.resolve(MODEL).model("float32", "sdpa", "cpu").requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02 * parameter.abs().mean())
    return model


def local_trainer(config: Any, *, adam: bool = False) -> Any:
    """The embedded trainer, by default with plain descent in place of AdamW."""
    import torch

    from ajet.backbone.training_settings import train_settings
    from ajet.engine.model_source import ModelSource
    from ajet.trainer.trainer import Updater

    settings = train_settings(config, STEPS)
    model = ModelSource.resolve(MODEL).model("float32", "sdpa", "cpu")
    trainer = Updater(model, settings, reference=reference_model() if settings.loss.kl_coef else None)
    if not adam:
        trainer.optimizer._adam = torch.optim.SGD(model.parameters(), lr=LR)  # type: ignore[assignment]
    return trainer


def local_change(
    groups: list[list[Any]], config: Any, *, steps: int = 1, adam: bool = False
) -> tuple[dict[str, Any], dict[str, float]]:
    """What steps of the embedded trainer add to each parameter, and the last one's metrics."""
    trainer = local_trainer(config, adam=adam)
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    for _ in range(steps):
        metrics = trainer.update(credited(groups, config))
    change = {name: value.detach() - before[name] for name, value in trainer.model.named_parameters()}
    return change, metrics


def known_logprobs(groups: list[list[Any]], model: Any) -> dict[tuple[str, int], Any]:
    """A model's logprobs of each call's trained tokens, by episode and call."""
    from ajet.trainer.trainer import TrainSettings, Updater

    episodes = [episode for group in groups for episode in group]
    measured = Updater(model.requires_grad_(True), TrainSettings()).logprobs(
        [(episode.tree, _everything(episode.tree)) for episode in episodes]
    )
    return {(episodes[index].episode_id, call): values for (index, call), values in measured.items()}


def samples_of(episode: Any) -> Any:
    """The episode's linear samples."""
    from ajet.context_tracker.samples import linear_samples

    return linear_samples(
        episode.tree,
        shared_token_loss="once",
        max_prompt_length=10_000,
        max_response_length=10_000,
        max_samples=30,
        episode_id=episode.episode_id,
    )[0]


def aligned(episode: Any, sample: Any, known: dict[tuple[str, int], Any]) -> Any:
    """Known logprobs where the tokens stand in a row; 0 elsewhere."""
    out = np.zeros(len(sample.response_ids), np.float32)
    for index in range(len(episode.tree.calls)):
        at = sample.response_mask & (sample.call_of_token == index)
        if at.any():
            out[at] = known[episode.episode_id, index]
    return out


def assert_same_change(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Each parameter has changed by the same."""
    assert theirs.keys() == ours.keys()
    for name, change in ours.items():
        largest = float(change.abs().max())
        assert largest > 0
        difference = float((change - theirs[name]).abs().max())
        assert difference <= BOUND * largest + ROUNDING, (name, difference, largest)
