"""Worlds that agents act in: see `environment`."""

from ajet.environment.environment import Environment, StepResult

__all__ = ["Environment", "StepResult"]
