"""The records of a store, resources, spans and hooks, by the names of Agent-lightning's `types`."""

from typing import Any

from ajet.compat.agentlightning.litagent import Hook
from ajet.compat.agentlightning.store import AttemptedRollout, NamedResources, ResourcesUpdate
from ajet.observe.tracing import Triplet
from ajet.schema.resources import LLM, PromptTemplate
from ajet.schema.span import Span, SpanStatus
from ajet.store.records import Attempt, AttemptStatus, Rollout, RolloutConfig, RolloutStatus, Worker, WorkerStatus
from ajet.store.records import Mode as RolloutMode

ProxyLLM = LLM
"""The endpoint of an episode carries its own key: there is nothing to strip."""
Dataset = list
"""A data set has `__len__` and `__getitem__`; a list has."""
TaskInput = Any

__all__ = [
    "LLM",
    "Attempt",
    "AttemptStatus",
    "AttemptedRollout",
    "Dataset",
    "Hook",
    "NamedResources",
    "PromptTemplate",
    "ProxyLLM",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "RolloutMode",
    "RolloutStatus",
    "Span",
    "SpanStatus",
    "TaskInput",
    "Triplet",
    "Worker",
    "WorkerStatus",
]
