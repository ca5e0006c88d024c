"""`EmittedSpans`: what the code of one attempt emits while its workflow and its judge run, and the reward among it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ajet.observe.tracing.recording import Recording
from ajet.schema.task import WorkflowTask

if TYPE_CHECKING:
    from ajet.task_runner.results import WorkflowResult

log = logging.getLogger("ajet.task_runner")


class EmittedSpans:
    """Used where user code runs. Until `begin`, nothing is recorded."""

    _told = False

    def __init__(self) -> None:
        self._recording: Recording | None = None
        self._sink: Any = None

    def begin(self, tuner: Any, workflow_task: WorkflowTask) -> None:
        """The tuner is there: it says where spans go."""
        if hasattr(tuner, "span_sink"):
            self._sink = tuner.span_sink()
            episode_id = workflow_task.episode_uuid or "episode"
            self._recording = Recording(self._sink.add, episode_id, episode_id.partition(".")[0])

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Within this, user code may emit."""
        if self._recording is None:
            yield
            return
        with self._recording.active():
            yield

    def give_reward(self, result: WorkflowResult) -> None:
        """The last reward that was emitted is the workflow's, if it returned none."""
        emitted = None if self._recording is None else self._recording.reward
        if emitted is None:
            return
        if result.reward is None:
            result.reward = emitted.value
            if len(emitted.dimensions) > 1:
                result.reward_parts = dict(emitted.dimensions)
                result.reward_weights = {name: 0.0 for name in emitted.dimensions}
                result.reward_weights[next(iter(emitted.dimensions))] = 1.0
        elif result.reward != emitted.value and not EmittedSpans._told:
            EmittedSpans._told = True
            log.warning(
                "a workflow returned the reward %s and emitted %s: what is returned counts (said once)",
                *(result.reward, emitted.value),
            )

    def end(self) -> None:
        """Workflow and judge have ended: deliver what is on its way, and drop what comes later."""
        if self._recording is not None:
            self._sink.flush()
            self._recording.close()
