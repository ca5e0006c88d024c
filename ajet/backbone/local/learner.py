"""The model that the local backbone trains: LoRA, the frozen reference, trainer, checkpoints, the way to the engine.

The order of an update, where trainer and engine take turns: `pause` (with `rollout.vllm.sleep`, the engine frees the
GPU's memory), the optimiser's state returns to the GPU, the update, the state rests in host memory again,
`load_weights` (a sleeping engine wakes first), `resume`. Where they overlap: the update, then `pause`, `load_weights`,
`resume`. Either way no reply is in flight while weights change, so each has a single version.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ajet.attention_rules import fix_longrope, length_dependent_rope
from ajet.backbone.episode_metrics import staleness
from ajet.backbone.failures import GapWatch
from ajet.backbone.local.teacher import teacher_of
from ajet.backbone.local.weights import weight_sync
from ajet.backbone.training_settings import train_settings
from ajet.credit import Credit, EpisodeSummary
from ajet.engine.model_source import ModelSource
from ajet.four_bits import is_linear
from ajet.schema.call_tree import CallTree, FloatArray
from ajet.schema.episode import Episode
from ajet.schema.errors import ConfigError, MissingDependencyError
from ajet.schema.install import install_command
from ajet.trainer.checkpoint import Checkpoint, read_trainer, write_trainer
from ajet.trainer.trainer import Trainer

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.config.sections import LoraConfig
    from ajet.runtime.runtime import Runtime

log = logging.getLogger("ajet.backbone.local")


class Learner:
    """Updates the model, and has the engine serve the result."""

    def __init__(self, config: Config, runtime: Runtime, total_steps: int, device: str | None = None) -> None:
        self._config = config
        self._runtime = runtime
        self._engine = runtime.engine_ready()
        self._device = device
        self._overlaps = config.ajet.rollout.max_staleness > 0
        self._sync = weight_sync(config, self._engine, device)
        model = self._with_rope_of_engine(self._sync.model)
        self.tokenizer = runtime.model().tokenizer
        if config.ajet.model.lora.enabled:
            model = with_adapters(model, config.ajet.model.lora)
        if self._sync.shared:
            _mention_gpus()
        on_gpu = next(model.parameters()).device.type == "cuda"
        settings = train_settings(config, total_steps, on_gpu=on_gpu)
        self.trainer = Trainer(model, settings, reference=self._reference(settings.loss.kl_coef))
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        self._gap = GapWatch(dtype, length_dependent_rope(model))
        self._teacher = teacher_of(config, runtime, self.tokenizer, self.trainer.budget)
        self._rests = on_gpu and config.ajet.rollout.engine == "vllm" and config.ajet.rollout.vllm.sleep
        """Whether the optimiser's state leaves the GPU while the engine is awake there."""
        if self._rests:
            self.trainer.optimizer.rest()
        if config.ajet.rollout.engine == "sglang":
            self._serve(0)  # servers that were started before may have been given other weights since

    def _reference(self, kl_coef: float) -> Any:
        """The starting weights, frozen. With LoRA, the base weights serve as reference."""
        in_reward = self._config.ajet.trainer_common.algorithm.use_kl_in_reward
        if self._config.ajet.model.lora.enabled or not (kl_coef or in_reward):
            return None
        model = self._config.ajet.model
        reference: Any = ModelSource.resolve(model.path).model(model.dtype, model.attn, self._device)
        return self._with_rope_of_engine(reference).requires_grad_(False)

    def _with_rope_of_engine(self, model: Any) -> Any:
        """vLLM takes longrope's long factors for every call if `max_model_len` allows long ones."""
        if self._config.ajet.rollout.engine == "vllm":
            fix_longrope(model, self._config.ajet.rollout.max_model_len)
        return model

    def update(self, episodes: Sequence[Episode], credit: Credit, version: int) -> dict[str, float]:
        """Train on these episodes; the engine then serves the result as this version."""
        batch = [(episode.tree, given) for episode, given in zip(episodes, credit.episodes, strict=True)]
        with self._engine_away(not self._overlaps):
            torch.set_num_threads(self._sync.cpu_threads)
            with self._trainer_at_work():
                taught = None if self._teacher is None else self._teacher.logprobs(batch)
                metrics = self.trainer.update(batch, taught)
            self._gap.look_at(version, metrics | staleness(episodes, version=version - 1))
            with self._engine_away(self._overlaps):
                metrics["time/sync"] = self._serve(version)
        return metrics

    def _serve(self, version: int) -> float:
        """Have the engine serve the present weights as this version. Returns how long that took."""
        began = time.perf_counter()
        source = self._sync.source(self.trainer.model, version)
        self._runtime.run(self._engine.load_weights(source, version))
        self._sync.served()
        return time.perf_counter() - began

    @contextmanager
    def _engine_away(self, needed: bool = True) -> Iterator[None]:
        """While this lasts, the engine generates nothing, and leaves the GPU to the trainer if it can."""
        if not needed:
            yield
            return
        self._runtime.run(self._engine.pause())
        try:
            yield
        finally:
            self._runtime.run(self._engine.resume())

    @contextmanager
    def _trainer_at_work(self) -> Iterator[None]:
        """While this lasts, what the trainer needs is on its device; afterwards the memory is the engine's."""
        if not self._rests:
            yield
            return
        self.trainer.optimizer.wake()
        try:
            yield
        finally:
            self.trainer.optimizer.rest()
            torch.cuda.empty_cache()

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
        with self._engine_away():
            policy = self.trainer.logprobs(batch)
            reference = self.trainer.reference_logprobs(batch)
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
        with self._engine_away():
            with self._trainer_at_work():
                read_trainer(self.trainer, checkpoint)
            self._serve(checkpoint.step)

    def close(self) -> None:
        """Remove what was written for the engine. To be called when the engine has ended."""
        self._sync.close()


def with_adapters(model: Any, lora: LoraConfig) -> Any:
    """The engine's own model with adapters, which it serves while they are trained."""
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(f"ajet.model.lora needs the package peft: {install_command('lora')}") from error
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha),
        lora_dropout=lora.dropout,
        target_modules=linear_modules(model) if lora.target_modules == "all-linear" else lora.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():  # PEFT asks for what newer versions of transformers call otherwise
            warnings.simplefilter("ignore", FutureWarning)
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
        linear = kind == "Conv1D" or is_linear(module)
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
            "this machine has %d GPUs, of which this run uses one: the embedded engine shares the trainer's. "
            "rollout.engine: vllm samples on the others, and --backbone=verl uses all",
            torch.cuda.device_count(),
        )
