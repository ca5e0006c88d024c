"""`ajet validate --run`: one episode of the first task with scripted replies instead of a model.

Finds what importing can't: a workflow that raises, tools that don't work, a judge that doesn't return a number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.backbone.debug_view import EpisodeView
from ajet.engine.base import Engine
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import Reply, ScriptedEngine, read_replies
from ajet.runtime.runtime import Runtime

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.schema.episode import Episode
    from ajet.schema.task import Task

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
    return ended[-1].usable
