"""What a workflow gets besides its task: the model being tuned, as a client of the workflow's framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.schema.install import lazily
from ajet.task_judge.helper import HelperModel
from ajet.task_runner.tuner.tuner import AjetTuner, BaseUrlAndKey

if TYPE_CHECKING:
    from ajet.task_runner.tuner.clients import agentscope_model as agentscope_model
    from ajet.task_runner.tuner.clients import rehearse as rehearse
    from ajet.task_runner.tuner.connection import Connection as Connection


__all__ = ["AjetTuner", "BaseUrlAndKey", "HelperModel"]

__getattr__ = lazily(
    __name__,
    {
        "Connection": "connection",
        "agentscope_model": "clients",
        "rehearse": "clients",
    },
)
