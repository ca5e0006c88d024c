"""What a workflow gets besides its task: the model that is being tuned, behind the face its framework knows."""

from ajet.tuner.tuner import AjetTuner, BaseUrlAndKey, HelperModel

__all__ = ["AjetTuner", "BaseUrlAndKey", "HelperModel"]
