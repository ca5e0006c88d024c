"""`EpisodeCollector`: the one process that sees every episode of a run; `GroupRunner` brings them to it.

Workers bring groups as they end. When a step's batch is complete, its episodes get their credit, are recorded for the
viewer, and become the step's metrics, under the names that every backbone shares.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from ajet.backbone.failures import FailureWatch
from ajet.backbone.metrics import episode_metrics, ledger_metrics, staleness, step_names, token_rate
from ajet.backbone.plan import BEFORE_THE_FIRST
from ajet.backbone.ray.facts import EPISODE_METRICS, WARNINGS, RunError, RunPayload
from ajet.backbone.ray.watcher import WarningRelay
from ajet.backbone.report import validation_metrics
from ajet.context_tracker import TrackerSettings
from ajet.context_tracker.samples import episode_samples
from ajet.engine.model_source import ModelSource
from ajet.observe.logs import Masker
from ajet.observe.metrics import helper_use
from ajet.observe.progress_state import FailureTally
from ajet.observe.recorder import EpisodeRecorder
from ajet.schema.episode import Episode, EpisodeGroup, Sample
from ajet.schema.errors import UserError
from ajet.schema.task import Task
from ajet.task_judge.helper import HelperMeter
from ajet.task_runner.runtime import Runtime
from ajet.trainer.credit import EpisodeCredit

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.engine.base import Engine

COLLECTOR = "ajet_episode_collector"
HEAD = {"node:__internal_head__": 0.001}
"""Ray's own mark of the head node, where the experiment folder is."""


class EpisodeCollector:
    """Holds groups between their end and the end of their step."""

    def __init__(self, payload: str) -> None:
        self._run = RunPayload.decode(payload)
        self._run.enter()
        relay_warnings(self._run.reports)
        self._config = self._run.load_config()
        self._groups: dict[str, EpisodeGroup] = {}
        self._task_of: dict[str, Task] = {}
        self._failure: RunError | None = None
        self._failed = asyncio.Event()
        self._recorder = self._open_recorder()
        self._tally = FailureTally()
        self._asked: Counter[str] = Counter()
        """What groups that have ended asked of the helper model."""
        self._asked_in: defaultdict[int, Counter[str]] = defaultdict(Counter)
        """The same by step, a validation included: of two lines with a metric the later one counts."""
        if self._run.lacks_validation and (step := self._run.resumed_step) is not None:
            self._asked_in[step] = helper_use(Path(self._run.experiment_dir, "metrics.jsonl"), step)
        self._failures = FailureWatch(self._config)

    async def watch(self) -> None:
        """Never returns: Ray raises in the caller if this process dies."""
        await asyncio.Event().wait()

    async def add(self, uid: str, group: EpisodeGroup, task: Task, asked: dict[str, float]) -> None:
        """A group has ended; `task` is its task, and `asked` what its process has asked of the helper model since."""
        self._groups[uid] = group
        self._asked.update(asked)
        self._task_of[group.task_id] = task

    async def report_failure(self, error: RunError) -> None:
        """A process can't go on. The first reason counts."""
        if self._failure is None:
            self._failure = error
            self._failed.set()
            error.write(self._run.reports)

    async def wait_for_failure(self) -> str:
        """Return the first reason why the run can't go on."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure.text

    async def failure(self) -> str | None:
        return None if self._failure is None else self._failure.text

    async def end_validation(self, step: int, prefix: str) -> None:
        """The groups whose names begin with this are a whole validation."""
        await self.end_step(step, [uid for uid in self._groups if uid.startswith(prefix)], [], True)

    async def end_step(
        self,
        step: int,
        groups: Sequence[str],
        credit: Sequence[EpisodeCredit],
        validation: bool,
        added: dict[str, float] | None = None,
    ) -> dict[str, float]:
        ended = [self._groups.pop(uid) for uid in groups if uid in self._groups]
        episodes = [episode for group in ended for episode in (*group.episodes, *group.failed)]
        credit_of = {item.episode_id: item for item in credit}
        metrics = self._metrics(step, ended, episodes, credit_of, validation)
        self._asked_in[step] += self._asked
        self._asked.clear()
        metrics |= self._asked_in[step]
        if added is not None:
            metrics |= added | token_rate(metrics, added["time/rollout_ended"] - added["time/rollout_began"])
        self._write(step, metrics)  # verl's own of a step come after its checkpoint and its validation, or never
        self._record(step, episodes, credit_of, validation)
        for episode in episodes:
            self._tally.add_and_log(episode)
        try:
            if validation:
                self._failures.look_at(f"the validation after step {step}", episodes)
            else:
                self._failures.look_at_step(step, episodes)
        except UserError as error:
            await self.report_failure(RunError.of(error))
        return metrics

    async def close(self) -> None:
        """The run has ended: write episodes that waited for room, and send the last spans."""
        self._recorder.close()

    def _metrics(
        self,
        step: int,
        groups: list[EpisodeGroup],
        episodes: list[Episode],
        credit: dict[str, EpisodeCredit],
        validation: bool,
    ) -> dict[str, float]:
        threshold = self._config.ajet.task_judge.success_threshold
        if validation:
            return validation_metrics(groups, threshold)
        trained = [(episode.tree, credit[episode.episode_id]) for episode in episodes if episode.episode_id in credit]
        metrics = episode_metrics(episodes, success_threshold=threshold) | ledger_metrics(episodes)
        metrics |= staleness(trained, version=step - 1)
        metrics["train/incomplete_groups"] = float(sum(not group.complete for group in groups))
        return metrics | step_names(metrics)

    def _open_recorder(self) -> EpisodeRecorder:
        recorder = EpisodeRecorder(
            Path(self._run.experiment_dir) / "episodes.sqlite",
            self._config.ajet,
            masker=Masker(self._run.config),
            tokenizer=ModelSource.resolve(self._run.model_path).tokenizer(),
        )
        if not self._config.ajet.trainer_common.val_only:
            done = BEFORE_THE_FIRST if self._run.resumed_step is None else self._run.resumed_step
            recorder.rewind(done, validated=not self._run.lacks_validation)
        return recorder

    def _record(
        self, step: int, episodes: Sequence[Episode], credit: dict[str, EpisodeCredit], validation: bool
    ) -> None:
        """Return when they are in the file: what was trained must survive a kill."""
        for episode in episodes:
            self._recorder.record(
                episode,
                step,
                credit.get(episode.episode_id),
                validation=validation,
                task=self._task_of.get(episode.task_id),
            )
        self._recorder.flush()

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        with Path(self._run.reports, EPISODE_METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "data": metrics}) + "\n")


def relay_warnings(reports: str) -> None:
    """Have the launcher log this process's warnings too, if it is on this machine: Ray's log has them without their
    tracebacks."""
    if reports and Path(reports).is_dir():
        logging.getLogger().addHandler(WarningRelay(Path(reports, WARNINGS)))


class GroupRunner:
    """One per process.

    `workers`: processes that share `rollout.max_env_worker`.
    """

    def __init__(self, run: RunPayload, make_engine: Callable[[Config], Engine], *, workers: int = 1) -> None:
        run.enter()
        relay_warnings(run.reports)
        self.config = run.load_config()
        self.collector = ray.get_actor(COLLECTOR)
        self._make_engine = make_engine
        self._parallel = max(1, self.config.ajet.rollout.max_env_worker // workers)
        self._tracker_settings = TrackerSettings.from_config(self.config)
        self._helper = HelperMeter(self.config)
        self._opening: asyncio.Task[Runtime] | None = None

    async def run_group(self, task: Task, **options: Any) -> EpisodeGroup:
        """Run a group, and hand it to the collector. `options` are those of `RolloutPool.run_group`."""
        runtime = await self.runtime()
        group = await asyncio.wrap_future(runtime.submit(runtime.pool.run_group(task, **options)))
        if not options.get("validation"):
            for episode in group.episodes:  # rows have limits that the tree of calls doesn't have
                episode.ledger = episode_samples(episode, self._tracker_settings)[1]
        await self.collector.add.remote(group.group_id, group, task, self._helper.since_last())
        return group

    def samples(self, episode: Episode) -> list[Sample]:
        return episode_samples(episode, self._tracker_settings)[0]

    async def report(self, error: BaseException) -> None:
        """Nothing can be run any more."""
        await self.collector.report_failure.remote(RunError.of(error))

    async def open(self) -> None:
        """Get ready for episodes: everything that is opened once. Raises a UserError."""
        await self.runtime()

    async def runtime(self) -> Runtime:
        """Opened by the first caller."""
        if self._opening is None:
            self._opening = asyncio.create_task(asyncio.to_thread(self._open))
        return await asyncio.shield(self._opening)

    def _open(self) -> Runtime:
        return Runtime(self.config, make_engine=self._make_engine, parallel=self._parallel).start()
