"""One update by verl's own worker has the gradient of the embedded trainer. Needs verl (`make test-verl`)."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from episodes import BRANCHING, LINEAR, make_groups
from ray_runs import installed

os.environ.setdefault("VERL_PLATFORM", "cpu")  # read when verl is imported
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed("verl"), reason="needs verl: run `make test-verl`"),
]

BOUND = 1e-4
LR = 50.0
"""Of plain SGD: the gradient is (weights before - weights after) / LR, and stands well above float32's grain."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    """verl's training worker on the CPU, without Ray."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    import torch
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

    from ajet.engine.model_source import ModelSource

    model = HFModelConfig(
        path=ModelSource.resolve("tiny:qwen2-0.3m").path,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        model_dtype="fp32",
        use_torch_compile=False,
        mixed_precision={"param_dtype": "fp32"},
        use_dynamic_bsz=True,
        max_token_len_per_gpu=150,
        infer_max_token_len_per_gpu=150,
    )
    made = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(
                lr=LR, optimizer="SGD", betas=None, weight_decay=0.0, clip_grad=1e9, total_training_steps=1000
            ),
            checkpoint_config=CheckpointConfig(),
        )
    )
    made.reset()
    yield made
    torch.distributed.destroy_process_group()


def case(shape: list[int], *, loss: str, kl: float = 0.0, norm: str = "token_mean", correction: bool = False) -> Any:
    name = "linear" if shape == LINEAR else "branching"
    return pytest.param(shape, loss, kl, norm, correction, id=f"{loss}-{name}-{norm}-kl{kl}-tis{correction}")


@pytest.mark.parametrize(
    ("shape", "loss", "kl", "norm", "correction"),
    [
        case(LINEAR, loss="ppo"),
        case(BRANCHING, loss="ppo"),
        case(BRANCHING, loss="ppo", norm="sequence_mean"),
        case(BRANCHING, loss="ppo", norm="dr_grpo"),
        case(BRANCHING, loss="ppo", correction=True),
        case(LINEAR, loss="ppo", kl=0.5),
        case(BRANCHING, loss="ppo", kl=0.5),
        case(LINEAR, loss="gspo"),
        case(BRANCHING, loss="cispo"),
        case(BRANCHING, loss="sft"),
    ],
)
def test_gradients_equal_the_embedded_trainers(
    worker: Any, shape: list[int], loss: str, kl: float, norm: str, correction: bool
) -> None:
    from ajet.credit import CreditSettings, LossNorm

    groups = make_groups(shape, groups=3, size=3, seed=5)
    settings = CreditSettings(loss_norm=LossNorm(norm), dr_grpo_length=40.0)
    theirs = verl_gradient(worker, groups, settings, loss=loss, kl=kl, correction=correction)
    ours = embedded_gradient(groups, settings, loss=loss, kl=kl, correction=correction)
    assert theirs.keys() == ours.keys()
    for name, gradient in ours.items():
        largest = float(gradient.abs().max())
        assert largest > 0
        assert float((gradient - theirs[name]).abs().max()) / largest <= BOUND, name


def known(groups: Any, kind: int) -> dict[tuple[str, int], np.ndarray]:
    """Invented old (0) and reference (1) logprobs of each call's tokens: near the recorded ones, so clipping acts."""
    values = {}
    for group in groups:
        for episode in group:
            for index, call in enumerate(episode.tree.calls):
                rng = np.random.default_rng([kind, hash_of(episode.episode_id), index])
                values[episode.episode_id, index] = (call.logprobs + rng.normal(0, 0.3, len(call.logprobs))).astype(
                    np.float32
                )
    return values


def hash_of(text: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(text)) % 10_007


def verl_gradient(worker: Any, groups: Any, settings: Any, *, loss: str, kl: float, correction: bool) -> dict[str, Any]:
    import torch
    from tensordict import TensorDict
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPActorConfig
    from verl.workers.config.actor import PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    from ajet.backbone.ray.credit import credit_batch
    from ajet.backbone.ray.verl.rows import rows_of
    from ajet.context_tracker.samples import linear_samples

    old, reference = known(groups, 0), known(groups, 1)
    rows, fields = [], []
    for group in groups:
        for episode in group:
            samples, _ = linear_samples(
                episode.tree,
                shared_token_loss="once",
                max_prompt_length=10_000,
                max_response_length=10_000,
                max_samples=30,
                episode_id=episode.episode_id,
            )
            for row, sample in zip(rows_of(episode, samples, uid=episode.group_id, step=1), samples, strict=True):
                rows.append(row)
                extra = {
                    "old_log_probs": torch.from_numpy(aligned(episode, sample, old)),
                    "ref_log_prob": torch.from_numpy(aligned(episode, sample, reference)),
                }
                fields.append({**row.fields, **extra})
    least = -100.0 if loss == "sft" else None
    credit = credit_batch([row.key for row in rows], [row.tag for row in rows], settings, imitate_from=least)
    names = ["prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask", "old_log_probs"]
    if kl:
        names.append("ref_log_prob")
    columns = {name: [torch.as_tensor(row[name]) for row in fields] for name in names}
    columns["advantages"] = [torch.from_numpy(dense) for dense in credit.dense]
    if correction:
        weights = []
        for row in fields:
            result, _, _ = compute_rollout_correction_and_rejection_mask(
                old_log_prob=row["old_log_probs"][None],
                rollout_log_prob=row["rollout_log_probs"][None],
                response_mask=row["response_mask"][None],
                rollout_is="token",
                rollout_is_threshold=1.2,
            )
            weights.append(result.batch["rollout_is_weights"][0])
        columns["rollout_is_weights"] = weights
    data = TensorDict(
        {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in columns.items()},
        batch_size=len(rows),
    )
    config = FSDPActorConfig(
        strategy="fsdp2",
        use_dynamic_bsz=True,
        rollout_n=1,
        ppo_mini_batch_size=len(rows),
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        loss_agg_mode="token-mean",
        policy_loss=PolicyLossConfig(loss_mode=f"ajet_{loss}"),
        use_kl_loss=kl > 0,
        kl_loss_coef=kl,
        kl_loss_type="k3+",
    )
    worker.set_loss_fn(partial(ppo_loss, config=config))
    tu.assign_non_tensor(
        data, temperature=1.0, mini_batch_size=len(rows), global_batch_size=len(rows), epochs=1, seed=1,
        calculate_entropy=False, dataloader_kwargs={"shuffle": False},
    )  # fmt: skip
    before = weights_of(worker)
    worker.train_mini_batch(data)
    after = weights_of(worker)
    with torch.no_grad():
        for name, parameter in worker.engine.module.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.copy_(before[name])
    return {name: (before[name] - after[name]) / LR for name in before}


def aligned(episode: Any, sample: Any, values: Any) -> Any:
    """A call's values where its tokens stand in a row."""
    out = np.zeros(len(sample.response_ids), np.float32)
    for index in range(len(episode.tree.calls)):
        at = sample.call_of_token == index
        if at.any():
            out[at] = values[episode.episode_id, index][-int(at.sum()) :]
    return out


def weights_of(worker: Any) -> dict[str, Any]:
    named = worker.engine.module.named_parameters()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in named
    }


def embedded_gradient(groups: Any, settings: Any, *, loss: str, kl: float, correction: bool) -> dict[str, Any]:
    import torch

    from ajet.credit import compute_credit, imitation_credit, summarise
    from ajet.engine.model_source import ModelSource
    from ajet.trainer.correction import Correction
    from ajet.trainer.forward import PackForward
    from ajet.trainer.loss import EdgeTensors, LossSettings, PolicyLoss, policy_loss
    from ajet.trainer.pack import items_of, make_packs

    model = copy.deepcopy(ModelSource.resolve("tiny:qwen2-0.3m").model("float32", "sdpa", "cpu"))
    episodes = [episode for group in groups for episode in group]
    summaries = [[summarise(episode) for episode in group] for group in groups]
    credit = imitation_credit(summaries, settings) if loss == "sft" else compute_credit(summaries, settings)
    old, reference = known(groups, 0), known(groups, 1)
    losses = LossSettings(
        policy_loss=PolicyLoss(loss), kl_coef=kl, correction=Correction(cap=1.2) if correction else None
    )
    forward = PackForward()
    items = items_of(zip([episode.tree for episode in episodes], credit.episodes, strict=True))
    with forward.session(model):
        for pack in make_packs(items):
            edges = pack.edges
            at = list(zip(edges.episode.tolist(), edges.call.tolist(), edges.token.tolist(), strict=True))
            tensors = EdgeTensors(
                sampler_E=torch.tensor(edges.sampler_logprob, dtype=torch.float32),
                trajectory_E=torch.from_numpy(edges.trajectory),
                entry_edge_M=torch.from_numpy(edges.entry_edge),
                advantage_M=torch.tensor(edges.entry_advantage, dtype=torch.float32),
                weight_M=torch.tensor(edges.entry_weight, dtype=torch.float32),
                old_E=torch.tensor([old[episodes[e].episode_id, c][t] for e, c, t in at]),
                reference_E=torch.tensor([reference[episodes[e].episode_id, c][t] for e, c, t in at]) if kl else None,
            )
            policy_loss(forward(model, pack).logprob_E, tensors, losses).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}
