"""`ajet export`: weights or episodes of a run for other programs.

ajet export weights EXPERIMENT FOLDER [--best]       a Hugging Face folder (LoRA merged), with a model card
ajet export episodes EXPERIMENT FILE [--format …]    jsonl, parquet, or conversations to fine-tune on (sft)
"""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ajet.schema.errors import ConfigError


def run(argv: Sequence[str]) -> int:
    """Export, and say where it is."""
    if argv and argv[0] == "episodes":
        from ajet.cli import export_episodes

        return export_episodes.run(argv[1:])
    parser = ArgumentParser("ajet export", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True, metavar="weights|episodes")
    weights = kinds.add_parser("weights", help="a Hugging Face folder")
    weights.add_argument("experiment", type=Path)
    weights.add_argument("target", type=Path)
    weights.add_argument("--best", action="store_true", help="the checkpoint with the best validation, not the newest")
    weights.add_argument("--force", action="store_true", help="replace what is there")
    weights.set_defaults(export=_weights)
    kinds.add_parser("episodes", help="recorded episodes, with filters: `ajet export episodes --help`")
    arguments = parser.parse_args(argv)
    print(arguments.export(arguments))
    return 0


def _weights(arguments: Namespace) -> str:
    from ajet.cli.eval import weights_folder

    source = weights_folder(arguments.experiment, best=arguments.best)
    target: Path = arguments.target
    if target.exists() and any(target.iterdir()):
        if not arguments.force:
            raise ConfigError(f"{target} is not empty: choose another folder, or --force")
        shutil.rmtree(target)
    shutil.copytree(source.resolve(), target, dirs_exist_ok=True)
    (target / "README.md").write_text(model_card(arguments.experiment, source), encoding="utf-8")
    return f"{target}: weights of {source.resolve().parent.name}, loadable with transformers and vLLM"


def model_card(experiment: Path, weights: Path) -> str:
    """Markdown: what the weights were trained from and on, and how well they did."""
    import yaml

    config_file = experiment / "config.resolved.yaml"
    config: dict[str, Any] = yaml.safe_load(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    ajet = config.get("ajet", {})
    common = ajet.get("trainer_common", {})
    algorithm = common.get("algorithm", {})
    state_file = weights.resolve().parent / "state.json"
    state: dict[str, Any] = json.loads(state_file.read_text()) if state_file.is_file() else {}
    base = ajet.get("model", {}).get("path", "unknown")
    rows = {
        "Base model": base,
        "Steps": state.get("step", "unknown"),
        "Validation reward": state.get("score", "not validated at this step"),
        "Loss": f"{algorithm.get('policy_loss')}, {algorithm.get('adv_estimator')}, {algorithm.get('loss_norm')}",
        "Learning rate": common.get("optim", {}).get("lr", "unknown"),
        "Tasks a step × repeats": f"{ajet.get('data', {}).get('train_batch_size')} × "
        f"{ajet.get('rollout', {}).get('num_repeat')}",
        "Workflow": ajet.get("rollout", {}).get("user_workflow", "unknown"),
    }
    lines = ["---", "library_name: transformers", "tags: [agents, reinforcement-learning]"]
    if "/" in base and not base.startswith((".", "/")):
        lines.append(f"base_model: {base}")
    lines += ["---", "", f"# {experiment.name}", "", "Trained with AgentJet.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(lines) + "\n"
