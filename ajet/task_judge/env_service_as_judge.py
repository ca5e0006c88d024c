"""`EnvServiceJudge`: asks an environment service for the reward. The name is reserved; there is no such service yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.schema.errors import FeatureUnavailableError
from ajet.task_judge.base_judge import BaseJudge

if TYPE_CHECKING:
    from ajet.config import Config


class EnvServiceJudge(BaseJudge):
    """Can be named in a config; using it raises an error that says what is missing."""

    def __init__(self, config: Config) -> None:
        raise FeatureUnavailableError(
            "ajet.task_judge.judge_protocol: environment services are not available in this version, so "
            "EnvServiceJudge can't be used. Return the reward from the workflow, or use a judge of your own"
        )
