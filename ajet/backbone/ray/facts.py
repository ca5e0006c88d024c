"""What is known of a run on Ray, and what its processes are told.

`Machine`, `RunFacts` and `Remark`: what the mappings from our configuration to verl's and Trinity's know, and what they
have to say. `RunPayload`: what all processes must know, as one string inside the configuration of verl or Trinity.
`DriverInput` and `run_driver`: for the driver, the child process that runs one of them.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from ajet.backbone.plan import training_steps
from ajet.config import Config
from ajet.schema.chat import GREEDY_BELOW
from ajet.schema.errors import AjetError, ConfigError, UserError
from ajet.system.processes import die_with
from ajet.task_reader import TaskStream, build_reader, read_training_tasks
from ajet.task_runner.remote import KEY_VARIABLE

log = logging.getLogger(__name__)

Settings = dict[str, Any]
"""Keys of verl or Trinity (dotted), and their values."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machines of a run."""

    platform: Literal["cuda", "cpu"] = "cuda"
    flash_attention: bool = True
    """Whether flash-attn is installed: only with it are sequences packed without padding."""
    logical_gpus: int = 1
    """How many GPUs a machine without any announces to Ray: trainers and engines ask for them."""

    @property
    def cpu(self) -> bool:
        return self.platform == "cpu"

    def dtype(self, asked: str) -> str:
        """The number format of computation."""
        return ("float32" if self.cpu else "bfloat16") if asked == "auto" else asked


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a mapping must know of the run beside its configuration."""

    model_path: str
    checkpoint_dir: Path
    total_steps: int
    payload: str = ""
    """`RunPayload.encode()`, for our own classes in the processes of verl and Trinity."""
    scratch: Path = Path()
    """Where the run's metrics files go."""
    validates: bool = True
    """Whether there are validation tasks."""
    resumed_step: int | None = None
    """The step after which the run goes on; None: from the start."""
    lacks_validation: bool = False
    """Whether the validation after that step was cut off, and is run again."""


@dataclass(frozen=True, slots=True)
class Remark:
    """One of our keys that the backbone honours only in part, or not at all."""

    key: str
    message: str
    refused: bool = False

    @classmethod
    def refusal(cls, key: str, message: str) -> Remark:
        return cls(key, message, refused=True)

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


ONE_ROW = "{} sees one row at a time: where one agent of an episode gives several rows, each has its own ratio"


def plain(value: Any) -> Any:
    """What the user wrote for verl or Trinity, as OmegaConf takes it: it knows no other kinds of lists and groups."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def shared_notes(
    config: Config, machine: Machine, title: str, own: Settings, ours: tuple[str, ...]
) -> Iterator[Remark]:
    """What neither verl nor Trinity can honour, `own` included: the user's keys for it, of which `ours` are
    decided by keys of ours."""
    ajet = config.ajet
    common, algorithm = ajet.trainer_common, ajet.trainer_common.algorithm
    place = "ajet.trainer_common"
    if algorithm.policy_loss == "sft" and algorithm.sft.demonstrations is not None:
        yield Remark.refusal(f"{place}.algorithm.sft.demonstrations", "only `local` trains on recorded conversations")
    if ajet.rollout.engine in ("remote", "scripted"):
        yield Remark.refusal("ajet.rollout.engine", f"`{ajet.rollout.engine}` has no weights to train")
    if ajet.rollout.temperature < GREEDY_BELOW:
        yield Remark.refusal("ajet.rollout.temperature", "training at temperature 0 explores nothing")
    if algorithm.policy_loss == "gspo":
        yield Remark(f"{place}.algorithm.policy_loss", ONE_ROW.format(title))
    if algorithm.sequence_mask is not None:
        yield Remark(f"{place}.algorithm.sequence_mask", ONE_ROW.format(title))
    early_stop = common.early_stop
    for name, given in (("target", early_stop.target), ("patience", early_stop.patience)):
        if given is not None:
            yield Remark.refusal(f"{place}.early_stop.{name}", f"{title} runs to its last step")
    if ajet.task_reader.curriculum.enabled:
        yield Remark.refusal(
            "ajet.task_reader.curriculum.enabled",
            f"{title} reads tasks ahead, before it is known how often they are solved",
        )
    if algorithm.zero_variance_groups == "resample":
        yield Remark(f"{place}.algorithm.zero_variance_groups", f"with {title} this is `skip`: no other tasks instead")
    if algorithm.distillation.teacher is not None:
        yield Remark.refusal(f"{place}.algorithm.distillation.teacher", "only `local` learns from a teacher")
    if algorithm.replay.groups:
        yield Remark.refusal(f"{place}.algorithm.replay.groups", "only `local` trains past groups once more")
    if common.kl_reference_sync:
        yield Remark.refusal(f"{place}.kl_reference_sync", f"{title}'s reference stays the starting model")
    if common.kl_adaptive.target is not None:
        yield Remark.refusal(f"{place}.kl_adaptive.target", f"{title}'s KL term has a fixed coefficient")
    if ajet.model.lora.enabled and ajet.model.lora.dropout:
        yield Remark.refusal("ajet.model.lora.dropout", f"{title}'s adapters have no dropout: set it to 0")
    if ajet.model.lora.base_bits is not None:
        yield Remark.refusal("ajet.model.lora.base_bits", f"{title} keeps the base weights whole")
    if common.optim.state_bits != 32:
        yield Remark.refusal(f"{place}.optim.state_bits", f"{title} keeps the optimiser's state in 32 bits")
    if common.optim.master != "float32":
        yield Remark.refusal(f"{place}.optim.master", f"{title} keeps the trained weights in float32")
    if not machine.cpu and ajet.rollout.engine == "torch":
        yield Remark("ajet.rollout.engine", f"on GPUs vllm (or sglang) serves {title}, not the embedded engine")
    for key in own:
        if f"{key.removeprefix('+')}.".startswith(ours):
            yield Remark.refusal(
                f"ajet.{title.lower()}.{key}",
                f"our own keys decide this on {title} too: see ajet.trainer_common, ajet.rollout and ajet.model",
            )


def planned_facts(config: Config) -> RunFacts:
    """What is known of a run that isn't started: enough to show the library's configuration."""
    steps = training_steps(config, len(read_training_tasks(build_reader(config))))
    return RunFacts(config.ajet.model.path, config.experiment_path / "checkpoints", steps, payload="…")


def check_refused(notes: Sequence[Remark], name: str) -> None:
    """Raise if one of the keys can't be honoured at all."""
    refused = [note for note in notes if note.refused]
    if refused:
        raise ConfigError(f"the {name} backbone can't honour:\n" + "\n".join(f"  {note}" for note in refused))


def micro_tokens(config: Config) -> int:
    """Tokens of one forward and backward pass on one GPU; a row must fit."""
    ajet = config.ajet
    longest = ajet.data.max_prompt_length + ajet.data.max_response_length
    asked = ajet.trainer_common.micro_tokens
    return max(longest, 16384 if asked == "auto" else asked)


def checkpoint_step(folder: str) -> int | None:
    """The step of one of verl's checkpoints: its folder is named after it."""
    name = PurePath(folder).name
    step = name.removeprefix("global_step_")
    return int(step) if step != name and step.isdecimal() else None


def newest_named(checkpoints: Path) -> int | None:
    """The step in the file that verl writes after everything else of a checkpoint, and reads as it resumes; Trinity's
    trainer is verl's. A full disk or a kill may leave it empty: the newest checkpoint is whole without it. If what it
    names is gone, verl would begin again, unseen: the newest before it counts."""
    newest = checkpoints / "latest_checkpointed_iteration.txt"
    if not newest.exists():
        return None
    named = newest.read_text().strip()  # whoever writes it by hand ends the line
    if named and (checkpoints / f"global_step_{named}").is_dir():
        return int(named)
    there = [checkpoint_step(folder.name) or 0 for folder in checkpoints.glob("global_step_*")]
    step = max((step for step in there if not named or step < int(named)), default=0)
    if not step:
        if not named:  # verl can't read that
            newest.unlink()
        return None
    if named:
        log.warning("%s holds no checkpoint of step %s any more; using that of step %d", checkpoints, named, step)
    newest.write_text(str(step))
    return step


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
    """Where the head node records episodes."""
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


@dataclass(frozen=True, slots=True)
class RunError:
    """Why a run can't go on, as its processes report it and the launcher says it."""

    text: str
    users: bool
    """Whether it is the user's to correct, and so said as any backbone says it."""

    @classmethod
    def of(cls, error: BaseException) -> RunError:
        """Describe an exception, or the one that Ray wraps in it. Those that aren't ours are named."""
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
        try:
            path.write_text(json.dumps(asdict(self)))
        except OSError as error:  # of a full disk names no file, and would pass for the experiment's
            error.filename = str(path)
            raise

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
