"""AgentJet: train the language model inside an agent.

These are the names that a user's workflow imports. They load lazily: `import ajet` loads no heavy library.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from ajet.schema import __version__

if TYPE_CHECKING:
    from ajet.backbone.trainer_api import Trainer, evaluate
    from ajet.compat.agentjet import AgentJetJob
    from ajet.observe.tracing import emit_annotation, emit_exception, emit_message, emit_object, emit_reward, operation
    from ajet.schema.resources import LLM, PromptTemplate
    from ajet.schema.task import Task, WorkflowOutput, WorkflowTask
    from ajet.task_runner.breakpoints import bp
    from ajet.task_runner.workflow import rollout
    from ajet.tuner import AjetTuner
    from ajet.workflow import Workflow

__all__ = [
    "LLM",
    "AgentJetJob",
    "AjetTuner",
    "PromptTemplate",
    "Task",
    "Trainer",
    "Workflow",
    "WorkflowOutput",
    "WorkflowTask",
    "__version__",
    "bp",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "evaluate",
    "operation",
    "rollout",
]

_HOMES = {
    "AgentJetJob": "ajet.compat.agentjet",
    "AjetTuner": "ajet.tuner",
    "LLM": "ajet.schema.resources",
    "PromptTemplate": "ajet.schema.resources",
    "Task": "ajet.schema.task",
    "Trainer": "ajet.backbone.trainer_api",
    "Workflow": "ajet.workflow",
    "WorkflowOutput": "ajet.schema.task",
    "WorkflowTask": "ajet.schema.task",
    "bp": "ajet.task_runner.breakpoints",
    "emit_annotation": "ajet.observe.tracing",
    "emit_exception": "ajet.observe.tracing",
    "emit_message": "ajet.observe.tracing",
    "emit_object": "ajet.observe.tracing",
    "emit_reward": "ajet.observe.tracing",
    "evaluate": "ajet.backbone.trainer_api",
    "operation": "ajet.observe.tracing",
    "rollout": "ajet.task_runner.workflow",
}

MOVED = {
    "ajet.compat.agentlightning.adapter": "ajet.compat.agentlightning.tracer",
    "ajet.compat.agentlightning.algorithm": "ajet.compat.agentlightning.trainer",
    "ajet.compat.agentlightning.emitter": "ajet.compat.agentlightning",
    "ajet.compat.agentlightning.litagent": "ajet.compat.agentlightning.runner",
    "ajet.compat.agentlightning.otel": "ajet.compat.agentlightning.tracer",
    "ajet.compat.agentlightning.types": "ajet.compat.agentlightning",
    "ajet.task_judge.rm_auto_grader_judge": "ajet.compat.agentjet",
    "ajet.task_rollout": "",
    "ajet.task_rollout.dashscope_llm_bridge": "ajet.compat.agentjet",
    "ajet.utils": "",
    "ajet.utils.robust_dashscope": "ajet.compat.agentjet",
}
"""Modules by the names that other systems or older versions gave them, and where these are. Empty: a folder of which
nothing else is left."""


class _Moved:
    """Imports the modules of `MOVED` under the names that they had. A finder and loader without the abstract classes
    of `importlib.abc`, which would double the time that `import ajet` takes."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, cast(Any, self), is_package=not MOVED[name]) if name in MOVED else None

    def create_module(self, _spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if home := MOVED[module.__name__]:
            names = vars(import_module(home)).items()
            vars(module).update({name: value for name, value in names if not name.startswith("__")})


sys.meta_path.append(cast(Any, _Moved()))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ajet' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
