"""`load_workflow`: the workflow that a config asks for, its own class or a ready agent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.schema.user_code import import_class
from ajet.task_runner.workflow import Workflow

if TYPE_CHECKING:
    from ajet.config import Config

WORKFLOW_KEY = "ajet.rollout.user_workflow"


def load_workflow(config: Config, base_dirs: Sequence[Path] = ()) -> type[Workflow]:
    """The class that `rollout.user_workflow` names, or one that runs `rollout.agent`. Raises a `UserError`."""
    rollout = config.ajet.rollout
    if rollout.agent is None:
        return import_class(rollout.user_workflow or "", Workflow, key=WORKFLOW_KEY, base_dirs=base_dirs)
    if rollout.agent.type == "cli":
        from ajet.task_runner.cli_workflow import build_cli_agent, cli_workflow_of

        return cli_workflow_of(build_cli_agent(config, base_dirs))
    from ajet.task_runner.agent_workflow import build_agent, workflow_of

    return workflow_of(build_agent(config, base_dirs))
