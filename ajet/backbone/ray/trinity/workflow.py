"""`GroupWorkflow`: Trinity's workflow that runs a whole group of our episodes, and answers with their experiences.

Trinity lets a workflow repeat its task by itself, so one call is one group: retries, refilling and dynamic rollout are
our pool's, as with every backbone.
"""

from __future__ import annotations

import time
from typing import Any

from trinity.common.experience import Experience
from trinity.common.workflows.workflow import Task, Workflow

from ajet.backbone.ray.groups import GroupRunner
from ajet.backbone.ray.payload import RunPayload
from ajet.backbone.ray.trinity.host import HostedGroups, group_runner
from ajet.backbone.ray.trinity.rows import empty_experience, group_experiences
from ajet.schema.episode import EpisodeGroup
from ajet.schema.errors import LostThreadsError, UserError
from ajet.schema.task import Task as AjetTask

_runners: dict[str, GroupRunner] = {}
"""By the run's payload. Trinity builds a workflow per task; what they need opens once per process."""


def _runner_of(payload: str, model: Any) -> GroupRunner:
    if payload not in _runners:
        run = RunPayload.decode(payload)
        _runners[payload] = HostedGroups(run, model) if run.remote_runners else group_runner(run, model)
    return _runners[payload]


class GroupWorkflow(Workflow):  # type: ignore[misc]
    """Built by Trinity for each task."""

    can_repeat = True
    is_async = True

    def __init__(self, *, task: Task, model: Any, auxiliary_models: Any = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self._repeats = 1
        self._runner = _runner_of(task.workflow_args["payload"], model)

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """The group's number of episodes."""
        self._repeats = repeat_times
        self.run_id_base = run_id_base

    async def run_async(self) -> list[Experience]:
        """Run the group. What the user must fix is reported, and ends the run."""
        try:
            return await self._run()
        except (UserError, LostThreadsError) as error:
            await self._runner.collector.report_failure.remote(f"{type(error).__name__}: {error}")
            raise

    async def _run(self) -> list[Experience]:
        task = AjetTask.model_validate_json(self.task.raw_task["task"])
        validation = bool(self.task.is_eval)
        uid = group_name(self.task.batch_id, self.task.task_id)
        await self._runner.open()  # that is not part of the rollout's time
        begin = time.time()
        group = await self._runner.run_group(
            task,
            group_id=uid,
            batch_index=int(self.task.task_id),
            step=step_of(self.task.batch_id),
            occurrence=self.task.raw_task["occurrence"],
            validation=validation,
            num_repeat=self._repeats,
        )
        return self._experiences(group, uid, (begin, time.time()), validation=validation)

    def _experiences(
        self, group: EpisodeGroup, uid: str, span: tuple[float, float], *, validation: bool
    ) -> list[Experience]:
        if validation or not group.complete:
            return [empty_experience(group, uid=uid, span=span)]
        return group_experiences(group, [self._runner.samples(one) for one in group.episodes], uid=uid, span=span)


def group_name(batch: int | str, task: int | str) -> str:
    """The group's name: step, and place in its batch."""
    return f"{batch}/{task}"


def step_of(batch: int | str) -> int:
    """The step that a batch belongs to; a validation's is `STEP/NAME`."""
    return int(str(batch).partition("/")[0])
