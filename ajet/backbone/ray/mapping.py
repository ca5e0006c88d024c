"""What the mappings from our configuration to verl's and Trinity's share: what they know, and what they have to say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ajet.backbone.plan import training_steps
from ajet.schema.chat import GREEDY_BELOW
from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    from ajet.config import Config


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
    """A folder with the model and its tokenizer."""
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


def shared_notes(config: Config, title: str) -> Iterator[Remark]:
    """What neither verl nor Trinity can honour."""
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
    if ajet.model.lora.base_bits is not None:
        yield Remark.refusal("ajet.model.lora.base_bits", f"{title} keeps the base weights whole")
    if common.optim.state_bits != 32:
        yield Remark.refusal(f"{place}.optim.state_bits", f"{title} keeps the optimiser's state in 32 bits")
    if common.optim.master != "float32":
        yield Remark.refusal(f"{place}.optim.master", f"{title} keeps the trained weights in float32")


def planned_facts(config: Config) -> RunFacts:
    """What is known of a run that isn't started: enough to show the library's configuration."""
    from ajet.task_reader import build_reader, read_training_tasks

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
