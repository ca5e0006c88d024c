"""`Learner`: the model that the local backbone trains, with LoRA, the frozen reference, trainer, checkpoints, and the
transfer of weights to the engine.

The order of an update, where trainer and engine take turns: `pause` (with `rollout.vllm.sleep`, the engine frees the
GPU's memory), the optimiser's state returns to the GPU, the update, the state moves back to host memory, `load_weights`
(a sleeping engine wakes first), `resume`. Where they overlap: the update, then `pause`, `load_weights`, `resume`.
Either way no reply is in flight while weights change, so each has a single version.

A teacher scores the tokens that the student sampled, in this process or on a vLLM server.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ajet.backbone.failures import GapWatch
from ajet.backbone.local.weights import WeightFolder
from ajet.backbone.metrics import staleness
from ajet.backbone.training_settings import TEACHER, has_reference, is_address, train_settings
from ajet.engine.attention_rules import fix_longrope, length_dependent_rope
from ajet.engine.model_source import ModelSource
from ajet.engine.quantization import is_linear
from ajet.engine.remote import SAMPLES
from ajet.engine.remote_client import Endpoint, RemoteClient, RemoteSettings
from ajet.schema.episode import CallTree, Episode, FloatArray
from ajet.schema.errors import ConfigError, EngineError, InvalidRequestError, MissingDependencyError
from ajet.schema.install import install_command
from ajet.trainer.checkpoint import Checkpoint, read_trainer, write_trainer
from ajet.trainer.credit import Credit, EpisodeCredit, EpisodeSummary
from ajet.trainer.executor import Logprobs, ModelTeacher
from ajet.trainer.trainer import Updater

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.config.root import LoraConfig
    from ajet.task_runner.runtime import Runtime

log = logging.getLogger("ajet.backbone.local")

TARGETS = "ajet.model.lora.target_modules"
Batch = Sequence[tuple[CallTree, EpisodeCredit]]


def teacher_of(
    config: Config, runtime: Runtime, tokenizer: Any, budget: int, device: str | None = None
) -> ServerTeacher | ModelTeacher | None:
    """The configured teacher, checked; None without one. `device`: the trainer's, as others may be the engine's."""
    name = config.ajet.trainer_common.algorithm.distillation.teacher
    if name is None:
        return None
    if is_address(name):
        server = ServerTeacher(name, runtime)
        server.check_vocabulary(tokenizer)
        return server
    try:
        source = ModelSource.resolve(name)
        vocabulary = source.tokenizer().get_vocab()
        if vocabulary != tokenizer.get_vocab():
            raise ConfigError(f"{name} has another vocabulary than the model that is trained")
        model: Any = source.model(config.ajet.model.dtype, config.ajet.model.attn, device)
    except ConfigError as error:
        raise ConfigError(f"{TEACHER}: {error}") from error
    return ModelTeacher(model.requires_grad_(False), budget)


class ServerTeacher:
    """A model that a vLLM server holds. It gives log-probabilities of temperature 1."""

    def __init__(self, address: str, runtime: Runtime) -> None:
        root = address.rstrip("/").removesuffix("/v1")
        self._address = address
        self._runtime = runtime
        self._settings = RemoteSettings((Endpoint(root),), model="")
        self._client: RemoteClient | None = None

    def check_vocabulary(self, tokenizer: Any) -> None:
        """Refuse a server whose tokenizer splits any of the sample texts differently."""
        for text in SAMPLES:
            try:
                answer = self._runtime.run(self._post("/tokenize", {"prompt": text, "add_special_tokens": False}))
            except (EngineError, InvalidRequestError) as error:
                raise ConfigError(
                    f"{TEACHER}: {self._address} is not a vLLM server that can be asked ({error})"
                ) from error
            if answer.get("tokens") != tokenizer(text, add_special_tokens=False)["input_ids"]:
                raise ConfigError(f"{TEACHER}: {self._address} has another vocabulary than the model that is trained")

    def logprobs(self, batch: Batch) -> Logprobs:
        """The log-probabilities of all trained tokens, by (episode of the batch, call). One request per call, many at a
        time."""
        return self._runtime.run(self._all(batch))

    async def _all(self, batch: Batch) -> Logprobs:
        keys = [
            (episode, call)
            for episode, (tree, credit) in enumerate(batch)
            for call in range(len(tree.calls))
            if credit.calls[call].entries and tree.calls[call].mask.any()
        ]
        found = await asyncio.gather(*(self._call(batch[episode][0], call) for episode, call in keys))
        return dict(zip(keys, found, strict=True))

    async def _call(self, tree: CallTree, index: int) -> Any:
        call = tree.calls[index]
        prompt, reply = tree.prompt_ids(index).tolist(), tree.runs[call.run].ids.tolist()
        body = {"prompt": prompt + reply, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        answer = await self._post("/v1/completions", body)
        try:
            given = answer["choices"][0]["prompt_logprobs"][len(prompt) :]
            values = [entry[str(token)]["logprob"] for entry, token in zip(given, reply, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"{self._address} gives no log-probabilities of a prompt's tokens ({error!r})") from error
        return np.array(values, np.float64)[call.mask]

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._client is None:
            self._client = RemoteClient(self._settings)
        return await self._client.post(path, body)


class Learner:
    """Updates the model, and has the engine serve the result."""

    def __init__(self, config: Config, runtime: Runtime, total_steps: int, device: str | None = None) -> None:
        self._config = config
        self._runtime = runtime
        self._engine = runtime.engine_ready()
        self._device = device
        self._overlaps = config.ajet.rollout.max_staleness > 0
        self._folder = None if config.ajet.rollout.engine == "torch" else WeightFolder(config, device)
        """Where an engine with weights of its own finds each version. The embedded one shares its parameters with the
        trainer, so only one of them may work at a time."""
        embedded: Any = self._engine
        self._source = self._folder or embedded
        """Has the model, and says how many threads the trainer may use."""
        model = self._with_rope_of_engine(self._source.model)
        self.tokenizer = runtime.model().tokenizer
        if config.ajet.model.lora.enabled:
            model = with_adapters(model, config.ajet.model.lora)
        if self._folder is None:
            _mention_gpus()
        self.on_gpu = on_gpu = next(model.parameters()).device.type == "cuda"
        settings = train_settings(config, total_steps, on_gpu=on_gpu)
        self.trainer = Updater(model, settings, reference=self._reference())
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        self._gap = GapWatch(dtype, length_dependent_rope(model))
        self._teacher = teacher_of(config, runtime, self.tokenizer, self.trainer.budget, device)
        self._rests = on_gpu and config.ajet.rollout.engine == "vllm" and config.ajet.rollout.vllm.sleep
        """Whether the optimiser's state leaves the GPU while the engine is awake there."""
        if self._rests:
            self.trainer.optimizer.rest()
        if config.ajet.rollout.engine == "sglang":
            self._serve(0)  # servers that were started before may have been given other weights since

    def _reference(self) -> Any:
        """The starting weights, frozen."""
        if not has_reference(self._config):
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
            torch.set_num_threads(self._source.cpu_threads)
            with self._trainer_at_work():
                taught = None if self._teacher is None else self._teacher.logprobs(batch)
                lag = staleness(batch, version=version - 1)
                here = self._folder is None and lag.get("train/staleness/max") == 0
                metrics = self.trainer.update(batch, taught, sampled_by_this=here)
            self._gap.look_at(version, metrics | lag)
            with self._engine_away(self._overlaps):
                metrics["time/sync"] = self._serve(version)
        return metrics

    def _serve(self, version: int) -> float:
        """Have the engine serve the current weights as this version. Returns how long that took."""
        began = time.perf_counter()
        written = None if self._folder is None else self._folder.source(self.trainer.model, version)
        self._runtime.run(self._engine.load_weights(written, version))
        if self._folder is not None:
            self._folder.served()
        return time.perf_counter() - began

    @contextmanager
    def _engine_away(self, needed: bool = True) -> Iterator[None]:
        """Within this block, the engine generates nothing and, if it can, leaves the GPU to the trainer."""
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
        """Within this block, the trainer's state is on its device; afterwards the memory belongs to the engine."""
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
        """Return, by episode and call, each sampled token's logprob under the weights before the last update: NaN for
        tokens that aren't trained, empty for calls that aren't."""
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

    def penalise_drift(self, episodes: Sequence[Episode], summaries: Sequence[EpisodeSummary]) -> float:
        """`use_kl_in_reward`: subtract the divergence from the starting model from the reward of each call, where it
        arises. Returns the mean over episodes of what was subtracted."""
        with self._engine_away():
            drift = self.trainer.drift([episode.tree for episode in episodes])
        coefficient = self._config.ajet.trainer_common.kl_loss_coef
        for (episode, call), total in drift.items():
            summaries[episode].calls[call].penalty = coefficient * total
        return coefficient * sum(drift.values()) / max(len(episodes), 1)

    def write(self, folder: Path) -> None:
        write_trainer(self.trainer, self.tokenizer, folder)

    def restore(self, checkpoint: Checkpoint) -> None:
        with self._engine_away():
            with self._trainer_at_work():
                read_trainer(self.trainer, checkpoint)
            self._serve(checkpoint.step)

    def close(self) -> None:
        """Remove what was written for the engine. To be called when the engine has ended."""
        if self._folder is not None:
            self._folder.close()


def seed_everything(seed: int, *, deterministic: bool) -> None:
    from transformers import set_seed

    set_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)


def with_adapters(model: Any, lora: LoraConfig) -> Any:
    """The engine's own model with adapters, which it serves while they are trained."""
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(f"ajet.model.lora needs the package peft: {install_command('lora')}") from error
    if unknown := unknown_targets(model, lora):
        raise ConfigError(unknown)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=linear_modules(model) if lora.target_modules == "all-linear" else lora.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():  # PEFT asks for what newer versions of transformers call otherwise
            warnings.simplefilter("ignore", FutureWarning)
            return peft.get_peft_model(model, settings)
    except ValueError as error:  # PEFT finds none of the names, or layers that it can't wrap
        known, why = ", ".join(linear_modules(model)), str(error).rstrip(".")
        raise ConfigError(f"{TARGETS}: {why}. This model's linear layers are {known}") from error


def unknown_targets(model: Any, lora: LoraConfig) -> str:
    """The first of `lora.target_modules` that names no module, as an error; empty if there is none. PEFT leaves such a
    name out if another one is found. Of a mixture it also knows the names that experts had before they were stacked."""
    targets = lora.target_modules
    passed = READ_PAST.get(model.config.model_type, set())
    if isinstance(targets, list) and MAMBA_STEP in passed & {target.rpartition(".")[2] for target in targets}:
        return (
            f"{TARGETS}: the model multiplies by the weight of {MAMBA_STEP} itself: an adapter there would do nothing"
        )
    if targets == "all-linear" or any(weight.dim() > 2 for weight in model.parameters()):
        return ""
    names = [name for name, _ in model.named_modules()]
    known = ", ".join(linear_modules(model))
    if isinstance(targets, str):  # a pattern, for PEFT
        with suppress(re.error):
            if any(re.fullmatch(targets, name) for name in names):
                return ""
        return f"{TARGETS}: no module's whole name matches the pattern {targets!r}. As a list, write {known}"
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            return f"{TARGETS}: the model has no module {target!r}. Its linear layers are {known}"
    return ""


MAMBA_OUTPUT, MAMBA_STEP = "out_proj", "dt_proj"
READ_PAST = {
    "falcon_h1": {MAMBA_OUTPUT},
    "falcon_mamba": {MAMBA_OUTPUT, MAMBA_STEP},
    "jamba": {MAMBA_STEP},
    "mamba": {MAMBA_OUTPUT, MAMBA_STEP},
    "mamba2": {MAMBA_OUTPUT},
    "nemotron_h": {MAMBA_OUTPUT},
}
"""By kind of model, layers of Mamba whose weight is read past them: the output's by kernels, so PEFT takes no adapter
there, and the other's by the model, which multiplies by it, so an adapter there would do nothing."""


def linear_modules(model: Any) -> list[str]:
    """Names of the layers that `all-linear` means: all but the output layer, routers of experts, and layers of Mamba
    whose weight is read past them.

    A router may be a linear layer by inheritance, but its output isn't a tensor, so it takes no adapter. If all layers
    with the same name ending qualify, the ending is returned instead of them.
    """
    output = model.get_output_embeddings()
    passed = READ_PAST.get(model.config.model_type, set())
    qualified: dict[str, bool] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        linear = kind == "Conv1D" or is_linear(module)
        qualified[name] = linear and module is not output and name.rpartition(".")[2] not in passed
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
