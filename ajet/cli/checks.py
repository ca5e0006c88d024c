"""Checks of `ajet validate` that find problems before a run does: with the model's files, the trackers, the workflow
and the judge.

`problems` would end or spoil a run; `doubts` might. Nothing is run, and no weights are loaded, unless `--run` asks for
a `rehearsal`: one episode of the first task with scripted replies instead of a model. It finds what an import can't: a
workflow that raises, tools that don't work, a judge that doesn't return a number.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ajet.backbone.checks import model_problems
from ajet.backbone.debug import EpisodeView
from ajet.backbone.launch import DEFAULT_BACKBONE
from ajet.backbone.plan import serving_engine
from ajet.engine.base import Engine
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import Reply, ScriptedEngine, read_replies
from ajet.observe.metrics import missing_trackers
from ajet.schema.install import missing_for_training
from ajet.system.command_line import fail
from ajet.task_runner.runtime import Runtime

if TYPE_CHECKING:
    from ajet.backbone.ray import Remark
    from ajet.config import Config
    from ajet.environment.environment import EnvironmentSource
    from ajet.schema.episode import Episode
    from ajet.schema.task import Task
    from ajet.task_judge.base_judge import BaseJudge
    from ajet.task_runner.workflow import Workflow


def problems(config: Config, loaded: Loaded) -> Iterator[str]:
    """Problems that must be fixed."""
    if missing_for_training() is None:
        yield from model_problems(config, serving_engine(config, config.ajet.backbone or DEFAULT_BACKBONE))
    yield from _task_problems(loaded)
    yield from (str(note) for note in _backbone_notes(config) if note.refused)


def remarks(config: Config) -> Iterator[str]:
    """Settings that this machine, verl or Trinity doesn't follow."""
    if config.ajet.backbone != "debug":
        yield from missing_trackers(config).values()
    yield from (str(note) for note in _backbone_notes(config) if not note.refused)


def doubts(loaded: Loaded) -> Iterator[str]:
    """What looks wrong, though only a run can tell."""
    if loaded.judge is None or loaded.workflow is None:
        return
    wanted = set(loaded.judge.reads_output) or _keys_read(type(loaded.judge))
    given = _keys_written(loaded.workflow)
    if wanted and given and not wanted & given:
        judge, workflow = type(loaded.judge).__name__, loaded.workflow.__name__
        yield (
            f"{judge} reads {_named(wanted)} of the workflow's metadata, and {workflow} gives {_named(given)}: "
            "every episode would fail in the judge"
        )


def _backbone_notes(config: Config) -> list[Remark]:
    """Keys that verl or Trinity honours only in part, or refuses. The GPUs may be on another machine."""
    backbone = config.ajet.backbone
    if backbone == "verl":
        from ajet.backbone.ray import verl

        return verl.planned_notes(config)
    if backbone == "trinity":
        from ajet.backbone.ray import trinity

        return trinity.planned_notes(config)
    return []


def _task_problems(loaded: Loaded) -> Iterator[str]:
    if loaded.judge is None or not loaded.training:
        return
    first = loaded.training[0]
    absent = [key for key in loaded.judge.reads_task if key not in first.metadata]
    if absent:
        present = _named(set(first.metadata)) if first.metadata else "nothing"
        yield (
            f"{type(loaded.judge).__name__} reads {_named(set(absent))} of a task's metadata, and task "
            f"{first.task_id!r} has {present}"
        )


def _keys_written(workflow: type[object]) -> set[str]:
    """The keys of every `metadata={…}` in a workflow's source. Empty if they can't be determined."""
    keys: set[str] = set()
    for node in ast.walk(_syntax(workflow)):
        if isinstance(node, ast.keyword) and node.arg == "metadata":
            if not isinstance(node.value, ast.Dict):
                return set()
            for key in node.value.keys:
                if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                    return set()  # computed, or `**more`
                keys.add(key.value)
    return keys


def _keys_read(judge: type[object]) -> set[str]:
    """The keys of `workflow_output.metadata[…]` and `.get(…)` in a judge's source."""
    keys: set[str] = set()
    for node in ast.walk(_syntax(judge)):
        if isinstance(node, ast.Subscript):
            owner, key = node.value, node.slice
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get" and node.args:
            owner, key = node.func.value, node.args[0]  # type: ignore[attr-defined] # it has an `attr`
        else:
            continue
        of_output = isinstance(owner, ast.Attribute) and owner.attr == "metadata" and "output" in ast.unparse(owner)
        if of_output and isinstance(key, ast.Constant) and isinstance(key.value, str):
            keys.add(key.value)
    return keys


def _syntax(cls: type[object]) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # created at run time
        return ast.Module([], [])


def _named(keys: set[str]) -> str:
    return ", ".join(map(repr, sorted(keys)))


NO_CALL = (
    "the episode made no model call, so there would be nothing to train: call the model through the tuner "
    "(tuner.as_raw_openai_sdk_client(), tuner.as_oai_baseurl_apikey() …), not through a client of your own"
)
DEFAULT_REPLIES: list[Reply] = ["This is a scripted reply."]


def rehearse(config: Config, task: Task, replies_file: str | None = None) -> bool:
    """Run the task once and show the episode. Returns whether it got a reward."""
    file = replies_file or config.ajet.rollout.scripted_replies
    replies = read_replies(file) if file else DEFAULT_REPLIES

    def scripted(_config: Config) -> Engine:
        source = config.ajet.model.path
        tokens = config.ajet.rollout.max_model_len
        return ScriptedEngine(replies, lambda: ModelSource.resolve(source).tokenizer(), max_model_len=tokens)

    view = EpisodeView(config.ajet.task_judge.success_threshold)
    ended: list[Episode] = []
    with Runtime(config, make_engine=scripted, parallel=1, on_episode=ended.append) as runtime:
        runtime.run(runtime.pool.run_episodes([task]))
    view.started(1, 1)
    view.episode(ended[-1], task.main_query)
    if ended[-1].usable and not ended[-1].tree.calls:
        fail(NO_CALL)
        return False
    return ended[-1].usable


class Loaded(NamedTuple):
    """What a config names, imported and read as a run would."""

    workflow: type[Workflow] | None
    """None: programs elsewhere have it."""
    judge: BaseJudge | None
    environment: EnvironmentSource | None
    training: list[Task]
    """Empty if programs elsewhere begin the episodes."""
    validation: list[Task]
