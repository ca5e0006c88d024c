"""Credit through Trinity's experiences is `local`'s, however an episode comes apart. Needs Trinity."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.episodes import BRANCHING, LINEAR, make_groups
from support.ray_runs import enter_trinity_on_cpu, installed

pytestmark = pytest.mark.skipif(not installed("trinity-rft"), reason="needs Trinity: run `make test-trinity`")
if installed("trinity-rft"):
    enter_trinity_on_cpu()

NORMS = ["token_mean", "sequence_mean", "dr_grpo"]


def config(**overrides: Any) -> Any:
    from ajet.config import make_config

    return make_config({f"trainer_common.algorithm.{key}": value for key, value in overrides.items()})


def experiences(groups: list[list[Any]]) -> list[Any]:
    """As the workflow makes them, sent through Trinity's own serialisation."""
    from trinity.common.experience import Experience

    from ajet.backbone.ray.rows import experiences_of
    from ajet.context_tracker.samples import linear_samples

    rows = []
    for place, group in enumerate(groups):
        for episode in group:
            samples, _ = linear_samples(
                episode.tree,
                shared_token_loss="once",
                max_prompt_length=10_000,
                max_response_length=10_000,
                max_samples=30,
                episode_id=episode.episode_id,
            )
            made = experiences_of(episode, samples, uid=episode.group_id, span=(1.0, 2.0))
            for row in made:  # as Trinity's runner does
                row.eid.batch, row.eid.task = 1, place
            rows += made
    return list(Experience.deserialize_many(Experience.serialize_many(rows)))


def local_credit(groups: list[list[Any]], loaded: Any) -> dict[str, Any]:
    from ajet.backbone.training_settings import credit_settings
    from ajet.trainer.credit import compute_credit, summarise

    credit = compute_credit([[summarise(episode) for episode in group] for group in groups], credit_settings(loaded))
    return {episode.episode_id: episode for episode in credit.episodes}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [LINEAR, BRANCHING], ids=["linear", "branching"])
def test_every_token_gets_the_credit_that_local_gives_it(shape: list[int], norm: str) -> None:
    import json

    from ajet.backbone.ray.credit import SEGMENTS, SUMMARY
    from ajet.backbone.ray.trinity.algorithm import credited
    from ajet.trainer.credit import EpisodeSummary

    groups = make_groups(shape, groups=3, size=4)
    loaded = config(loss_norm=norm)
    expected = local_credit(groups, loaded)
    rows, _ = credited(experiences(groups), loaded)
    seen = {}
    for row in rows:
        episode = EpisodeSummary.from_json(json.loads(row.info[SUMMARY])).episode_id
        for call, start, end in row.info[SEGMENTS]:
            advantage, weight = expected[episode].calls[call].entries[0]
            assert row.advantages[start:end].numpy() == pytest.approx(advantage, rel=1e-6)
            assert row.returns[start:end].numpy() == pytest.approx(weight, rel=1e-6)
            seen[episode, call] = seen.get((episode, call), 0) + end - start
        outside = ~row.action_mask.numpy()
        assert not row.returns.numpy()[outside].any()
    trained = {
        (episode.episode_id, index): int(call.mask.sum())
        for group in groups
        for episode in group
        for index, call in enumerate(episode.tree.calls)
        if call.mask.any()
    }
    assert seen == trained


def test_an_episode_that_straddles_two_steps_keeps_its_total_weight() -> None:
    from ajet.backbone.ray.rows import ROW
    from ajet.backbone.ray.trinity.algorithm import credited

    groups = make_groups(BRANCHING, groups=2, size=3)
    loaded = config(loss_norm="sequence_mean")
    rows, _ = credited(experiences(groups), loaded)
    episodes = {row.info[ROW].rsplit("_", 1)[0] for row in rows}
    owners = [row.info[ROW].rsplit("_", 1)[0] for row in rows]
    cut = next(index for index in range(1, len(rows)) if owners[index] == owners[index - 1])  # through an episode
    steps = [rows[:cut], rows[cut:]]
    total: dict[str, float] = {}
    for step in steps:
        for row in step:
            name = row.info[ROW].rsplit("_", 1)[0]
            total[name] = total.get(name, 0.0) + float(row.returns.sum())
    assert list(total.values()) == pytest.approx([1 / len(episodes)] * len(episodes), rel=1e-6)


@pytest.mark.parametrize("shape", [LINEAR, BRANCHING], ids=["linear", "branching"])
def test_the_cpu_train_engine_computes_the_embedded_trainers_gradient(shape: list[int]) -> None:
    """From trees through experiences and back to trees, against trees alone."""
    from ajet.backbone.ray.trinity.algorithm import credited
    from ajet.backbone.ray.trinity.cpu_trainer import trees_of
    from ajet.trainer.credit import LossNorm

    groups = make_groups(shape, groups=2, size=3, seed=3)
    loaded = config()
    credit = local_credit(groups, loaded)
    direct = [(episode.tree, credit[episode.episode_id]) for group in groups for episode in group]
    rows, _ = credited(experiences(groups), loaded)
    through = trees_of(rows, 1.0, LossNorm.DR_GRPO)
    assert len(through) == len(direct)
    assert {credit.norm for _, credit in through} == {LossNorm.DR_GRPO}
    one, other = gradient(direct), gradient(through)
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert np.abs(values - other[name]).max() <= 1e-5 * np.abs(values).max(), name


def gradient(batch: Any) -> dict[str, Any]:
    """What one step of plain descent changes."""
    from ajet.engine.model_source import ModelSource
    from ajet.trainer.optimizer import OptimSettings
    from ajet.trainer.trainer import TrainSettings, Updater

    model = ModelSource.resolve("tiny:qwen2-0.3m").model("float32", "sdpa")
    trainer = Updater(model, TrainSettings(optim=OptimSettings(lr=0.0, clip_grad=1e9)))
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(
            lambda grad, name=name: found.__setitem__(name, found.get(name, 0) + grad.double().numpy())
        )
    trainer.update(batch)
    return found


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "sft"])
def test_the_loss_with_kl_and_entropy_is_a_sum_over_tokens_whatever_the_micro_batches(kind: str) -> None:
    import torch

    from ajet.backbone.ray.facts import RunPayload
    from ajet.backbone.ray.trinity.algorithm import AjetEntropy, AjetPolicyLossWithReference
    from ajet.config import make_config

    given = make_config({"trainer_common.algorithm.policy_loss": kind, "trainer_common.kl_loss_coef": 0.3})
    payload = RunPayload(given.model_dump(mode="json"), "", "", "m").encode()
    generator = torch.Generator().manual_seed(1)
    old, new, advantages, reference = (torch.randn(32, 5, generator=generator) * 0.1 for _ in range(4))
    entropy = torch.rand(32, 5, generator=generator)
    mask = torch.rand(32, 5, generator=generator) > 0.3
    weights = torch.rand(32, 5, generator=generator) * mask
    loss = AjetPolicyLossWithReference(payload=payload, scale=2.0)
    bonus = AjetEntropy(entropy_coef=0.1, scale=2.0)

    def of(rows: slice) -> float:
        fields = {"action_mask": mask[rows], "advantages": advantages[rows], "returns": weights[rows]}
        policy, _ = loss(new[rows], old_logprob=old[rows], ref_logprob=reference[rows], **fields)
        return float(policy - bonus(entropy[rows], **fields)[0])

    for size in (1, 2, 8, 16):
        assert sum(of(slice(at, at + size)) for at in range(0, 32, size)) == pytest.approx(of(slice(0, 32)), rel=1e-4)
    assert set(loss.select_keys) == {"old_log_probs", "response_mask", "advantages", "returns", "ref_log_prob"}


def test_a_step_reads_the_whole_of_a_batch_whatever_comes_in_between() -> None:
    from ajet.backbone.ray.rows import BATCH
    from ajet.backbone.ray.trinity.algorithm import WholeBatches, credited
    from ajet.trainer.credit import LossNorm

    first, _ = credited(experiences(make_groups(BRANCHING, groups=2, seed=1)), config())
    second, _ = credited(experiences(make_groups(LINEAR, groups=2, seed=2)), config())

    class Store:
        """Gives the newest first, as Trinity's SQL store does; a batch arrives while another is being read."""

        def __init__(self) -> None:
            self.rows = list(first)

        async def read(self, batch_size: int) -> list[Any]:
            given = [self.rows.pop() for _ in range(batch_size)]
            if len(self.rows) == len(first) - 1:
                self.rows += second
            return given

    async def read() -> list[list[Any]]:
        strategy = WholeBatches.__new__(WholeBatches)
        strategy._reader, strategy._waiting = Store(), {}
        strategy._ranks, strategy._updates, strategy._norm, strategy._seed = 4, 1, LossNorm.TOKEN_MEAN, 0
        return [(await strategy.sample(step))[0] for step in (1, 2)]

    steps = asyncio.run(read())
    for rows in steps:
        names = {row.info[BATCH][0] for row in rows}
        assert len(names) == 1
        assert len(rows) % 4 == 0
    assert {id(row) for rows in steps for row in rows} >= {id(row) for row in (*first, *second)}


def test_rows_that_fill_up_train_nothing() -> None:
    from ajet.backbone.ray.rows import UPDATES
    from ajet.backbone.ray.trinity.algorithm import credited, in_place
    from ajet.backbone.ray.trinity.cpu_trainer import trees_of
    from ajet.backbone.ray.trinity.host import staleness
    from ajet.trainer.credit import LossNorm

    rows, _ = credited(experiences(make_groups(LINEAR, groups=1, size=3)), config())
    counted = staleness(rows, 5)
    placed = in_place(rows, norm=LossNorm.TOKEN_MEAN, updates=2, ranks=2, seed=(0, 0))
    assert (len(placed), placed[0].info[UPDATES]) == (4, 2)
    (blank,) = [row for row in placed if not row.action_mask.any()]
    assert trees_of([blank], 1.0, LossNorm.TOKEN_MEAN)[0][1].calls == []
    assert staleness(placed, 5) == counted


@pytest.mark.parametrize(
    ("versions", "every", "cut_off", "due"),
    [
        ([-1, 0, 1, 2, 3, 4], 2, None, [2, 4]),
        ([-1, 4, 5, 6], 2, None, [6]),  # resumed: what step 4 was worth is known
        ([-1, 4, 5, 6], 2, 4, [4, 6]),  # resumed, having been cut off in it
        ([-1, 0, 3, 6, 9, 12], 5, None, [6, 12]),  # synchronised every third step
        ([-1, 0, 1], 9, None, []),
        ([-1, 15, 16, 17, 18, 19, 19], 5, None, [19]),  # at the end
        ([-1, 19, 19], 5, 19, [19]),
        ([-1, 17, 18, 19], 20, None, []),  # never
    ],
)
def test_a_validation_is_due_with_the_weights_of_its_step(
    versions: list[int], every: int, cut_off: int | None, due: list[int]
) -> None:
    from ajet.backbone.ray.trinity.host import validation_is_due

    found = [
        version for before, version in pairwise(versions) if validation_is_due(before, version, every, 19, cut_off)
    ]
    assert found == due


def test_staleness_is_counted_by_token() -> None:
    from ajet.backbone.ray.rows import VERSIONS
    from ajet.backbone.ray.trinity.host import staleness

    rows: list[Any] = [
        SimpleNamespace(info={VERSIONS: [[3, 10], [4, 30]]}),
        SimpleNamespace(info={VERSIONS: [[4, 10]]}),
    ]
    assert staleness(rows, 4) == {
        "train/staleness": 0.2,
        "train/staleness/max": 1.0,
        "train/staleness/tokens@0": 40.0,
        "train/staleness/tokens@1": 10.0,
    }


def test_rows_are_in_the_order_of_tasks_however_their_groups_ended() -> None:
    """Mini-batches are drawn by it."""
    from ajet.backbone.ray.rows import ROW, ordered
    from ajet.backbone.ray.trinity.algorithm import credited, in_place
    from ajet.trainer.credit import LossNorm

    rows = experiences(make_groups(BRANCHING, groups=12, size=2))
    expected = [row.info[ROW] for row in rows]
    kept, _ = credited(rows[::-1], config())
    assert [row.info[ROW] for row in kept] == expected
    by_length = in_place(kept, norm=LossNorm.TOKEN_MEAN, updates=1, ranks=1, seed=(0, 0))
    assert [row.info[ROW] for row in by_length] != expected
    assert [row.info[ROW] for row in ordered(by_length)] == expected


def test_a_batch_without_a_usable_group_trains_nothing() -> None:
    """The trainer waits for each batch, so it is given one."""
    from ajet.backbone.ray.rows import empty_experience
    from ajet.backbone.ray.trinity.algorithm import credited, in_place
    from ajet.backbone.ray.trinity.cpu_trainer import trees_of
    from ajet.backbone.ray.trinity.host import staleness
    from ajet.schema.episode import EpisodeGroup, EpisodeStatus, Failure
    from ajet.trainer.credit import LossNorm

    episode = make_groups(LINEAR, groups=1, size=1)[0][0]
    episode.status, episode.reward = EpisodeStatus.WORKFLOW_ERROR, None
    episode.failure = Failure("KeyError", "'answer'")
    groups = [EpisodeGroup(f"7/{index}", "t", [], [episode], complete=False) for index in range(2)]
    rows, credit = credited([empty_experience(one, uid=one.group_id, span=(0.0, 1.0)) for one in groups], config())
    assert len(rows) == 2 and not any(row.returns.any() for row in rows)
    assert credit.episodes == [] and credit.metrics["credit/groups"] == 0
    placed = in_place(rows, norm=LossNorm.TOKEN_MEAN, updates=1, ranks=1, seed=(0, 0))
    assert [tree.trained_tokens for tree, _ in trees_of(placed, 1.0, LossNorm.TOKEN_MEAN)] == [0, 0]
    assert staleness(placed, 7) == {}


@pytest.mark.parametrize("users", [True, False])
def test_a_group_that_raises_ends_the_run(users: bool) -> None:
    """Trinity would go on without it."""
    from ajet.backbone.ray.trinity.host import GroupWorkflow
    from ajet.schema.errors import ConfigError

    reported: list[BaseException] = []

    class Runner:
        async def open(self) -> None:
            raise ConfigError("no such class") if users else ValueError("a judge that can't get ready")

        async def report(self, error: BaseException) -> None:
            reported.append(error)

    made: Any = object.__new__(GroupWorkflow)
    made._runner = Runner()
    made.task = SimpleNamespace(raw_task={"task": '{"task_id": "t"}'}, is_eval=False, batch_id=1, task_id=0)
    with pytest.raises((ConfigError, ValueError)) as raised:
        asyncio.run(made.run_async())
    assert reported == [raised.value]
