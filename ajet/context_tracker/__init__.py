"""Messages → tokens, and one exact call tree per episode: see `docs/context_tracker.md`."""

from ajet.context_tracker.messages import TrackerSettings
from ajet.context_tracker.prompting import Renderer, TokenPrompt, describe_reasons
from ajet.context_tracker.samples import episode_samples, linear_samples
from ajet.context_tracker.tracker import ContextTracker, FinishedCalls, PreparedCall

__all__ = [
    "ContextTracker",
    "FinishedCalls",
    "PreparedCall",
    "Renderer",
    "TokenPrompt",
    "TrackerSettings",
    "describe_reasons",
    "episode_samples",
    "linear_samples",
]
