"""What a workflow gets besides its task: the model that is being tuned, behind the face its framework knows."""

from ajet.helper import HelperModel
from ajet.tuner.tuner import AjetTuner, BaseUrlAndKey

__all__ = ["AjetTuner", "BaseUrlAndKey", "HelperModel"]
