"""`FailureWatch`: what a run says and does about the failed episodes of a step or a validation.

A judge that keeps failing ends the run, and so does a workflow that never asks the tuned model. Dropped episodes are
allowed, but they select what is trained: that is said.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ajet.backbone.episode_metrics import played
from ajet.backbone.model_calls import ModelCallWatch
from ajet.schema.episode import Episode, EpisodeGroup, EpisodeStatus
from ajet.schema.errors import JudgeFailedError
from ajet.task_runner.endings import dropped_by

if TYPE_CHECKING:
    from ajet.config import Config

log = logging.getLogger("ajet.backbone")

MANY_DROPPED = 0.1
"""Share of a step's episodes above which the log says that dropping them selects what is trained."""


def warn_of(step: int, metrics: Mapping[str, float]) -> None:
    """Say what the metrics of a step, or of the validation after it, mean: episodes that asked no model, and a
    validation without a score."""
    validation = f"the validation after step {step}" if step else "the validation"
    for prefix, when in (("", f"step {step}" if step else "this run"), ("val/", validation)):
        if silent := metrics.get(f"{prefix}episode/without_calls"):
            log.warning(
                "%d of %d episodes of %s made no model call that was recorded, so nothing of them can be trained. If "
                "their agent asked a model, it did so without the tuner's client",
                *(silent, metrics[f"{prefix}episode/count"], when),
            )
    if metrics.get("val/failed_share") == 1:
        log.warning(
            "%s has no score, because all of its %d episodes failed: its checkpoint can't be the best one, and "
            "early_stop passes over it",
            *(validation, metrics["val/episode/count"]),
        )


class FailureWatch:
    """One per run."""

    def __init__(self, config: Config, *, trains: bool = True) -> None:
        """`trains`: whether it is the model that is tuned. Then dropped episodes select what is trained, and episodes
        without a model call teach nothing."""
        self._max_error_share = config.ajet.task_judge.max_error_share
        self._calls = ModelCallWatch(config) if trains else None
        self._told = not trains

    def look_at_groups(self, when: str, groups: Sequence[EpisodeGroup]) -> None:
        """`look_at` for all episodes of these groups."""
        self.look_at(when, [episode for group in groups for episode in (*group.episodes, *group.failed)])

    def look_at(self, when: str, episodes: Sequence[Episode]) -> None:
        """Raise `JudgeFailedError` if the judge failed too often, and `NoModelCallError` if no model call was recorded;
        warn once if many episodes were dropped.

        `when`: the step or validation, as a noun.
        """
        counted = played(episodes)
        self._warn_of_drops(when, counted)
        if self._calls is not None:
            self._calls.look_at(when, counted)
        unjudged = [episode for episode in counted if episode.status is EpisodeStatus.JUDGE_ERROR]
        if not unjudged or len(unjudged) <= self._max_error_share * len(counted):
            return
        failure = unjudged[-1].failure
        shown = "" if failure is None else f"{failure.kind}: {failure.message}\n{failure.traceback}".rstrip()
        raise JudgeFailedError(
            f"the judge failed in {len(unjudged)} of {len(counted)} episodes of {when}, more than "
            f"ajet.task_judge.max_error_share ({self._max_error_share:g}) allows. Their groups can't be trained, and "
            f"what is left is no fair sample. The last failure was {shown}"
        )

    def _warn_of_drops(self, when: str, counted: Sequence[Episode]) -> None:
        dropped = [(key, episode) for episode in counted if (key := dropped_by(episode)) is not None]
        if self._told or len(dropped) <= MANY_DROPPED * len(counted):
            return
        self._told = True
        kinds = Counter((key, episode.failure.kind if episode.failure else "unknown") for key, episode in dropped)
        (key, kind), count = kinds.most_common(1)[0]
        log.warning(
            "%d of %d episodes of %s are dropped, most often (%d) after %s by ajet.failure_reward.%s. They count "
            "neither in their group's baseline nor in the update, so what is trained is a selection. To count them, "
            "set that key to a number",
            len(dropped),
            len(counted),
            when,
            count,
            kind,
            key,
        )
