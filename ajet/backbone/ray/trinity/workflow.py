"""`GroupWorkflow`: Trinity's workflow that runs a whole group of our episodes, and answers with their experiences.

Trinity lets a workflow repeat its task by itself, so one call is one group: retries, refilling and dynamic rollout are
our pool's, as with every backbone. Runtime (service loop, gateway, tokenizer, user's classes) are opened once in each
process that runs workflows.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from trinity.common.experience import Experience
from trinity.common.workflows.workflow import Task, Workflow

from ajet.backbone.ray.collector import BOARD
from ajet.backbone.ray.payload import RunPayload
from ajet.backbone.ray.trinity.engine import TrinityEngine
from ajet.backbone.ray.trinity.plugin import on_cpu
from ajet.backbone.ray.trinity.rows import empty_experience, experiences_of
from ajet.context_tracker import TrackerSettings
from ajet.context_tracker.samples import episode_samples
from ajet.runtime.runtime import Runtime
from ajet.schema.episode import EpisodeGroup
from ajet.schema.errors import LostThreadsError, UserError
from ajet.schema.task import Task as AjetTask


class Station:
    """What one process has for running episodes."""

    def __init__(self, payload: str, model: Any) -> None:
        self.run = RunPayload.decode(payload)
        self.run.enter()
        self.config = self.run.load_config()
        self.tracker_settings = TrackerSettings.from_config(self.config)
        self.board = ray.get_actor(BOARD)
        self._model = model
        self._opening: asyncio.Task[Runtime] | None = None

    async def services(self) -> Runtime:
        """Opened by whoever comes first."""
        if self._opening is None:
            self._opening = asyncio.create_task(asyncio.to_thread(self._open))
        return await asyncio.shield(self._opening)

    def _open(self) -> Runtime:
        def make_engine(loaded: Any) -> TrinityEngine:
            length = loaded.ajet.rollout.max_model_len
            return TrinityEngine(self._model, max_model_len=length, embedded=on_cpu(), on_death=self._model_died)

        return Runtime(self.config, make_engine=make_engine).start()

    def _model_died(self, error: BaseException) -> None:
        self.board.report.remote(f"a rollout model died: {str(error).strip().splitlines()[0]}")


_stations: dict[str, Station] = {}


class GroupWorkflow(Workflow):  # type: ignore[misc]
    """One group."""

    can_repeat = True
    is_async = True

    def __init__(self, *, task: Task, model: Any, auxiliary_models: Any = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self._repeats = 1
        payload = task.workflow_args["payload"]
        if payload not in _stations:
            _stations[payload] = Station(payload, model)
        self._station = _stations[payload]

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """How many episodes the group has."""
        self._repeats = repeat_times
        self.run_id_base = run_id_base

    async def run_async(self) -> list[Experience]:
        """Run the group. What the user must mend is reported, and ends the run."""
        try:
            return await self._run()
        except (UserError, LostThreadsError) as error:
            await self._station.board.report.remote(f"{type(error).__name__}: {error}")
            raise

    async def _run(self) -> list[Experience]:
        task = AjetTask.model_validate_json(self.task.raw_task["task"])
        validation = bool(self.task.is_eval)
        services = await self._station.services()
        uid = group_name(self.task.batch_id, self.task.task_id)
        begin = time.time()
        running = services.submit(
            services.pool.run_group(
                task,
                group_id=uid,
                batch_index=int(self.task.task_id),
                step=step_of(self.task.batch_id),
                validation=validation,
                num_repeat=self._repeats,
            )
        )
        group: EpisodeGroup = await asyncio.wrap_future(running)
        await self._station.board.add.remote(uid, group, task.main_query or "")
        return self._experiences(group, uid, (begin, time.time()), validation=validation)

    def _experiences(
        self, group: EpisodeGroup, uid: str, span: tuple[float, float], *, validation: bool
    ) -> list[Experience]:
        rows: list[Experience] = []
        if group.complete and not validation:
            for episode in group.episodes:
                samples, _ = episode_samples(episode, self._station.tracker_settings)
                rows += experiences_of(episode, samples, uid=uid, span=span)
        return rows or [empty_experience(group, uid=uid, span=span)]


def group_name(batch: int | str, task: int | str) -> str:
    """The group's name: step, and place in its batch."""
    return f"{batch}/{task}"


def step_of(batch: int | str) -> int:
    """The step that a batch belongs to; a validation's is `STEP/NAME`."""
    return int(str(batch).partition("/")[0])
