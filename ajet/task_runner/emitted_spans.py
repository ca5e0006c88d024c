"""`EmittedSpans`: what the code of one attempt emits while its workflow and its judge run, and the reward among it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
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


MOST_LEVELS = 32
MOST_VALUES = 100_000
MOST_CHARACTERS = 1_000_000
"""Of one text."""
LARGEST_BITS = 1000
"""Larger whole numbers don't fit into a float."""
TOO_MUCH = "(left out: more than is kept)"


def plain(value: Any) -> Any:
    """A copy of nested mappings and lists in which nothing is too deep, too many or too long."""
    return _Copy().of(value, MOST_LEVELS)


class _Copy:
    def __init__(self) -> None:
        self._left = MOST_VALUES

    def of(self, value: Any, levels: int) -> Any:
        self._left -= 1
        if self._left < 0 or (levels < 0 and isinstance(value, Mapping | list | tuple | set | frozenset)):
            return TOO_MUCH
        if isinstance(value, str):
            return value if len(value) <= MOST_CHARACTERS else f"{value[:MOST_CHARACTERS]}… ({len(value)} characters)"
        if isinstance(value, bool | float) or value is None:
            return value
        if isinstance(value, int):
            return value if value.bit_length() <= LARGEST_BITS else f"(a whole number of {value.bit_length()} bits)"
        if isinstance(value, Mapping):
            return {self._key(key): self.of(item, levels - 1) for key, item in list(value.items())[:MOST_VALUES]}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.of(item, levels - 1) for item in list(value)[:MOST_VALUES]]
        return value if _can_be_shown(value) else f"(an object of type {type(value).__name__})"

    def _key(self, key: Any) -> str:
        return key[:MOST_CHARACTERS] if isinstance(key, str) else shown(key)


def _can_be_shown(value: Any) -> bool:
    try:
        return len(repr(value)) <= MOST_CHARACTERS
    except Exception:  # noqa: BLE001 - user code: whatever its `__repr__` raises, the value can't be shown
        return False


def shown(value: Any, most: int = 200) -> str:
    """The beginning of a value's `repr`, whatever that does."""
    try:
        return repr(value)[:most]
    except Exception:  # noqa: BLE001 - user code, as above
        return f"(an object of type {type(value).__name__})"
