"""`AjetTrainEngine`: verl's FSDP engine with the embedded trainer's loss, optimiser and learning rate.

verl's own loss weighs the KL and entropy terms of all tokens alike, and sees weight and advantage of a token as one
number. Here a row has both, and `ajet.trainer.loss` makes the loss of a micro-batch from them: a sum over tokens, so it
is the same whatever rows, micro-batches and ranks they came in. verl's registry of engines is by device and vendor;
ours are registered for them, so verl builds ours. In a run that isn't ours (a script around verl's own trainer, where
ajet happens to be installed) it leaves everything to verl's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name
from verl.utils.metric import AggregationType, Metric
from verl.utils.model import convert_weight_keys
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import no_padding_2_padding

from ajet.backbone.ray.facts import KEY, RunPayload, checkpoint_step
from ajet.backbone.ray.rows import WEIGHTS
from ajet.backbone.ray.start import on_cpu
from ajet.backbone.training_settings import correction_settings, loss_settings, optim_settings
from ajet.trainer.loss import EdgeTensors, LossSettings, policy_loss

VENDORS = ("nvidia", "amd")
METRICS = {"policy/sum": "pg_loss", "kl/sum": "kl_loss", "clip_fraction/sum": "clip_fraction", "ratio/sum": "ratio",
           "weight/sum": "weight"}  # fmt: skip
"""Our sums, and the names under which verl reports them: `from_verl` divides by the weights."""
GAP = "sampler_gap_max"
"""The same of the largest difference between the sampler's log-probability and ours. verl's own is of probabilities."""


class AjetTrainEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """Finds the run's settings where verl keeps further arguments of the optimiser; without them, it is verl's engine.

    The optimiser's class and such arguments are what verl is told; weights that are no matrices don't decay.
    """

    optimizer: torch.optim.Optimizer
    _ours = False

    def initialize(self) -> None:
        """Read the settings, unless this is the reference model's engine, or the run isn't ours."""
        given = None if self.engine_config.forward_only else self.optimizer_config.override_optimizer_config
        if given and KEY in given:
            self._ours = True
            run = RunPayload.decode(given[KEY])
            config = run.load_config()
            self._loss = RowLoss(replace(loss_settings(config), correction=correction_settings(config)))
            self._optim = optim_settings(config, run.total_steps)
        super().initialize()

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        """One update. Rows without any weight change nothing, the optimiser's state included."""
        if not self._ours:
            return super().train_batch(data, loss_function)
        weights = data[WEIGHTS].values().abs().sum().to(next(self.module.parameters()).device)
        torch.distributed.all_reduce(weights, group=self.get_data_parallel_group())
        self._weighs = bool(weights > 0)
        return super().train_batch(data, self._loss)

    def save_checkpoint(self, local_path: str, *more: Any, **named: Any) -> None:
        """Those that earlier processes of the run saved are among the ones of which the newest are kept: verl's manager
        knows its own alone. `local_path`: `…/global_step_N/actor`."""
        if self._ours:
            saved = {*Path(local_path).parents[1].glob("global_step_*/actor")} - {Path(local_path)}
            others = [path for path in saved if checkpoint_step(str(path.parent)) is not None]
            others.sort(key=lambda path: path.stat().st_mtime)
            self.checkpoint_manager.previous_saved_paths = [str(path) for path in others]
        super().save_checkpoint(local_path, *more, **named)

    def lr_scheduler_step(self) -> float:
        """The rate of the step that is done: verl's is the next one's."""
        if not self._ours:
            return float(super().lr_scheduler_step())
        done = float(self.lr_scheduler.get_last_lr()[0])
        super().lr_scheduler_step()
        return done

    def optimizer_step(self) -> float:
        """Nothing, if nothing has a weight."""
        if not self._ours or self._weighs:
            return float(super().optimizer_step())
        self.optimizer.zero_grad()
        return 0.0

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """The weights with the adapters in them, for the rollout servers. verl rounds them to bfloat16, in which no
        server on a CPU computes: it would sample from another policy than the one that is trained."""
        if not on_cpu():
            yield from super()._merged_lora_per_tensor_param()
            return
        with merged_lora_context(self.module, backup_adapters=True):
            named = convert_weight_keys(normalize_peft_param_name(self.module.state_dict()), self.module)
            for name, tensor in named.items():
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
                yield name, whole.clone()  # they may share memory with what the context restores

    def _build_optimizer(self, module: Any) -> Any:
        if not self._ours:
            return super()._build_optimizer(module)
        settings = self._optim
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
        given = self.optimizer_config
        kind = getattr(import_module(given.optimizer_impl), given.optimizer)
        more = {key: value for key, value in given.override_optimizer_config.items() if key != KEY}
        if "adam" in given.optimizer.lower():
            more = {"betas": settings.betas, "eps": settings.eps, **more}
        return kind(groups, lr=settings.lr, **more)

    def _build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        if not self._ours:
            return super()._build_lr_scheduler(optimizer)
        settings = self._optim
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: settings.lr_at(step) / settings.lr if settings.lr else 1.0
        )


@dataclass(frozen=True, slots=True)
class RowLoss:
    """The loss of one micro-batch of rows; called as verl calls its losses."""

    settings: LossSettings

    def __call__(self, model_output: Any, data: TensorDict, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        new = no_padding_2_padding(model_output["log_probs"], data)
        entropy = model_output.get("entropy")
        names = [WEIGHTS, "advantages", "old_log_probs", "rollout_log_probs"]
        has_reference = self.settings.kl_coef > 0 and not self.settings.policy_loss.imitates
        if has_reference:
            names.append("ref_log_prob")
        rows = data.select(*names).to_padded_tensor()
        at = rows[WEIGHTS][:, : new.shape[1]].nonzero(as_tuple=True)
        zero = torch.zeros(())
        ranks = int(data["dp_size"])  # verl averages gradients over ranks, and ours is a sum
        if not len(at[0]):
            return new.sum() * 0.0, {name: _metric(0.0) for name in METRICS.values()} | {GAP: _most(zero)}

        def picked(name: str) -> Tensor:
            values: Tensor = rows[name][at].to(new.dtype)
            return values

        edges = EdgeTensors(
            sampler_E=picked("rollout_log_probs"),
            trajectory_E=at[0],
            entry_edge_M=torch.arange(len(at[0]), device=new.device),
            advantage_M=picked("advantages"),
            weight_M=picked(WEIGHTS),
            old_E=picked("old_log_probs"),
            reference_E=picked("ref_log_prob") if has_reference else None,
        )
        entropy_E = None if entropy is None else no_padding_2_padding(entropy, data)[at]
        result = policy_loss(new[at], edges, self.settings, entropy_E)
        sums = result.sums | {"weight/sum": edges.weight_M.sum()}
        metrics = {theirs: _metric(float(sums.get(ours, zero)) * ranks) for ours, theirs in METRICS.items()}
        return result.loss * ranks, metrics | {GAP: _most(result.sums.get("sampler_gap/max", zero))}


def _metric(value: float) -> Any:
    """Micro-batches add up."""
    return Metric(aggregation=AggregationType.SUM, value=value)


def _most(value: Tensor) -> Any:
    return Metric(aggregation=AggregationType.MAX, value=float(value))


def hand_through(token_level_rewards: Tensor, response_mask: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """verl's advantage estimator: the "rewards" are our advantages."""
    advantages = token_level_rewards * response_mask
    return advantages, advantages


def register(device: str, estimator: str) -> None:
    """Make engine and estimator known to verl."""
    from verl.trainer.ppo.core_algos import register_adv_est

    register_adv_est(estimator)(hand_through)
    vendors: Any = list(VENDORS) if device == "cuda" else None
    EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device, vendors)(AjetTrainEngine)
