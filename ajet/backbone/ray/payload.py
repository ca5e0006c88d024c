"""What every process of a run must know of ours, as one string inside its configuration.

base64, because verl resolves `${…}` in every string it is given.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ajet.config import Config
from ajet.schema.task import Task
from ajet.task_reader import TaskStream, build_reader, read_training_tasks, read_validation_tasks
from ajet.task_runner.remote import KEY_VARIABLE

KEY = "ajet_run"
"""Key under verl's `data`, which reaches the dataset, the workers and the driver alike."""


@dataclass(frozen=True, slots=True)
class RunPayload:
    """One run, as its Ray actors see it."""

    config: dict[str, Any]
    """The whole configuration, serialised."""
    base_dir: str
    """Where relative paths of the YAML start."""
    yaml_path: str
    """The YAML, if there is one: user modules are looked up beside it too."""
    model_path: str
    experiment_dir: str = ""
    """Where the head node records episodes; empty: nowhere."""
    metrics_file: str = ""
    """Where the head node writes the metrics of episodes; empty: nowhere."""
    total_steps: int = 0
    resumed_step: int | None = None
    """The step after which the run goes on; None: from the start."""
    runner_key: str = ""
    """With `wrapper_type: remote`, the key that runners send."""

    @property
    def remote_runners(self) -> bool:
        """Whether runners elsewhere run the episodes: they connect to one process, on the head node."""
        return bool(self.config["ajet"]["task_runner"]["wrapper_type"] == "remote")

    def encode(self) -> str:
        return base64.b64encode(zlib.compress(json.dumps(asdict(self)).encode())).decode()

    @classmethod
    def decode(cls, text: str) -> RunPayload:
        return cls(**json.loads(zlib.decompress(base64.b64decode(text))))

    @classmethod
    def of(cls, verl_config: Any) -> RunPayload:
        """Read it from verl's whole configuration."""
        return cls.decode(verl_config.data[KEY])

    def load_config(self) -> Config:
        """The configuration as the launcher loaded it."""
        config = Config.model_validate(self.config)
        config.ajet.model.path = self.model_path
        if self.yaml_path:
            config.remember_source(Path(self.yaml_path))
        if self.experiment_dir:
            config.remember_folder(Path(self.experiment_dir))
        return config

    def enter(self) -> None:
        """Make relative paths mean what they mean to the user."""
        os.chdir(self.base_dir)
        if self.runner_key:
            os.environ[KEY_VARIABLE] = self.runner_key


def training_stream(config: Config) -> TaskStream:
    """The run's training tasks, in their order over all epochs."""
    reader = config.ajet.task_reader
    return TaskStream(
        read_training_tasks(build_reader(config)),
        seed=reader.seed,
        batch_size=config.ajet.data.train_batch_size,
        shuffle=reader.shuffle,
    )


def validation_tasks(config: Config) -> list[Task]:
    """The run's validation tasks."""
    return read_validation_tasks(build_reader(config))
