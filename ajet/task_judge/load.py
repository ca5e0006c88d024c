"""The judge that a config names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ajet.schema.errors import FeatureUnavailableError
from ajet.task_judge.base_judge import BaseJudge
from ajet.user_code import import_class

if TYPE_CHECKING:
    from ajet.config import Config

KEY = "ajet.task_judge.judge_protocol"


def load_judge(config: Config, base_dirs: Sequence[Path] = ()) -> BaseJudge | None:
    """Import and build `task_judge.judge_protocol`; None where it is null: then every workflow returns its reward."""
    section = config.ajet.task_judge
    if section.judge_type == "rubrics_auto_grader":
        raise FeatureUnavailableError(
            "ajet.task_judge.judge_type: 'rubrics_auto_grader' is not available in this version. "
            "Use 'customized_protocol' with your own judge in ajet.task_judge.judge_protocol"
        )
    if section.judge_protocol is None:
        return None
    return import_class(section.judge_protocol, BaseJudge, key=KEY, base_dirs=base_dirs)(config)
