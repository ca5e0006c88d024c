"""`RunPlan`: what a run would do, computed in one place for `ajet validate`, `ajet doctor` and the backbones.

Pure functions of the config and of how many tasks there are. Nothing heavy is imported, and nothing is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from ajet.config.kinds import TRACKERS, load
from ajet.gateway.chat import validation_temperature

if TYPE_CHECKING:
    from ajet.config import BackboneName, Config
    from ajet.schema.task import Task

DISTRIBUTION = "agentjet"
PASS_N = 4
"""Episodes per validation task where validation samples and nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a config would do with its tasks: counts are those of a complete run."""

    backbone: BackboneName
    engine: str
    """What samples the replies."""
    trains: bool
    tasks_per_step: int
    episodes_per_step: int
    steps: int
    epochs: float
    validations: int
    validation_episodes: int
    """Per validation."""
    generated_per_episode: int
    """Most tokens that one agent may generate in an episode."""
    needs: tuple[Requirement, ...]
    """Optional packages, with the versions that work."""

    @property
    def episodes(self) -> int:
        """Episodes of all training steps."""
        return self.steps * self.episodes_per_step

    @property
    def generated(self) -> int:
        """Most tokens that one agent per episode may generate in the whole run."""
        return (self.episodes + self.validations * self.validation_episodes) * self.generated_per_episode

    @classmethod
    def of(cls, config: Config, backbone: BackboneName, training_tasks: int, validation_tasks: int) -> RunPlan:
        """The plan for this many tasks (or conversations, where recorded ones are imitated)."""
        rollout, trainer = config.ajet.rollout, config.ajet.trainer_common
        trains = backbone not in ("debug", "prompt") and not trainer.val_only
        tasks, steps, episodes, validations = config.ajet.data.train_batch_size, 0, 0, 0
        if backbone == "debug":
            tasks = episodes = min(config.ajet.debug.debug_first_n_tasks, training_tasks)
            steps = 1
        elif trains:
            steps = training_steps(config, training_tasks)
            episodes = 0 if imitates_a_file(config) else tasks * rollout.num_repeat
        if validation_tasks and backbone not in ("debug", "prompt"):
            validations = validations_after_steps(config, steps) + int(trainer.val_before_train) if trains else 1
        return cls(
            backbone=backbone,
            engine=serving_engine(config, backbone),
            trains=trains,
            tasks_per_step=tasks,
            episodes_per_step=episodes,
            steps=steps,
            epochs=steps * tasks / max(training_tasks, 1),
            validations=validations,
            validation_episodes=validation_tasks * validation_repeats(config) if validations else 0,
            generated_per_episode=rollout.multi_turn.max_steps * rollout.max_response_length_in_one_turn,
            needs=tuple(needed(config, backbone)),
        )


def training_steps(config: Config, training_tasks: int) -> int:
    """Steps of a run: `total_training_steps`, or as many as `total_epochs` take."""
    common = config.ajet.trainer_common
    if common.total_training_steps is not None:
        return common.total_training_steps
    return -(-common.total_epochs * training_tasks // config.ajet.data.train_batch_size)


def validates_after(config: Config, step: int, steps: int) -> bool:
    """Whether a run of `steps` steps validates after this one."""
    every = config.ajet.trainer_common.test_freq
    return every > 0 and (step % every == 0 or step == steps)


def validations_after_steps(config: Config, steps: int) -> int:
    """How many of a run's steps are followed by a validation. A run may have any number of steps."""
    every = config.ajet.trainer_common.test_freq
    return -(-steps // every) if every > 0 else 0


def validation_repeats(config: Config) -> int:
    """Episodes per validation task. Greedy replies are all alike, so more than `val_kwargs.num_repeat` tell nothing."""
    repeats = config.ajet.rollout.val_kwargs.num_repeat
    if validation_temperature(config) == 0:
        return repeats
    asked = config.ajet.trainer_common.val_pass_n
    return max(repeats, PASS_N if asked is None else asked)


def imitates_a_file(config: Config) -> bool:
    """Whether recorded conversations are trained, so that no training episodes are run."""
    algorithm = config.ajet.trainer_common.algorithm
    return algorithm.policy_loss == "sft" and algorithm.sft.demonstrations is not None


def training_samples(config: Config, tasks: Sequence[Task]) -> int:
    """What `training_steps` counts: the training tasks, or the recorded conversations that are imitated."""
    if not imitates_a_file(config):
        return len(tasks)
    from ajet.backbone.local.demonstrations import count_demonstrations

    return count_demonstrations(config)


def serving_engine(config: Config, backbone: BackboneName) -> str:
    """The engine that samples: verl and Trinity bring their own, so there the embedded one becomes vLLM."""
    engine = config.ajet.rollout.engine
    return "vllm" if backbone in ("verl", "trinity") and engine == "torch" else engine


def needed(config: Config, backbone: BackboneName) -> list[Requirement]:
    """The optional packages that this run imports, each with its range of versions."""
    ajet = config.ajet
    packages = {"verl": ["verl"], "trinity": ["trinity-rft"]}.get(backbone, [])
    if backbone == "prompt" and ajet.prompt_tuning.algorithm == "gepa":
        packages.append("gepa")
    if ajet.rollout.engine == "vllm" and not packages and ajet.rollout.vllm.python is None:
        packages.append("vllm")
    if ajet.model.lora.enabled and backbone == "local":
        packages.append("peft")
    if backbone == "local" and (ajet.trainer_common.optim.state_bits == 8 or ajet.model.lora.base_bits is not None):
        packages.append("bitsandbytes")
    if backbone == "local" and ajet.trainer_common.logits_kernel == "liger":
        packages.append("liger-kernel")
    if ajet.model.attn == "flash_attention_2":
        packages.append("flash-attn")
    packages += [load(TRACKERS, name).install for name in ajet.trainer_common.logger if name in TRACKERS]
    return [requirement(package) for package in packages]


@cache
def requirement(package: str) -> Requirement:
    """The versions of a package that this program works with, as its own metadata declares them."""
    try:
        declared = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:  # run from a checkout that isn't installed
        declared = []
    return next((one for one in declared if one.name.lower() == package), Requirement(package))


def version_range(wanted: Requirement) -> str:
    """`>=0.9.1,<0.10`: the lower bound first, as people write it."""
    return ",".join(sorted(map(str, wanted.specifier), key=lambda bound: bound.startswith("<")))


def installed(package: str) -> str | None:
    """The version of a package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
