"""`Config`: a whole YAML file. `config.ajet` is ours and typed; every other top-level block is the user's own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, PrivateAttr, model_validator

from ajet.config.kinds import BackboneName
from ajet.config.old_keys import Translated
from ajet.config.prompt_tuning import PromptTuningConfig
from ajet.config.rollout import RolloutSection
from ajet.config.section import Block, Name, Section, blocks_within
from ajet.config.sections import (
    ContextTrackerConfig,
    DataConfig,
    DebugConfig,
    FailureRewardConfig,
    GatewayConfig,
    HelperConfig,
    ModelConfig,
    ObserveConfig,
    RecorderConfig,
    ServiceConfig,
    TaskRunnerConfig,
)
from ajet.config.tasks import TaskJudgeConfig, TaskReaderConfig
from ajet.config.trainer_common import TrainerCommonConfig

READ_YAML_NAME = "read_yaml_name"
"""Value of `experiment_name` that stands for the YAML's file name."""


class AjetConfig(Section):
    """`ajet`: everything that AgentJet itself reads."""

    project_name: Name = "ajet"
    """Name under which trackers group experiments."""
    experiment_name: Name = READ_YAML_NAME
    """Name of the run and its folder. `read_yaml_name`: the YAML's file name."""
    experiment_dir: str = "auto"
    """Folder of the run. `auto`: `saved_experiments/<experiment_name>`."""
    backbone: BackboneName | None = None
    """What runs the training loop: `debug`, `local`, `verl` or `trinity`; or `prompt`, which tunes prompt templates and
    leaves the weights. `--backbone` takes precedence; null: `local`."""
    model: ModelConfig = ModelConfig()
    """The model to train."""
    helper: HelperConfig = HelperConfig()
    """The model for agents whose target isn't trained."""
    data: DataConfig = DataConfig()
    """Lengths and batch size."""
    rollout: RolloutSection = RolloutSection()
    """How episodes are run, and how replies are sampled."""
    task_reader: TaskReaderConfig = TaskReaderConfig()
    """Where tasks come from."""
    task_judge: TaskJudgeConfig = TaskJudgeConfig()
    """How a workflow's output becomes a reward."""
    task_runner: TaskRunnerConfig = TaskRunnerConfig()
    """Where a workflow's code runs."""
    failure_reward: FailureRewardConfig = FailureRewardConfig()
    """What to do with episodes that did not end well."""
    context_tracker: ContextTrackerConfig = ContextTrackerConfig()
    """How model calls are recorded and become training tokens."""
    trainer_common: TrainerCommonConfig = TrainerCommonConfig()
    """How weights are updated, saved and validated."""
    prompt_tuning: PromptTuningConfig = PromptTuningConfig()
    """Prompt templates that workflows ask for by name, and how they are tuned."""
    debug: DebugConfig = DebugConfig()
    """What `--backbone=debug` runs."""
    gateway: GatewayConfig = GatewayConfig()
    """The HTTP server through which agents of any kind reach the model."""
    observe: ObserveConfig = ObserveConfig()
    """What a run tells other programs about itself."""
    recorder: RecorderConfig = RecorderConfig()
    """Which episodes are kept for the viewer."""
    services: dict[str, ServiceConfig] = {}
    """Programs to start before the run and to end with it, by name: `{command, folder, address, start_timeout, env,
    restarts}`. With an `address`, the run waits until the program answers there."""
    judge: Block = Block()
    """Any keys, for a judge of your own to read."""
    verl: Block = Block()
    """Keys of verl's own config, passed through unchanged."""
    trinity: Block = Block()
    """Keys of Trinity's own config, passed through unchanged."""
    user: Block = Block()
    """Yours: any keys, readable as `tuner.config.ajet.user.…`."""


class Config(Section):
    """A whole YAML file: `ajet` is ours and typed, every other top-level block is the user's own."""

    model_config = ConfigDict(extra="allow")

    ajet: AjetConfig = AjetConfig()
    """Everything that AgentJet itself reads."""
    verl: Block = Block()
    """Passed through to the verl backbone."""
    trinity: Block = Block()
    """Passed through to the trinity backbone."""
    trainer: Block = Block()
    """Passed through to the verl backbone."""

    @model_validator(mode="after")
    def _own_blocks(self) -> Config:
        extra: dict[str, Any] = self.__pydantic_extra__ or {}
        for key, value in extra.items():
            extra[key] = blocks_within(value)
        return self

    _yaml_path: Path | None = PrivateAttr(default=None)

    _folder: Path | None = PrivateAttr(default=None)

    _ignored_blocks: tuple[str, ...] = PrivateAttr(default=())

    _old_keys: Translated = PrivateAttr(default_factory=Translated)

    def remember_source(self, path: Path, ignored_blocks: Iterable[str] = ()) -> None:
        """Record the file that this config was loaded from, and its blocks that were left out."""
        self._yaml_path = path
        self._ignored_blocks = tuple(ignored_blocks)

    def remember_old_keys(self, translated: Translated) -> None:
        """Record what became of the old keys of its source."""
        self._old_keys = translated

    @property
    def old_keys(self) -> Translated:
        """What became of the old keys of its source."""
        return self._old_keys

    @property
    def yaml_path(self) -> Path | None:
        """The file that this config was loaded from."""
        return self._yaml_path

    @property
    def ignored_blocks(self) -> tuple[str, ...]:
        """Top-level blocks of that file that have no meaning here (`hydra`, `defaults`)."""
        return self._ignored_blocks

    @property
    def base_dirs(self) -> list[Path]:
        """Folders in which relative names in the file are looked up, after the working directory."""
        return [] if self._yaml_path is None else [self._yaml_path.parent]

    @property
    def experiment_path(self) -> Path:
        """The run's folder (not created)."""
        if self.ajet.experiment_dir != "auto":
            return Path(self.ajet.experiment_dir).expanduser()
        return Path("saved_experiments") / self.ajet.experiment_name

    @property
    def cache_path(self) -> Path:
        """The folder, in the run's, of what was asked of a helper model: kept by `--fresh`, shared with debug runs."""
        return (self._folder or self.experiment_path) / "cache"

    def remember_folder(self, folder: Path) -> None:
        """Record the run's folder, where the command line chose it."""
        self._folder = folder

    def user_blocks(self) -> dict[str, Any]:
        """The user's own top-level blocks."""
        return dict(self.__pydantic_extra__ or {})
