"""`--backbone=prompt`: tune prompt templates and leave the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.backbone import LaunchOptions
from ajet.schema.install import lazily

if TYPE_CHECKING:
    from ajet.backbone.prompt.journal import dump as dump
    from ajet.backbone.prompt.journal import read_best as read_best
    from ajet.backbone.prompt.settings import search_lines as search_lines
    from ajet.config import Config
    from ajet.observe.experiment import ExperimentFolder


def run(config: Config, experiment: ExperimentFolder, options: LaunchOptions) -> int:
    """0: the search has ended, and `prompts/best.yaml` holds the best templates; 1: no proposal could be tried."""
    from ajet.backbone.prompt.loop import PromptRun

    return PromptRun(config, experiment, options).run()


__getattr__ = lazily(
    __name__,
    {
        "dump": "journal",
        "read_best": "journal",
        "search_lines": "settings",
    },
)
