"""`AjetTuner`, what a workflow gets besides its task: the model being tuned, as a client of its own framework."""

from ajet.task_runner.tuner import AjetTuner, BaseUrlAndKey, HelperModel

__all__ = ["AjetTuner", "BaseUrlAndKey", "HelperModel"]
