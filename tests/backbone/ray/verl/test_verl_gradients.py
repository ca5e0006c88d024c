"""A step of verl's own worker changes the weights as a step of the embedded trainer does. Needs verl."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.equality import (
    CASES,
    MODEL,
    STEPS,
    aligned,
    assert_same_change,
    known_logprobs,
    local_change,
    make_batch,
    make_case,
    reference_model,
    samples_of,
)
from support.ray_runs import installed
from support.verl_worker import process_group, training_worker

os.environ.setdefault("AJET_PLATFORM", "cpu")  # read when verl is imported
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed("verl"), reason="needs verl: run `make test-verl`"),
]


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with process_group():
        yield


def make_worker(config: Any, *, optimizer: str = "SGD") -> Any:
    """verl's training worker on the CPU, with our engine, as our mapping configures them."""
    import verl  # noqa: F401 - loads our plugin, which registers the engine

    from ajet.backbone.ray.facts import Machine, RunFacts, RunPayload
    from ajet.backbone.ray.verl.config import verl_settings
    from ajet.backbone.ray.verl.train_engine import AjetTrainEngine
    from ajet.engine.model_source import ModelSource

    path = ModelSource.resolve(MODEL).path
    payload = RunPayload(config.model_dump(mode="json"), os.getcwd(), "", path, total_steps=STEPS).encode()
    settings = verl_settings(config, RunFacts(path, Path("/c"), STEPS, payload=payload), Machine("cpu"))
    place = "actor_rollout_ref.actor.optim."
    optim = {key.removeprefix(place): value for key, value in settings.items() if key.startswith(place)}
    worker = training_worker(path, optimizer=optimizer, total_training_steps=STEPS, **optim)
    assert isinstance(worker.engine, AjetTrainEngine)
    worker.set_loss_fn(lambda **_: pytest.fail("verl's own loss was asked"))
    return worker


def verl_change(worker: Any, groups: Any, config: Any, *, ranks: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a step of the worker adds to each parameter, and its metrics."""
    from verl.utils import tensordict_utils as tu

    data, size = batch_for_verl(groups, config, ranks=ranks)
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        mini_batch_size=size,
        global_batch_size=size,
        epochs=1,
        seed=1,
        calculate_entropy=bool(config.ajet.trainer_common.algorithm.entropy_coef),
        dataloader_kwargs={"shuffle": False},
    )
    before = weights_of(worker)
    result = worker.train_mini_batch(data)
    after = weights_of(worker)
    return {name: after[name] - before[name] for name in before}, tu.get(result, "metrics")


def batch_for_verl(groups: Any, config: Any, *, ranks: int = 1) -> tuple[Any, int]:
    """The batch as the sampler and verl's trainer leave it, and the rows of an update."""
    import numpy as np
    import torch
    from tensordict import TensorDict

    from ajet.backbone.ray.credit import BatchRow, credit_batch, lay_out
    from ajet.backbone.ray.rows import WEIGHTS, blank_row, group_rows
    from ajet.backbone.training_settings import credit_settings
    from ajet.engine.model_source import ModelSource
    from ajet.schema.episode import EpisodeGroup

    common = config.ajet.trainer_common
    old = known_logprobs(groups, ModelSource.resolve(MODEL).model("float32", "sdpa", "cpu"))
    reference = known_logprobs(groups, reference_model())
    rows, fields = [], []
    for group in groups:
        samples = [samples_of(episode) for episode in group]
        made = group_rows(EpisodeGroup(group[0].group_id, group[0].task_id, group), samples, step=1)
        pairs = [(episode, sample) for episode, mine in zip(group, samples, strict=True) for sample in mine]
        rows += made
        for row, pair in zip(made, pairs or [None], strict=True):
            known = [torch.zeros(1)] * 2
            if pair is not None:
                known = [torch.from_numpy(aligned(*pair, logprobs)) for logprobs in (old, reference)]
            fields.append(row.fields | {"old_log_probs": known[0], "ref_log_prob": known[1]})
    least = common.algorithm.sft.min_reward if common.algorithm.policy_loss == "sft" else None
    settings = credit_settings(config)
    credit = credit_batch([row.key for row in rows], [row.tag for row in rows], settings, imitate_from=least)
    kept = [index for index, trained in enumerate(credit.trained) if trained]
    layout = lay_out(
        [
            BatchRow(
                rows[index].key.rsplit("_", 1)[0],
                rows[index].tag["seq_len"],
                int(np.count_nonzero(credit.weights[index])),
            )
            for index in kept
        ],
        norm=settings.loss_norm,
        updates=common.mini_batch_num,
        ranks=ranks,
        multiple=1,
        seed=(common.seed, 0),
    )
    one = torch.zeros(1)
    blank = blank_row("blank", step=1).fields | {"advantages": one, "old_log_probs": one, "ref_log_prob": one}
    placed = []
    for place in layout.order:
        if place is None:
            placed.append(blank)
            continue
        index = kept[place]
        weights = torch.from_numpy(credit.weights[index]) * layout.scales[place]
        placed.append(fields[index] | {"advantages": torch.from_numpy(credit.advantages[index]), WEIGHTS: weights})
    names = ["prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask", "rollout_log_probs"]
    names += ["old_log_probs", "ref_log_prob", "advantages", WEIGHTS]
    columns = {
        name: torch.nested.as_nested_tensor([row[name] for row in placed], layout=torch.jagged) for name in names
    }
    return TensorDict(columns, batch_size=len(placed)), layout.size


def weights_of(worker: Any) -> dict[str, Any]:
    named = worker.engine.module.named_parameters()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in named
    }


CORRECTED = {
    "algorithm.rollout_correction.mode": "masked",
    "algorithm.rollout_correction.low": 0.95,
    "algorithm.rollout_correction.high": 1.05,
}


def test_the_sampler_is_corrected_for_as_in_the_embedded_trainer() -> None:
    config = make_case("kl", **CORRECTED)
    groups = make_batch()
    ours, metrics = local_change(groups, config)
    assert 0 < metrics["loss/correction_masked"] < 1
    assert_same_change(ours, verl_change(make_worker(config), groups, config)[0])


def test_the_sequence_mask_leaves_out_the_same_tokens() -> None:
    """In groups where each agent of an episode gives one row, which is its trajectory."""
    config = make_case("ppo", **{"algorithm.sequence_mask": 0.003})
    groups = make_batch()[:2]
    ours, metrics = local_change(groups, config)
    assert 0 < metrics["loss/sequence_masked"] < 1
    assert_same_change(ours, verl_change(make_worker(config), groups, config)[0])


def test_optimiser_and_learning_rate_are_the_embedded_trainers() -> None:
    """AdamW with decay, warm-up and clipping over three steps. A large eps keeps changes in proportion to gradients."""
    given = {"eps": 1.0, "lr": 20.0, "weight_decay": 0.01, "clip_grad": 0.5, "lr_warmup_steps": 2}
    given |= {"lr_scheduler_type": "linear", "min_lr_ratio": 0.1}
    config = make_case("sft", mini_batch_num=1, **{f"optim.{key}": value for key, value in given.items()})
    groups = make_batch()
    ours, metrics = local_change(groups, config, steps=3, adam=True)
    worker = make_worker(config, optimizer="AdamW")
    before = weights_of(worker)
    rates = [verl_change(worker, groups, config)[1]["lr"][0] for _ in range(3)]
    after = weights_of(worker)
    assert_same_change(ours, {name: after[name] - before[name] for name in before})
    assert metrics["train/lr"] == pytest.approx(rates[2])


def test_a_batch_that_teaches_nothing_changes_nothing() -> None:
    config = make_case("one-update", **{"optim.weight_decay": 0.1})
    groups = make_batch()
    for group in groups:
        for episode in group:
            episode.reward = 1.0
    worker = make_worker(config, optimizer="AdamW")
    change, _ = verl_change(worker, groups, config)
    assert not any(values.any() for values in change.values())
    assert not worker.engine.optimizer.state


@pytest.mark.parametrize("case", list(CASES))
def test_a_step_changes_the_weights_as_the_embedded_trainers_does(case: str) -> None:
    config = make_case(case)
    groups = make_batch()
    ours, metrics = local_change(groups, config)
    theirs, reported = verl_change(make_worker(config), groups, config)
    assert_same_change(ours, theirs)
    assert metrics["train/updates"] == len(reported["grad_norm"])
    if case != "sft":
        assert max(reported["sampler_gap_max"]) == pytest.approx(metrics["loss/sampler_gap_max"], rel=1e-4)
    if case in ("ppo", "kl"):
        assert metrics["loss/clip_fraction"] > 0
