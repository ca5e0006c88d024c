"""`EnvServiceJudge`: the reward that an environment service gives. The name is kept; the service is not built yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.schema.errors import FeatureUnavailableError
from ajet.task_judge.base_judge import BaseJudge

if TYPE_CHECKING:
    from ajet.config import Config


class EnvServiceJudge(BaseJudge):
    """Loads by its path, and says what is missing when a run is to use it."""

    def __init__(self, config: Config) -> None:
        raise FeatureUnavailableError(
            "ajet.task_judge.judge_protocol: environment services are not available in this version, so "
            "EnvServiceJudge has nobody to ask. Return the reward from the workflow, or name a judge of your own"
        )
