"""`RunPlan`: what a run would do, computed in one place for `ajet validate`, `ajet doctor` and the backbones.

Pure functions of the config and of how many tasks there are. Nothing heavy is imported, and nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.requirements import Requirement

from ajet.config.kinds import TRACKERS, load
from ajet.gateway.chat import validation_temperature

if TYPE_CHECKING:
    from ajet.config import BackboneName, Config
    from ajet.schema.task import Task

DISTRIBUTION = "agentjet"
BEFORE_THE_FIRST = -1
"""The step before the first: step 0 is the validation before training."""
PASS_N = 4
"""Episodes per validation task where validation samples and nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a config would do with its tasks: counts are those of a complete run."""

    backbone: BackboneName
    engine: str
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


class Measured(NamedTuple):
    """A short run, from which the time of the whole one follows."""

    steps: list[float]
    """Seconds of each. The first also warms up."""
    validations: list[float]
    """Seconds of each: before the first step and after the last. Empty if the run has none."""
    rest: float
    """Seconds of everything else: loading, the last checkpoint."""
    sampled_tokens: float
    """How many tokens an average step samples."""
    episodes: int
    """All, those of validations included."""

    def whole_run(self, plan: RunPlan) -> dict[str, Any]:
        """What the whole run takes, by the names that `ajet audit --time --json` prints."""
        step = sum(self.steps[1:]) / len(self.steps[1:])
        first, last = (self.validations[0], self.validations[-1]) if self.validations else (0.0, 0.0)
        validating = first + (plan.validations - 1) * last if plan.validations else 0.0
        seconds = self.rest + self.steps[0] + (plan.steps - 1) * step + validating
        counts = {"steps": plan.steps, "validations": plan.validations, "episodes": plan.episodes}
        parts = {"first_step_s": self.steps[0], "step_s": step, "validation_s": last, "rest_s": self.rest}
        return {**counts, **parts, "hours": seconds / 3600, "sampled_tokens": self.sampled_tokens * plan.steps}


def time_lines(plan: RunPlan, whole: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a run takes, as labels and texts."""
    of = f"{plan.episodes_per_step:,} episodes" if plan.episodes else f"{plan.tasks_per_step:,} recorded conversations"
    yield "the run", f"{plan.steps:,} steps of {of}"
    yield "validations", f"{plan.validations:,} of {plan.validation_episodes:,} episodes"
    yield "a step", f"{whole['step_s']:.2f} s (the first {whole['first_step_s']:.2f} s)"
    if plan.validations:
        yield "a validation", f"{whole['validation_s']:.2f} s"
    yield "start and end", f"{whole['rest_s']:.1f} s"
    seconds = whole["hours"] * 3600
    yield "in all", f"{whole['hours']:.2f} hours ({seconds:,.0f} s)"
    if plan.episodes:
        yield "sampled tokens", f"{whole['sampled_tokens']:,.0f}, validations aside"
    if "helper_tokens" in whole:
        calls, tokens, cost = (whole[f"helper_{name}"] for name in ("calls", "tokens", "cost"))
        yield "helper", f"{calls:,.0f} calls, {tokens:,.0f} tokens, {cost:,.2f} by ajet.helper.price_per_million"
    if "gpu_cost" in whole:
        yield "cost", f"{whole['gpu_cost']:,.2f} for {whole['gpus']} GPU" + "s" * (whole["gpus"] > 1)
    yield "note", "replies that grow or shrink while the model learns change what a step takes"


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


def lacks_validation(config: Config, recorded: Sequence[Mapping[str, Any]], step: int, steps: int) -> bool:
    """Whether the validation after this step was interrupted: its metrics are `recorded`, and have none."""
    by_step = {metrics["step"]: metrics for metrics in recorded}
    if step not in by_step or not validates_after(config, step, steps):
        return False
    return not any(name.startswith("val/") for name in by_step[step])


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
