"""The trinity backbone: train on Trinity-RFT and Ray, explorer and trainer apart. `run(config, experiment, options)`.

Importing this needs neither Trinity nor torch; without the extra, a run says how to install it. Each process of a run
calls `install` before it imports Trinity: Ray does so when a worker starts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ajet.backbone.metrics import from_trinity
from ajet.backbone.ray import launcher
from ajet.backbone.ray.facts import Machine, Remark, check_refused, newest_named, planned_facts
from ajet.backbone.ray.start import detect_machine, on_cpu, planned_machine, require_library
from ajet.backbone.ray.trinity.config import (
    CPU_GPUS,
    RUN_NAME,
    check_honoured,
    compose_trinity_config,
    run_mode,
    trinity_settings,
    unknown_keys,
    validates,
)
from ajet.backbone.ray.watcher import Source, Tail
from ajet.engine.model_source import ModelSource
from ajet.schema.errors import MissingDependencyError

if TYPE_CHECKING:
    from ajet.backbone import LaunchOptions
    from ajet.config import Config
    from ajet.observe.experiment import ExperimentFolder


def run(config: Config, experiment: ExperimentFolder, options: LaunchOptions) -> int:
    return launcher.run(TrinityAdapter(), config, experiment, options)


def show_config(config: Config) -> str:
    """The configuration that Trinity is given, as YAML, after what Trinity can't honour."""
    from omegaconf import OmegaConf

    adapter = TrinityAdapter()
    adapter.require()
    machine = adapter.detect_machine()
    composed = compose_trinity_config(trinity_settings(config, planned_facts(config), machine))
    notes = [f"# {note}" for note in check_honoured(config, machine)]
    return "\n".join([*notes, OmegaConf.to_yaml(OmegaConf.structured(composed))])


def planned_notes(config: Config) -> list[Remark]:
    """What a run would refuse or do in part, whether or not it could start on this machine."""
    machine = planned_machine()
    return [*check_honoured(config, machine), *padding_notes(config, machine), *unknown_keys(config)]


def padding_notes(config: Config, machine: Machine) -> Iterator[Remark]:
    """Trinity's trainer on GPUs fills rows up with the pad token, or with the end token if there is none."""
    source = ModelSource.resolve(config.ajet.model.path)
    if machine.cpu or not Path(source.path).is_dir():  # a hub id: its files come with the run
        return
    tokenizer: Any = source.tokenizer()
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        yield Remark.refusal(
            "ajet.model.path",
            f"the tokenizer of {config.ajet.model.path} has neither a pad token nor an end token, and Trinity fills "
            "rows up with one: set pad_token in its tokenizer_config.json to any of its special tokens",
        )


class TrinityAdapter:
    """Implements `BackboneAdapter`."""

    name = "trinity"
    title = "Trinity"
    driver = "ajet.backbone.ray.trinity.driver"
    notes = staticmethod(check_honoured)
    settings = staticmethod(trinity_settings)
    validates = staticmethod(validates)

    def require(self) -> None:
        require_library("trinity-rft", "trinity")

    def detect_machine(self) -> Machine:
        machine = detect_machine("trinity", logical_gpus=CPU_GPUS)
        if not machine.cpu and find_spec("vllm") is None:
            raise MissingDependencyError(
                "the trinity backbone needs vLLM on a machine with GPUs\n"
                "    uv pip install 'trinity-rft[vllm]==0.6.0' --override constraints/trinity-vllm-overrides.txt"
            )
        install()
        return machine

    def check(self, config: Config, machine: Machine, options: LaunchOptions) -> None:
        """Trinity checks its GPUs itself."""
        check_refused([*padding_notes(config, machine), *unknown_keys(config)], "trinity")

    def environment(self, scratch: Path) -> dict[str, str]:
        return {}

    def sources(self, config: Config, scratch: Path) -> list[Source]:
        trains = self.trains(config)
        return [
            Source(Tail(scratch / "explorer.jsonl"), from_trinity, ends_step=not trains),
            Source(Tail(scratch / "trainer.jsonl"), from_trinity, ends_step=trains),
        ]

    def trains(self, config: Config) -> bool:
        return run_mode(config) != "explore"

    def newest_step(self, config: Config, checkpoints: Path) -> int | None:
        """The step of the newest complete checkpoint; when only exploring, the last step that was explored."""
        folder = self._folder(config, checkpoints)
        if not self.trains(config):
            state = folder / "explorer_meta.json"
            return int(json.loads(state.read_text())["latest_iteration"]) if state.exists() else None
        return _newest_checkpoint(folder)

    def newest_weights(self, config: Config, checkpoints: Path) -> Path | None:
        folder = self._folder(config, checkpoints)
        step = _newest_checkpoint(folder)
        if step is None:
            return None
        ours, trinitys = folder / f"step_{step}" / "hf", folder / f"global_step_{step}" / "actor" / "huggingface"
        return ours if ours.is_dir() else trinitys

    def _folder(self, config: Config, checkpoints: Path) -> Path:
        """Where Trinity keeps what belongs to the run."""
        return checkpoints / config.ajet.project_name / RUN_NAME


def _newest_checkpoint(folder: Path) -> int | None:
    """Trinity's own trainer and the embedded one write different folders."""
    steps = [step for step in [newest_named(folder)] if step is not None]
    steps += [int(path.name.removeprefix("step_")) for path in folder.glob("step_*") if (path / "hf").is_dir()]
    return max(steps, default=None)


HOOK = "ajet.backbone.ray.trinity.install"

_STAND_INS: dict[str, tuple[str, ...]] = {
    "vllm": (),
    "vllm.config": ("ModelConfig",),
    "vllm.entrypoints": (),
    "vllm.entrypoints.chat_utils": (
        "ChatTemplateContentFormat",
        "ConversationMessage",
        "parse_chat_messages",
        "parse_chat_messages_async",
    ),
    "vllm.inputs": ("MultiModalDataDict",),
}


def install() -> None:
    """Make Trinity importable without vLLM, if this is a run on the CPU.

    Trinity 0.6 imports a few names of vLLM wherever it handles models. On a machine without a GPU vLLM isn't installed
    and none of them is ever used, so stand-ins take their place.
    """
    if not on_cpu() or "vllm" in sys.modules or find_spec("vllm") is not None:
        return
    for name, members in _STAND_INS.items():
        module: Any = ModuleType(name, "Stands in for vLLM, which is not installed.")
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        for member in members:
            setattr(module, member, _Absent)
        sys.modules[name] = module


class _Absent:
    """A name of vLLM's that is never used."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("vLLM is not installed in this environment")
