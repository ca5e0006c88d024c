"""`GroupJudge`: judges episodes after they have ended, one at a time or a whole group together. It sees their calls.

It runs in a separate thread of the process that runs the episodes, with a timeout of `rollout.episode_timeout` for each
call. Meanwhile no episode waits, and no environment is held. If a judge needs something from the environment,
`compute_reward` asks for it: it runs where the workflow ran, and returns `Later`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ajet.schema.chat import Message
from ajet.schema.task import WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge, Later


class JudgedCall(NamedTuple):
    """One model call of an episode."""

    agent: str
    messages: list[Message]
    """The messages it added to the call that it continues; all of its messages if it continues none."""
    reply: Message


@dataclass(slots=True)
class JudgedEpisode:
    """An episode that has ended and waits for its reward."""

    workflow_task: WorkflowTask
    """Without `gym_env`: the environment is closed."""
    workflow_output: WorkflowOutput
    calls: list[JudgedCall] = field(default_factory=list)
    later: Later = field(default_factory=Later)
    """What `compute_reward` returned."""

    @property
    def last_reply(self) -> str:
        """The text of the last call that got a reply."""
        for call in reversed(self.calls):
            if isinstance(text := call.reply.get("content"), str) and text.strip():
                return text
        return str(self.workflow_output.metadata.get("last_reply") or "")


class GroupJudge(BaseJudge):
    """Derive from it and define `compute_group_rewards`. Several threads may call it at the same time."""

    per_episode: bool = False
    """True: each episode is judged on its own as soon as it ends."""

    def prepare(self) -> None:
        """Called once before the first episode, in the process where the judge will decide. An error ends the run."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        """Called where the workflow ran, while its environment is open. Return `Later` with the data that the judge
        needs afterwards."""
        return Later()

    def compute_group_rewards(self, episodes: Sequence[JudgedEpisode]) -> Any:
        """Return a list with one result for each of these episodes of one task, in any form that
        `BaseJudge.compute_reward` allows. May be `async`."""
        raise NotImplementedError(f"{type(self).__name__} must define `compute_group_rewards(episodes)`")
