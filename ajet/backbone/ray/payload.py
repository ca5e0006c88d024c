"""What a run's processes are given. `RunPayload`: what all of them must know, as one string inside the configuration of
verl or Trinity. `DriverInput` and `run_driver`: for the driver, the child process that runs one of them.
"""

from __future__ import annotations

import base64
import json
import os
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ajet.backbone.ray.start import JOIN_DEADLINE_S
from ajet.config import Config
from ajet.schema.errors import AjetError, UserError
from ajet.schema.task import Task
from ajet.system.processes import die_with
from ajet.task_reader import TaskStream, build_reader, read_training_tasks, read_validation_tasks
from ajet.task_runner.remote import KEY_VARIABLE

EPISODE_METRICS, ERROR, WARNINGS = "episodes.jsonl", "error.json", "warnings.jsonl"
"""Files in the launcher's private folder: from the collector, from the first that can't go on, from those that run
episodes."""
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
    reports: str = ""
    """The launcher's private folder, on its machine, the head node: what is written there for it."""
    total_steps: int = 0
    resumed_step: int | None = None
    """The step after which the run goes on; None: from the start."""
    lacks_validation: bool = False
    """Whether the validation after that step was cut off, and is run again."""
    runner_key: str = ""
    """With `wrapper_type: remote`, the key that runners send."""

    @property
    def remote_runners(self) -> bool:
        """Whether remote runners run the episodes: they connect to one process, on the head node."""
        return bool(self.config["ajet"]["task_runner"]["wrapper_type"] == "remote")

    def encode(self) -> str:
        # base64, because verl resolves `${…}` in every string it is given
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


@dataclass(frozen=True, slots=True)
class RunError:
    """Why a run can't go on, as its processes report it and the launcher says it."""

    text: str
    users: bool
    """Whether it is the user's to correct, and so said as any backbone says it."""

    @classmethod
    def of(cls, error: BaseException) -> RunError:
        """Of an exception, or of the one that Ray wraps in it; those that aren't ours are named."""
        error = getattr(error, "cause", None) or error
        ours = isinstance(error, AjetError)
        return cls(str(error) if ours else f"{type(error).__name__}: {error}", isinstance(error, UserError))

    def write(self, reports: str) -> None:
        """The first counts."""
        with suppress(FileExistsError), Path(reports, ERROR).open("x", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    @classmethod
    def read(cls, reports: Path) -> RunError | None:
        file = reports / ERROR
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


T = TypeVar("T")

RAY_STARTS = 3
SLOW_START = "node timed out during startup"


@dataclass(frozen=True, slots=True)
class DriverInput:
    """What the launcher tells the driver."""

    settings: dict[str, Any]
    """The configuration of verl or Trinity."""
    payload: str
    """`RunPayload.encode()`."""
    ray: dict[str, Any]
    """Arguments of `ray.init`."""
    nodes: int
    """Machines to wait for; 0: none."""

    def write(self, path: Path) -> None:
        """Readable by this user alone."""
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> DriverInput:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def run_driver(path: str, run: Callable[[DriverInput], None]) -> None:
    """Run what the launcher wrote. An error of ours is handed to the launcher in full."""
    die_with(os.getppid())
    given = DriverInput.read(Path(path))
    try:
        run(given)
    except AjetError as error:
        RunError.of(error).write(RunPayload.decode(given.payload).reports)
        raise


def retry_slow_start(start: Callable[[], T]) -> T:
    """Start Ray, again if its daemons were too slow: it allows them 30 s, which a machine under load can exceed."""
    import ray

    for _ in range(RAY_STARTS - 1):
        try:
            return start()
        except Exception as error:
            if SLOW_START not in str(error):
                raise
            ray.shutdown()
    return start()


def wait_for_nodes(nodes: int) -> None:
    """Return when this many machines have joined the cluster that this process is connected to."""
    import ray

    until = time.monotonic() + JOIN_DEADLINE_S
    while (joined := sum(bool(node["Alive"]) for node in ray.nodes())) < nodes:
        if time.monotonic() > until:
            raise TimeoutError(f"{joined} of {nodes} machines joined the cluster within {JOIN_DEADLINE_S:.0f} s")
        time.sleep(1)
