"""For programs written for Agent-lightning: its names, bound to our parts.

    import ajet.compat.agentlightning as agl

What differs on purpose: a trainer without an algorithm runs each task once and returns; a store's unknown ids are
errors; spans of model calls come from the gateway, so tracers instrument nothing; a missing reward is never 0.
"""

from __future__ import annotations

import logging
from typing import Any

from ajet.compat.agentlightning.runner import Hook, LitAgent, LitAgentRunner, llm_rollout, prompt_rollout, rollout
from ajet.compat.agentlightning.store import (
    AttemptedRollout,
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    LightningStoreThreaded,
    NamedResources,
    ResourcesUpdate,
)
from ajet.compat.agentlightning.tracer import (
    AgentOpsTracer,
    DummyTracer,
    LlmProxyTraceToTriplet,
    OtelTracer,
    TraceAdapter,
    Tracer,
    TracerTraceToTriplet,
    TraceToMessages,
    get_rewards_from_span,
)
from ajet.compat.agentlightning.trainer import APO, VERL, Baseline, Trainer, algo
from ajet.observe.tracing import (
    Triplet,
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    find_final_reward,
    find_reward_spans,
    get_message_value,
    get_object_value,
    get_reward_value,
    is_reward_span,
    operation,
)
from ajet.schema import __version__
from ajet.schema.resources import LLM, PromptTemplate
from ajet.schema.span import Span, SpanStatus
from ajet.store.records import Attempt, AttemptStatus, Rollout, RolloutConfig, RolloutStatus, Worker, WorkerStatus
from ajet.store.records import Mode as RolloutMode

__all__ = [
    "APO",
    "LLM",
    "VERL",
    "AgentOpsTracer",
    "Attempt",
    "AttemptStatus",
    "AttemptedRollout",
    "Baseline",
    "Dataset",
    "DummyTracer",
    "Hook",
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreClient",
    "LightningStoreServer",
    "LightningStoreThreaded",
    "LitAgent",
    "LitAgentRunner",
    "LlmProxyTraceToTriplet",
    "NamedResources",
    "OtelTracer",
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
    "TraceAdapter",
    "TraceToMessages",
    "Tracer",
    "TracerTraceToTriplet",
    "Trainer",
    "Triplet",
    "Worker",
    "WorkerStatus",
    "__version__",
    "algo",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "llm_rollout",
    "operation",
    "prompt_rollout",
    "rollout",
    "setup_logging",
]

ProxyLLM = LLM
"""The endpoint of an episode carries its own key: there is nothing to strip."""
Dataset = list
"""A data set has `__len__` and `__getitem__`; a list has."""
TaskInput = Any

_NOT_HERE = {
    "Algorithm": "an algorithm of your own is a coroutine with @algo",
    "LLMProxy": "the gateway serves each episode's model: take the parameter `llm`",
    "lightning_cli": "write a YAML, and override its keys on the command line",
    "MongoLightningStore": "`ajet store` keeps a SQLite file or PostgreSQL: LightningStoreClient",
    "reward": "use emit_reward",
    "WeaveTracer": "use OtelTracer",
    "SharedMemoryExecutionStrategy": "runners are tasks of the trainer's process, or `ajet runner` elsewhere",
    "ClientServerExecutionStrategy": "runners are tasks of the trainer's process, or `ajet runner` elsewhere",
}
"""Names of Agent-lightning without a counterpart, and what to use."""


def __getattr__(name: str) -> object:
    if name in _NOT_HERE:
        raise AttributeError(f"Agent-lightning's {name} is not here: {_NOT_HERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def setup_logging(level: str | int = "INFO", *, propagate: bool = False) -> None:
    """Show this program's log on standard error."""
    logger = logging.getLogger("ajet")
    logger.setLevel(level)
    logger.propagate = propagate
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-8s %(name)s: %(message)s"))
        logger.addHandler(handler)
