"""The model card of exported weights: what they were trained from and on, and how well they did. Plain Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def model_card(experiment: Path, weights: Path) -> str:
    """From the experiment's resolved configuration and the checkpoint's state."""
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
