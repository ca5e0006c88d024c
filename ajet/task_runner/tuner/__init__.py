"""What a workflow gets besides its task: the model being tuned, as a client of the workflow's framework."""

from ajet.task_judge.helper import HelperModel
from ajet.task_runner.tuner.tuner import AjetTuner, BaseUrlAndKey

__all__ = ["AjetTuner", "BaseUrlAndKey", "HelperModel"]
