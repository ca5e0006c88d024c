"""The embedded engine's model, made trainable: LoRA, the frozen reference, the trainer, its checkpoints.

The trainer changes the parameters that the engine serves, in place, while the engine is paused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ajet.backbone.local.teacher import teacher_of
from ajet.backbone.training_settings import train_settings
from ajet.credit import Credit, EpisodeSummary
from ajet.engine.model_source import ModelSource
from ajet.schema.call_tree import CallTree, FloatArray
from ajet.schema.episode import Episode
from ajet.schema.errors import ConfigError, MissingDependencyError
from ajet.schema.install import install_command
from ajet.trainer.checkpoint import Checkpoint, read_trainer, write_trainer
from ajet.trainer.trainer import Trainer

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.runtime.runtime import Runtime

log = logging.getLogger("ajet.backbone.local")


class Learner:
    """Updates the model that the engine serves."""

    def __init__(self, config: Config, runtime: Runtime, total_steps: int) -> None:
        self._config = config
        self._runtime = runtime
        self._engine = runtime.engine_ready()
        model = getattr(self._engine, "model", None)
        if model is None:
            raise ConfigError(
                f"ajet.rollout.engine: {config.ajet.rollout.engine} doesn't share its weights with this process; the "
                "local backbone trains with `engine: torch`. For other engines use --backbone=verl or trinity"
            )
        embedded: Any = self._engine
        self._cpu_threads: int = embedded.cpu_threads
        self.tokenizer = runtime.model().tokenizer
        if config.ajet.model.lora.enabled:
            model = with_adapters(model, config)
        _mention_gpus()
        settings = train_settings(config, total_steps)
        on_gpu = next(model.parameters()).device.type == "cuda"
        self.trainer = Trainer(
            model, replace(settings, gradient_checkpointing=on_gpu), reference=self._reference(settings.loss.kl_coef)
        )
        self._teacher = teacher_of(config, runtime, self.tokenizer, self.trainer.budget)

    def _reference(self, kl_coef: float) -> Any:
        """The starting weights, frozen. With LoRA, the base weights serve as reference."""
        in_reward = self._config.ajet.trainer_common.algorithm.use_kl_in_reward
        if self._config.ajet.model.lora.enabled or not (kl_coef or in_reward):
            return None
        model = self._config.ajet.model
        reference: Any = ModelSource.resolve(model.path).model(model.dtype, model.attn)
        return reference.requires_grad_(False)

    def update(self, episodes: Sequence[Episode], credit: Credit, version: int) -> dict[str, float]:
        """Train on these episodes; the engine then serves the result as this version."""
        batch = [(episode.tree, given) for episode, given in zip(episodes, credit.episodes, strict=True)]
        self._runtime.run(self._engine.pause())
        torch.set_num_threads(self._cpu_threads)
        try:
            taught = None if self._teacher is None else self._teacher.logprobs(batch)
            metrics = self.trainer.update(batch, taught)
            self._runtime.run(self._engine.load_weights(None, version))
        finally:
            self._runtime.run(self._engine.resume())
        return metrics

    def logprobs_before(self, episodes: Sequence[Episode]) -> dict[str, list[FloatArray]]:
        """By episode and call: each sampled token's logprob under the weights before the last update. NaN for tokens
        that aren't trained, empty for calls that aren't."""
        known = self.trainer.before
        found: dict[str, list[FloatArray]] = {}
        for index, episode in enumerate(episodes):
            calls = [np.zeros(0, np.float32) for _ in episode.tree.calls]
            for number, call in enumerate(episode.tree.calls):
                values = known.get((index, number))
                if values is not None and len(values) == call.mask.sum():
                    calls[number] = np.full(len(call.mask), np.nan, np.float32)
                    calls[number][call.mask] = values
            found[episode.episode_id] = calls
        return found

    def penalise_drift(self, episodes: Sequence[Episode], summaries: Sequence[EpisodeSummary], credit: Credit) -> float:
        """`use_kl_in_reward`: subtract the divergence from the starting model from the reward of each call, where it
        arises. Returns its mean over episodes."""
        batch: list[tuple[CallTree, Any]] = [(e.tree, c) for e, c in zip(episodes, credit.episodes, strict=True)]
        self._runtime.run(self._engine.pause())
        try:
            policy = self.trainer.logprobs(batch)
            reference = self.trainer.reference_logprobs(batch)
        finally:
            self._runtime.run(self._engine.resume())
        drift = {key: float((values - reference[key]).sum()) for key, values in policy.items()}
        coefficient = self._config.ajet.trainer_common.kl_loss_coef
        for (episode, call), total in drift.items():
            summaries[episode].calls[call].penalty = coefficient * total
        return sum(drift.values()) / max(len(episodes), 1)

    def write(self, folder: Path) -> None:
        """Write a checkpoint's files."""
        write_trainer(self.trainer, self.tokenizer, folder)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        self._runtime.run(self._engine.pause())
        read_trainer(self.trainer, checkpoint)
        self._runtime.run(self._engine.load_weights(None, checkpoint.step))
        self._runtime.run(self._engine.resume())


def with_adapters(model: Any, config: Config) -> Any:
    """The engine's own model with adapters, which it serves while they are trained."""
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(f"ajet.model.lora needs the package peft: {install_command('lora')}") from error
    lora = config.ajet.model.lora
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha),
        lora_dropout=lora.dropout,
        target_modules=linear_modules(model) if lora.target_modules == "all-linear" else lora.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:  # PEFT finds none of the names, or layers that it can't wrap
        known = ", ".join(linear_modules(model))
        raise ConfigError(f"ajet.model.lora.target_modules: {error}. This model's linear layers are {known}") from error


def linear_modules(model: Any) -> list[str]:
    """Names of the layers that `all-linear` means: all but the output layer, and routers of experts.

    A router may be a linear layer by inheritance, but its output isn't a tensor, so it takes no adapter. Where all
    layers that end alike qualify, their common ending stands for them.
    """
    output = model.get_output_embeddings()
    qualified: dict[str, bool] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        linear = kind == "Conv1D" or (isinstance(module, torch.nn.Linear) and kind.endswith("Linear"))
        qualified[name] = linear and module is not output
    endings: dict[str, list[str]] = {}
    for name in qualified:
        endings.setdefault(name.rpartition(".")[2], []).append(name)
    return [
        name
        for ending, names in endings.items()
        for name in ([ending] if all(qualified[one] for one in names) else [one for one in names if qualified[one]])
    ]


def _mention_gpus() -> None:
    if torch.cuda.device_count() > 1:
        log.warning(
            "this machine has %d GPUs, of which the local backbone uses one. --backbone=verl uses all",
            torch.cuda.device_count(),
        )
