"""`ajet validate --run`: one episode of the first task with scripted replies instead of a model.

Finds what importing can't: a workflow that raises, tools that don't work, a judge that doesn't return a number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.backbone.debug_view import EpisodeView
from ajet.engine.base import Engine
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import Reply, ScriptedEngine, read_replies
from ajet.schema.printable import fail
from ajet.task_runner.runtime import Runtime

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.schema.episode import Episode
    from ajet.schema.task import Task

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
