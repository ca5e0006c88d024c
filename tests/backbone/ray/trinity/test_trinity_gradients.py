"""A step of Trinity's GPU trainer, its loss and its worker, changes the weights as one of the embedded trainer does.

Worker and loss are Trinity's own, on the CPU and without Ray. Needs Trinity.
"""

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
from support.ray_runs import enter_trinity_on_cpu, installed
from support.verl_worker import process_group, training_worker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed("trinity-rft"), reason="needs Trinity: run `make test-trinity`"),
]
if installed("trinity-rft"):
    enter_trinity_on_cpu()


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """The worker of verl that Trinity builds, without Ray."""
    import torch
    import verl.utils.attention_utils as attention
    import verl.workers.engine.fsdp.transformer_impl as fsdp
    from verl.workers.engine import EngineRegistry

    attention._get_attention_functions = lambda: (None, None, None, unpad)  # else flash-attn's
    for name in ("max_memory_allocated", "max_memory_reserved"):  # asked for metrics
        setattr(torch.cpu, name, lambda: 0)
    with process_group():
        torch.distributed.init_process_group("gloo")
        EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cpu")(fsdp.FSDPEngineWithLMHead)
        yield


def unpad(values: Any, mask: Any) -> tuple[Any, Any, Any]:
    """The values where the mask is set, their places, and where each row begins."""
    import torch

    places = mask.flatten().nonzero().flatten()
    begins = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    return values.flatten(0, 1)[places], places, begins


def composed(config: Any) -> Any:
    """Trinity's configuration for GPUs."""
    from ajet.backbone.ray.facts import Machine, RunFacts, RunPayload
    from ajet.backbone.ray.trinity.config import compose_trinity_config, trinity_settings
    from ajet.engine.model_source import ModelSource

    path = ModelSource.resolve(MODEL).path
    payload = RunPayload(config.model_dump(mode="json"), os.getcwd(), "", path, total_steps=STEPS).encode()
    config.ajet.trainer_common.n_gpus_per_node = 2
    config.ajet.rollout.n_vllm_engine = 1
    facts = RunFacts(path, Path("/c"), STEPS, payload=payload, scratch=Path("/s"))
    return compose_trinity_config(trinity_settings(config, facts, Machine("cuda")))


def make_worker() -> Any:
    """Its engine on the CPU, with plain descent."""
    import torch

    from ajet.engine.model_source import ModelSource
    from support.equality import LR

    path = ModelSource.resolve(MODEL).path
    worker = training_worker(path, lr=LR, clip_grad=1e9, total_training_steps=STEPS)
    worker.engine.optimizer = torch.optim.SGD(worker.engine.module.parameters(), lr=LR)
    return worker


def trinity_change(worker: Any, groups: Any, config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a step of the worker adds to each parameter, and its metrics."""
    import logging

    import torch
    from tensordict import TensorDict
    from trinity.trainer.verl.losses import build_trinity_loss
    from trinity.trainer.verl.utils import to_data_proto
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    from ajet.backbone.ray.rows import UPDATES, group_experiences
    from ajet.backbone.ray.trinity.algorithm import credited, in_place
    from ajet.schema.episode import EpisodeGroup
    from ajet.trainer.credit import LossNorm

    reference = known_logprobs(groups, reference_model())
    rows, known = [], {}
    for place, group in enumerate(groups):
        samples = [samples_of(episode) for episode in group]
        whole = EpisodeGroup(group[0].group_id, group[0].task_id, group)
        made = group_experiences(whole, samples, uid=group[0].group_id, span=(1.0, 2.0))
        pairs = [(episode, sample) for episode, mine in zip(group, samples, strict=True) for sample in mine]
        rows += made
        for row in made:
            row.eid.task = place
        if pairs:
            for row, pair in zip(made, pairs, strict=True):
                known[id(row)] = torch.from_numpy(aligned(*pair, reference))
    kept, _ = credited(rows, config)
    trinity = composed(config)
    sampling = trinity.algorithm.sample_strategy_args
    placed = in_place(
        kept,
        norm=LossNorm(sampling["norm"]),
        updates=sampling["updates"],
        ranks=sampling["ranks"],
        seed=(sampling["seed"], 0),
    )
    proto = to_data_proto(placed, 0, torch.nn.Module(), logging.getLogger())
    width = proto.batch["responses"].shape[1]
    referred = [known.get(id(row), torch.zeros(1)) for row in placed]
    proto.batch["ref_log_prob"] = torch.stack(
        [torch.nn.functional.pad(values, (0, width - len(values))) for values in referred]
    )
    proto.batch["old_log_probs"] = proto.batch["rollout_log_probs"]
    columns = {name: values for name, values in proto.batch.items()}
    data = left_right_2_no_padding(TensorDict(columns, batch_size=len(placed)))
    size = len(placed) // placed[0].info[UPDATES]
    tu.assign_non_tensor(
        data,
        calculate_entropy=trinity.algorithm.entropy_loss_fn != "none",
        global_batch_size=size,
        mini_batch_size=size,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        temperature=1.0,
        compute_loss=True,
    )
    worker.set_loss_fn(build_trinity_loss(trinity.algorithm))
    before = weights_of(worker)
    result = worker.train_mini_batch(data)
    after = weights_of(worker)
    return {name: after[name] - before[name] for name in before}, tu.get(result, "metrics")


def weights_of(worker: Any) -> dict[str, Any]:
    named = worker.engine.module.named_parameters()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in named
    }


@pytest.mark.parametrize("case", list(CASES))
def test_a_step_changes_the_weights_as_the_embedded_trainers_does(case: str) -> None:
    config = make_case(case)
    groups = make_batch(sampler_gap=0.0)
    ours, metrics = local_change(groups, config)
    theirs, reported = trinity_change(make_worker(), groups, config)
    assert_same_change(ours, theirs)
    assert metrics["train/updates"] == len(reported["grad_norm"])


def test_the_sequence_mask_leaves_out_the_same_tokens() -> None:
    """In groups where each agent of an episode gives one row, which is its trajectory."""
    config = make_case("ppo", **{"algorithm.sequence_mask": 0.003})
    groups = make_batch(sampler_gap=0.0)[:2]
    ours, metrics = local_change(groups, config)
    assert 0 < metrics["loss/sequence_masked"] < 1  # by the second update, the policy has moved
    assert_same_change(ours, trinity_change(make_worker(), groups, config)[0])
