"""`--backbone=prompt`: tune prompt templates and leave the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.backbone import LaunchOptions

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.observe.experiment import ExperimentFolder


def run(config: Config, experiment: ExperimentFolder, options: LaunchOptions) -> int:
    """0: the search has ended, and `prompts/best.yaml` holds the best templates; 1: no proposal could be tried."""
    from ajet.backbone.prompt.loop import PromptRun

    return PromptRun(config, experiment, options).run()
