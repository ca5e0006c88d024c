"""`EpisodeTrials`: tries candidates on tasks by running episodes in the pool, and records them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ajet.backbone.failures import FailureWatch
from ajet.backbone.metrics import FAULTS, is_success
from ajet.observe.episode_codec import conversation, last_calls
from ajet.observe.logs import Masker
from ajet.observe.progress import Progress
from ajet.observe.recorder import EpisodeRecorder
from ajet.prompt_tuning.proposal import Candidate
from ajet.prompt_tuning.trial import Purpose, Trial, concurrently
from ajet.schema.episode import Episode, EpisodeGroup, EpisodeStatus
from ajet.schema.task import Task
from ajet.trainer.credit import earned, summarise

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.task_runner.runtime import Runtime

SAID = 2_000
"""Characters of a piece of feedback: a judge's reasons fit, a dump of everything doesn't."""
UNSCORED = (*FAULTS, EpisodeStatus.CANCELLED)
"""How an episode ends that says nothing about its templates."""


class EpisodeTrials:
    """`Evaluate`, over a runtime. Used on the service loop."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        tasks: Mapping[str, Task],
        recorder: EpisodeRecorder,
        progress: Progress,
        masker: Masker,
    ) -> None:
        self._runtime, self._tasks, self._recorder, self._progress = runtime, tasks, recorder, progress
        self._masker = masker
        self._repeats = config.ajet.prompt_tuning.repeats
        self._threshold = config.ajet.task_judge.success_threshold
        self._watch = FailureWatch(config, trains=False)
        self.episodes: list[tuple[Purpose, Episode]] = []
        """The episodes of the current round. Reading them empties the list."""

    async def __call__(
        self, candidates: Sequence[Candidate], tasks: Sequence[str], purpose: Purpose, draw: int, round: int
    ) -> list[list[Trial]]:
        pairs = [(candidate, task) for candidate in candidates for task in tasks]
        self._progress.phase(str(purpose), len(pairs) * self._repeats)
        tried = await concurrently(
            self._try(candidate, task, purpose, round, index, draw) for index, (candidate, task) in enumerate(pairs)
        )
        groups, trials = [group for group, _ in tried], [trial for _, trial in tried]
        self.episodes += [(purpose, one) for group in groups for one in (*group.episodes, *group.failed)]
        self._watch.look_at_groups(f"round {round} ({purpose})", groups)
        return [trials[first : first + len(tasks)] for first in range(0, len(trials), len(tasks))]

    async def _try(
        self, candidate: Candidate, task: str, purpose: Purpose, round: int, index: int, draw: int
    ) -> tuple[EpisodeGroup, Trial]:
        """Run a task; record and read its episodes while the others run."""
        group = await self._runtime.pool.run_group(
            self._tasks[task],
            num_repeat=self._repeats,
            batch_index=index,
            step=draw,
            validation=True,
            group_id=f"{round}-{purpose}-{draw}-{candidate.id}-{task}",
            prompts=candidate.prompts,
        )
        for episode in (*group.episodes, *group.failed):
            self._recorder.record(episode, round, validation=purpose is not Purpose.SEARCH, task=self._tasks[task])
        return group, self._trial(task, group, read=purpose is Purpose.SEARCH)

    def _trial(self, task: str, group: EpisodeGroup, read: bool) -> Trial:
        episodes = sorted([*group.episodes, *group.failed], key=lambda episode: episode.repeat)
        counted = [episode for episode in episodes if episode.status not in UNSCORED]
        rewards = [earned(summarise(episode)) if episode.usable else 0.0 for episode in counted]
        used = [episode.prompts_used for episode in episodes]
        failed = next((episode.failure for episode in episodes if episode.failure is not None), None)
        return Trial(
            task_id=task,
            reward=sum(rewards) / len(rewards) if any(episode.usable for episode in counted) else None,
            success=_share([is_success(episode, self._threshold) for episode in counted]),
            failure="" if failed is None else self._masker.text(failed.in_short),
            fault=not counted,
            feedback=self._masker.text("\n".join(dict.fromkeys(text for one in counted for text in feedback_of(one)))),
            query=self._tasks[task].main_query,
            conversations=tuple(
                conversation(episode.tree, call) for episode in counted for call in last_calls(episode.tree)
            )
            if read
            else (),
            episodes=tuple(episode.episode_id for episode in episodes),
            tokens=_tokens(episodes),
            prompts_used=None if None in used else frozenset(name for names in used for name in names or ()),
        )


def feedback_of(episode: Episode) -> list[str]:
    """What was said about an episode: `feedback` in the workflow's metadata, the judge's notes, and its parts."""
    said = [_text(episode.metadata[key]) for key in ("feedback", "judge") if episode.metadata.get(key)]
    if episode.reward_parts:
        said.append(", ".join(f"{name}: {value:g}" for name, value in episode.reward_parts.items()))
    return [text[:SAID] for text in said]


def _text(value: Any) -> str:
    """Notes are nested texts and numbers: one line for each."""
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {_text(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return "\n".join(map(_text, value))
    return str(value)


def _tokens(episodes: Sequence[Episode]) -> tuple[int, int]:
    spent = [episode.tree.spent for episode in episodes]
    return sum(prompt for prompt, _ in spent), sum(replies for _, replies in spent)


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None
