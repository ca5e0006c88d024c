"""What commands name: runs, models (`RUN`, `EXPERIMENT`, `TARGET` of `ajet chat` and `serve`, `--model`), options.

A target is a YAML file, an experiment (its folder, or its name in `saved_experiments`) or checkpoint folder (its `hf/`
weights), a model folder, a hub id, or `tiny:<name>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ajet.schema.chat import Tool, plain_text
from ajet.schema.episode import ROOT
from ajet.schema.errors import ConfigError
from ajet.system.command_line import ArgumentError

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.observe.viewer import Experiment

DEFAULT_LENGTH = 8192
"""Tokens of a conversation, unless a YAML file sets `rollout.max_model_len`."""


def find_experiment(given: Path | None) -> Path:
    """The folder given as a path, or as a name within `saved_experiments`."""
    root = Path("saved_experiments")
    if given is None:
        return root
    named = root / given
    return named if not given.exists() and named.exists() else given


def opened_experiment(given: Path) -> Experiment:
    """The experiment at a path or of a name. Raises an error that names those that there are."""
    from ajet.observe.viewer import Experiment, ExperimentNotFoundError, Library, is_experiment

    path = find_experiment(given)
    if is_experiment(path):
        return Experiment(path)
    there = Library(Path("saved_experiments")).names()
    near = get_close_matches(str(given), there, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    if str(given) in there:
        hint = f"./{given} is something else: write {Path('saved_experiments') / given}\n    "
    raise ExperimentNotFoundError(
        f"{given}: no such run\n    {hint}"
        + (
            f"runs in saved_experiments: {', '.join(there)}"
            if there
            else "saved_experiments has none; give the folder of a run"
        )
    )


def target_config(target: str, overrides: Sequence[str] = ()) -> Config:
    """The config with which to talk to a target."""
    from ajet.config import load_config, make_config

    if target.endswith((".yaml", ".yml")):
        # nothing is trained: no workflow is needed, and an engine that only talks will do
        return load_config(target, overrides, backbone="debug", complete=False)
    if overrides:
        raise ConfigError(f"overrides ({overrides[0]} …) need a YAML file as TARGET, and {target} isn't one")
    ran = _rollout_of(target)
    return make_config(
        {
            "model.path": weights_of(target),
            "rollout.engine": "torch",
            "rollout.max_model_len": ran.get("max_model_len", DEFAULT_LENGTH),
            "rollout.temperature": ran.get("temperature", 1.0),
            "rollout.reasoning_history": ran.get("reasoning_history", "template"),
        }
    )


class RunSetting(NamedTuple):
    """What the agent of a run was given."""

    system: str = ""
    tools: Sequence[Tool] = ()


def run_setting(target: str) -> RunSetting:
    """The system message and tools of the newest recorded episode of a run, to talk to its model as its agent did.
    Empty for any other target."""
    from ajet.observe.episode_store import EpisodeStore

    file = find_experiment(Path(target)) / "episodes.sqlite"
    if not file.is_file():
        return RunSetting()
    store = EpisodeStore(file)
    try:
        rows, _ = store.page(limit=1)
        tree = store.get(rows[0]["episode_id"]).episode.tree if rows else None
    finally:
        store.close()
    if tree is None or not tree.calls:
        return RunSetting()
    call = tree.calls[0]
    said = [message for message in call.new_messages if message.get("role") in ("system", "developer")]
    system = plain_text(said[0].get("content")) if said else ""
    return RunSetting(system, tree.toolsets[call.tools] if call.tools != ROOT else ())


def _rollout_of(target: str) -> dict[str, Any]:
    """`ajet.rollout` of an experiment's config; empty for any other target."""
    from ajet.observe.viewer import Experiment

    folder = find_experiment(Path(target))
    ajet = Experiment(folder).config().get("ajet") if folder.is_dir() else None
    return (ajet.get("rollout") or {}) if isinstance(ajet, dict) else {}


def weights_of(target: str) -> str:
    """The model that a target names: the `hf/` folder of an experiment or checkpoint, or else the target itself."""
    folder = find_experiment(Path(target).expanduser())
    if not folder.is_dir() and not _may_be_model(target):
        opened_experiment(folder)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return str(folder) if folder.is_dir() else target
    if (folder / "hf" / "config.json").is_file():
        return str((folder / "hf").resolve())
    raise ConfigError(
        f"{target} holds no weights: neither hf/config.json nor config.json (has the run saved a step yet?)"
    )


def _may_be_model(target: str) -> bool:
    """Whether a target that is no folder can be a model: `tiny:NAME`, `OWNER/NAME`, or a short hub id that is
    cached."""
    from ajet.engine.model_source import TINY, ModelSource

    return "/" in target or target.startswith(TINY.rstrip(":")) or ModelSource.resolve(target).folder() is not None


def weights_folder(folder: Path, *, best: bool = False) -> Path:
    """The Hugging Face folder of an experiment's newest (or best) checkpoint, of a checkpoint, or the folder itself."""
    if (folder / "checkpoints").is_dir():
        from ajet.trainer.checkpoint import CheckpointFolder, load

        checkpoints = CheckpointFolder(folder / "checkpoints")
        if best:
            if (path := checkpoints.best()) is None:
                raise ConfigError(f"{folder} holds no checkpoint with a validation")
            return load(path).path / "hf"
        if (newest := checkpoints.newest()) is not None:
            return newest.path / "hf"
        # verl's checkpoints have their own format; its newest weights are in hf/
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder, and no run in saved_experiments has that name (`ajet runs`)")
    return Path(weights_of(str(folder)))


def options_of(given: Sequence[str], what: str) -> dict[str, Any]:
    """Arguments `KEY=VALUE`, their values as YAML reads them. `what`: what they are, for errors."""
    from ajet.config.yaml_source import parse_value

    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ArgumentError(f"{what} {text!r}: write KEY=VALUE, for example tools=[calculator]")
        options[key] = parse_value(value, f"{what} {key}")
    return options
