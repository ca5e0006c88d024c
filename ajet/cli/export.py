"""`ajet export`: a run's weights or episodes, for other programs.

ajet export weights EXPERIMENT FOLDER [--best]        a Hugging Face folder
ajet export episodes EXPERIMENT [FILE] [--format …]   JSONL, Parquet or sft
ajet export prompt EXPERIMENT [FILE]                  a search's best templates
"""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace, RawDescriptionHelpFormatter, _SubParsersAction
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ajet.schema.errors import ConfigError
from ajet.schema.files import is_stream, write_whole
from ajet.system.command_line import CommandParser

EPISODES_EPILOG = """\
formats:
  jsonl    one episode per line: tree, ids, logprobs, masks, credit
  parquet  one model call per row: ids, logprobs, mask, advantage as columns
  sft      one conversation per line (messages, tools), to fine-tune on; replies
           cut by their length are no examples
  otlp     one episode per line as a trace of OpenTelemetry (OTLP JSON): calls,
           spans, reward

ajet export episodes math_agent good.jsonl --format sft --reward-min 1
"""
_BOUNDS = {"step_min": int, "step_max": int, "reward_min": float, "reward_max": float}
_TEXTS = ("task", "group", "status", "agent", "tag", "text")
"""The flags that choose episodes, and fields of `EpisodeFilter`."""
RECORDS = {"jsonl": "episodes", "parquet": "model calls", "sft": "conversations", "otlp": "traces"}
"""What one record of each format is."""


def run(argv: Sequence[str]) -> int:
    """Export, and say where to."""
    parser = CommandParser("ajet export", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True, metavar="weights|episodes|prompt")
    _weights_arguments(kinds)
    _episodes_arguments(kinds)
    _prompt_arguments(kinds)
    arguments = parser.parse_args(argv)
    said = arguments.export(arguments)
    if said:
        print(said)
    return 0


def _workflow(rollout: dict[str, Any]) -> str:
    """What ran: the workflow's class, without the folder that it was in here, or the ready agent."""
    agent = rollout.get("agent")
    return f"agent {agent.get('type')}" if agent else str(rollout.get("user_workflow") or "unknown").rpartition("/")[2]


def _weights_arguments(kinds: _SubParsersAction[CommandParser]) -> None:
    parser = kinds.add_parser("weights", help="a Hugging Face folder")
    parser.add_argument(
        "experiment", type=Path, help="an experiment's folder, its name in saved_experiments, or a checkpoint"
    )
    parser.add_argument("target", type=Path, help="the folder to write")
    parser.add_argument("--best", action="store_true", help="the checkpoint with the best validation, not the newest")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    parser.set_defaults(export=_export_weights)


def _export_weights(arguments: Namespace) -> str:
    from ajet.cli.targets import find_experiment, weights_folder

    experiment = find_experiment(arguments.experiment)
    source = weights_folder(experiment, best=arguments.best)
    target: Path = arguments.target
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file: name a folder")
    if target.exists() and any(target.iterdir()):
        if source.resolve().is_relative_to(target.resolve()) or target.is_symlink():
            raise ConfigError(f"{target} holds the weights themselves, or leads to others: choose another folder")
        if not arguments.force:
            raise ConfigError(f"{target} is not empty: choose another folder, or use --force")
    card = model_card(experiment, source)
    for old in target.iterdir() if target.exists() else ():  # not the folder, which may be a mounted disk
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    try:
        shutil.copytree(source.resolve(), target, dirs_exist_ok=True)
        (target / "README.md").write_text(card, encoding="utf-8")
    except OSError:  # a part of the weights is of no use, and would be in the way of the next try
        shutil.rmtree(target, ignore_errors=True)
        raise
    return f"{target}: weights of {source.resolve().parent.name}, loadable with transformers and vLLM"


def model_card(experiment: Path, weights: Path) -> str:
    """Markdown: what the weights were trained from and on, and how well they did. `experiment`: the run, or a folder of
    weights in it."""
    from ajet.backbone.training_settings import FULL_LR, LORA_LR
    from ajet.observe.viewer import Experiment

    near = (experiment.absolute(), *experiment.absolute().parents[:3])
    experiment = next((folder for folder in near if (folder / "config.resolved.yaml").is_file()), experiment)
    ajet = Experiment(experiment).config().get("ajet", {})
    common = ajet.get("trainer_common", {})
    rate = common.get("optim", {}).get("lr", "unknown")
    if rate is None:
        rate = LORA_LR if ajet["model"]["lora"]["enabled"] else FULL_LR
    algorithm = common.get("algorithm", {})
    state_file = weights.resolve().parent / "state.json"
    state: dict[str, Any] = json.loads(state_file.read_text()) if state_file.is_file() else {}
    base = str(ajet.get("model", {}).get("path", "unknown"))
    is_folder = base.startswith((".", "/", "~")) or base.count("/") > 1 or Path(base).is_dir()
    rows = {
        "Base model": Path(base).name if is_folder else base,
        "Steps": state.get("step", "unknown"),
        "Validation reward": state.get("score", "not validated at this step"),
        "Loss": f"{algorithm.get('policy_loss')}, {algorithm.get('adv_estimator')}, {algorithm.get('loss_norm')}",
        "Learning rate": rate,
        "Tasks per step × repeats": f"{ajet.get('data', {}).get('train_batch_size')} × "
        f"{ajet.get('rollout', {}).get('num_repeat')}",
        "Workflow": _workflow(ajet.get("rollout", {})),
    }
    lines = ["---", "library_name: transformers", "tags: [agents, reinforcement-learning]"]
    if "/" in base and not is_folder:
        lines.append(f"base_model: {base}")
    lines += ["---", "", f"# {experiment.name}", "", "Trained with AgentJet.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(lines) + "\n"


def _episodes_arguments(kinds: _SubParsersAction[CommandParser]) -> None:
    parser = kinds.add_parser(
        "episodes", help="recorded episodes", epilog=EPISODES_EPILOG, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", type=Path, help="an experiment's folder, or its name in saved_experiments")
    parser.add_argument("target", nargs="?", type=Path, help="the file to write (default: episodes.<format> here)")
    parser.add_argument("--format", choices=tuple(RECORDS), default="jsonl")
    for name, kind in _BOUNDS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    for name in _TEXTS:
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--validation", choices=("yes", "no"), help="only validation episodes, or none of them")
    parser.set_defaults(export=_export_episodes)


def _export_episodes(arguments: Namespace) -> str:
    from ajet.cli.targets import opened_experiment
    from ajet.observe.episode_store import EpisodeFilter, EpisodeStore
    from ajet.observe.export import ExportFormat, export_episodes

    form = ExportFormat(arguments.format)
    target = arguments.target or Path(f"episodes.{'parquet' if form is ExportFormat.PARQUET else 'jsonl'}")
    given = {name: value for name, value in vars(arguments).items() if name in (*_BOUNDS, *_TEXTS)}
    where = EpisodeFilter(**given, validation=None if arguments.validation is None else arguments.validation == "yes")
    store = EpisodeStore(opened_experiment(arguments.experiment).path / "episodes.sqlite")
    count = export_episodes(store, where, form, target)
    said = f"{count} {RECORDS[arguments.format]} in {target}"
    if not is_stream(target):
        return said
    print(said, file=sys.stderr)  # the target may be standard output
    return ""


def _prompt_arguments(kinds: _SubParsersAction[CommandParser]) -> None:
    parser = kinds.add_parser("prompt", help="the best templates of a search")
    parser.add_argument("experiment", type=Path, help="a search's folder, or its name in saved_experiments")
    parser.add_argument("target", nargs="?", type=Path, help="the file to write (default: the terminal)")
    parser.add_argument("--force", action="store_true", help="replace the file")
    parser.set_defaults(export=_export_prompt)


def _export_prompt(arguments: Namespace) -> str:
    from ajet.backbone.prompt import dump, read_best
    from ajet.cli.targets import find_experiment
    from ajet.config.interpolation import literal

    best = read_best(find_experiment(arguments.experiment))
    text = dump({"ajet": {"prompt_tuning": {"templates": literal(best["templates"])}}})
    target: Path | None = arguments.target
    if target is None:
        return text.rstrip("\n")
    if is_stream(target):
        target.write_text(text, encoding="utf-8")
        return ""
    if target.exists() and not arguments.force:
        raise ConfigError(f"{target} exists: choose another file, or use --force")
    write_whole(target, text, durable=True)
    return f"{target}: templates of candidate {best['candidate']}, version {best['version']}"
