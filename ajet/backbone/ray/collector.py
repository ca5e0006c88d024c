"""`EpisodeBoard`: the one process that sees every episode of a run. A Ray actor on the head node.

Workers bring groups as they end; when a step's batch is settled, their episodes get their credit, are recorded for the
viewer, and become the step's metrics, under the same names as with every backbone.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from ajet.backbone.ray.payload import RunPayload
from ajet.backbone.validation import validation_metrics
from ajet.credit import EpisodeCredit
from ajet.engine.model_source import ModelSource
from ajet.observe.episode_metrics import episode_metrics
from ajet.observe.recorder import EpisodeRecorder, RecorderSettings
from ajet.observe.secrets import Masker
from ajet.schema.episode import Episode, EpisodeGroup

log = logging.getLogger(__name__)

BOARD = "ajet_episode_board"
"""The actor's name in Ray."""


class EpisodeBoard:
    """Episodes between their end and their step's end."""

    def __init__(self, payload: str) -> None:
        self._run = RunPayload.decode(payload)
        self._run.enter()
        self._config = self._run.load_config()
        self._groups: dict[str, EpisodeGroup] = {}
        self._queries: dict[str, str] = {}
        self._reported: asyncio.Future[str] | None = None
        self._recorder = self._open_recorder()

    async def watch(self) -> None:
        """Never returns: Ray raises for whoever waits if this process dies."""
        await asyncio.Event().wait()

    async def add(self, uid: str, group: EpisodeGroup, query: str) -> None:
        """A group has ended; `query` is its task's."""
        self._groups[uid] = group
        self._queries[group.task_id] = query

    async def report(self, reason: str) -> None:
        """Somebody can't go on; whoever waits in `trouble` hears of the first."""
        if not self._trouble().done():
            self._trouble().set_result(reason)

    async def trouble(self) -> str:
        """Return the first reason why the run can't go on."""
        return await asyncio.shield(self._trouble())

    async def reported(self) -> str | None:
        """The first reason that was reported, if there is one."""
        return self._trouble().result() if self._trouble().done() else None

    async def settle_validation(self, step: int, prefix: str) -> None:
        """The groups whose names begin so are a whole validation."""
        await self.settle(step, [uid for uid in self._groups if uid.startswith(prefix)], [], True)

    async def settle(
        self,
        step: int,
        groups: Sequence[str],
        credit: Sequence[EpisodeCredit],
        validation: bool,
        added: dict[str, float] | None = None,
    ) -> dict[str, float]:
        """These groups make up a step's batch: record them; their metrics. With `added` they are written as well."""
        ended = [self._groups.pop(uid) for uid in groups if uid in self._groups]
        episodes = [episode for group in ended for episode in (*group.episodes, *group.failed)]
        metrics = self._metrics(ended, episodes, validation)
        if validation or added is not None:  # verl has no place for a validation's; a step's go with verl's own
            self._write(step, metrics | (added or {}))
        self._record(step, episodes, {item.episode_id: item for item in credit}, validation)
        return metrics

    def _trouble(self) -> asyncio.Future[str]:
        if self._reported is None:
            self._reported = asyncio.get_running_loop().create_future()
        return self._reported

    def _metrics(self, groups: list[EpisodeGroup], episodes: list[Episode], validation: bool) -> dict[str, float]:
        threshold = self._config.ajet.task_judge.success_threshold
        if validation:
            return validation_metrics(groups, threshold)
        metrics = episode_metrics(episodes, success_threshold=threshold)
        metrics["train/incomplete_groups"] = float(sum(not group.complete for group in groups))
        for name, source in (("train/reward/mean", "reward/mean"), ("train/success", "success/rate")):
            if source in metrics:
                metrics[name] = metrics[source]
        return metrics

    def _open_recorder(self) -> EpisodeRecorder | None:
        if not self._run.experiment_dir:
            return None
        recorder = EpisodeRecorder(
            Path(self._run.experiment_dir) / "episodes.sqlite",
            RecorderSettings.from_config(self._config),
            masker=Masker(self._run.config),
            tokenizer=ModelSource.resolve(self._run.model_path).tokenizer(),
        )
        recorder.rewind(self._run.resumed_step or 0)
        return recorder

    def _record(
        self, step: int, episodes: Sequence[Episode], credit: dict[str, EpisodeCredit], validation: bool
    ) -> None:
        """Return when they are in the file: what was trained must survive a kill."""
        if self._recorder is None:
            return
        for episode in episodes:
            self._recorder.record(
                episode,
                step,
                credit.get(episode.episode_id),
                validation=validation,
                query=self._queries.get(episode.task_id, ""),
            )
        self._recorder.flush()

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        if self._run.metrics_file:
            with Path(self._run.metrics_file).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "data": metrics}) + "\n")
