"""Trajectories as episodes, for the viewer: `TrajectoryFolder` keeps an `episodes.sqlite` up to date with a folder.
Nothing is written to the folder itself.

Trajectories of agents that ran without training know messages and not tokens: their call trees hold no tokens.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from ajet.observe.recorder import EpisodeRecorder
from ajet.schema.chat import DEFAULT_TARGET
from ajet.schema.episode import ROOT, Call, CallTree, Episode, EpisodeStatus, Failure, Ledger
from ajet.schema.task import Task
from ajet.schema.trajectory import (
    NO_CALL,
    Trajectory,
    TrajectoryFormatError,
    TrajectoryStatus,
    read_trajectory,
    trajectory_files,
)

log = logging.getLogger(__name__)

_STATUS = {
    TrajectoryStatus.COMPLETED: EpisodeStatus.COMPLETED,
    TrajectoryStatus.TRUNCATED: EpisodeStatus.TRUNCATED,
    TrajectoryStatus.FAILED: EpisodeStatus.WORKFLOW_ERROR,
}
LOOK_AGAIN_S = 2.0


class TrajectoryFolder:
    """The trajectory files of a folder, as an experiment that the viewer can show."""

    def __init__(self, folder: Path, experiment: Path) -> None:
        """`experiment`: an empty folder of our own, for the database."""
        self._folder = folder
        self._seen: dict[Path, tuple[int, int]] = {}
        self._recorder = EpisodeRecorder(experiment / "episodes.sqlite")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trajectories", daemon=True)

    def sync(self) -> int:
        """Read what is new. Returns how many trajectories were read."""
        changed = 0
        for path in trajectory_files(self._folder):
            try:
                state = path.stat()
                mark = (state.st_mtime_ns, state.st_size)
                if self._seen.get(path) == mark:
                    continue
                self._seen[path] = mark
                trajectory = read_trajectory(path)
            except (TrajectoryFormatError, OSError) as error:  # it was deleted meanwhile, for example
                log.warning("%s", error)
                continue
            episode = episode_of(trajectory)
            task = Task(main_query=_question(trajectory), task_id=episode.task_id)
            self._recorder.record(episode, 0, task=task)
            changed += 1
        self._recorder.flush()
        return changed

    def watch(self) -> None:
        """Go on reading in a thread until closed."""
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._recorder.close()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_AGAIN_S):
            self.sync()


def episode_of(trajectory: Trajectory) -> Episode:
    """The trajectory as an episode without tokens."""
    failure = trajectory.failure
    if trajectory.status is TrajectoryStatus.RUNNING:
        failure = Failure("Unfinished", "it is still running, or its process was killed")
    usage = trajectory.usage
    return Episode(
        episode_id=trajectory.request_id,
        task_id=trajectory.task_id or trajectory.request_id,
        status=_STATUS.get(trajectory.status, EpisodeStatus.CANCELLED),
        tree=_tree(trajectory),
        ledger=Ledger(),
        group_id=trajectory.task_id,
        repeat=trajectory.repeat,
        reward=trajectory.reward,
        is_success=trajectory.is_success,
        failure=failure,
        metadata={
            **trajectory.metadata,
            "final_response": trajectory.final_response,
            "stop_reason": str(trajectory.stop_reason or trajectory.status),
            "model": trajectory.model,
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            **({} if trajectory.cost is None else {"cost": trajectory.cost}),
        },
        timings={"total": trajectory.seconds, "model": sum(call.seconds for call in trajectory.calls)},
    )


def _tree(trajectory: Trajectory) -> CallTree:
    rewards: dict[int, float] = {}
    for step in trajectory.steps:
        if step.reward_score is not None:
            rewards[step.call] = rewards.get(step.call, 0.0) + step.reward_score
    calls: list[Call] = []
    for index, made in enumerate(trajectory.calls):
        extends = ROOT if made.extends == NO_CALL else made.extends
        calls.append(
            Call(
                name=made.reply_id or f"call-{index}",
                agent=trajectory.agent,
                target=DEFAULT_TARGET,
                turn=0 if extends == ROOT else calls[extends].turn + 1,
                prompt_run=ROOT,
                prompt_tokens=made.usage.input_tokens,
                finish_reason="length" if made.finish_reason == "length" else "stop",
                trainable=False,
                reward=rewards.get(index),
                extends=extends,
                new_messages=made.new_messages,
                reply=made.reply,
                tools=0 if trajectory.tools else ROOT,
                started_s=made.started_s,
                seconds=made.seconds,
            )
        )
    return CallTree(calls=calls, toolsets=[trajectory.tools] if trajectory.tools else [])


def _question(trajectory: Trajectory) -> str:
    return next((step.content for step in trajectory.steps if step.step_type == "observation"), "")
