"""What is looked at before a run on Ray is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajet.config import Config


def check_user_classes(config: Config) -> None:
    """Import the workflow and the judge: what is wrong with them should be said now, not by a worker in a minute."""
    from ajet.task_judge.load import load_judge
    from ajet.user_code import import_class
    from ajet.workflow import Workflow

    named = config.ajet.rollout.user_workflow or ""
    import_class(named, Workflow, key="ajet.rollout.user_workflow", base_dirs=config.base_dirs)
    load_judge(config, config.base_dirs)
