"""`CompositeJudge` (`judge_type: composite`): the weighted sum of several judges, each recorded under its name.

Parts that only need the output are judged where the workflow ran; the others once the episode, or its group, has ended.
If one part fails, the whole judge fails: a missing part is never taken for 0. The composite's methods are plain, so no
event loop is running when they call a plain part, which may start one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ajet.config.kinds import JUDGES
from ajet.schema.errors import ConfigError
from ajet.schema.task import WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import (
    RESERVED_PARTS,
    BaseJudge,
    GroupJudge,
    JudgedEpisode,
    Judgement,
    Later,
    Reward,
    build_judge,
    import_judge,
    validate_reward,
    validate_rewards,
)

if TYPE_CHECKING:
    from ajet.config import Config

KEY = "ajet.task_judge.parts"
BLOCKS = ("llm_judge", "rubrics_auto_grader", "openjudge")
"""Judges whose settings a part may have in place of the common ones."""
KINDS = tuple(kind for kind in JUDGES if kind != "composite")
Asked = Callable[[], Awaitable[Any]]
AskedLater = tuple[str, list[int], Asked]
"""A part, the places of the episodes that it was asked about, and what it says of them."""


class CompositeJudge(GroupJudge):
    """`ajet.task_judge.parts`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        section = config.ajet.task_judge
        if not section.parts:
            raise ConfigError(f"{KEY}: a composite judge needs parts, such as `correct: {{judge: …, weight: 1}}`")
        if taken := section.parts.keys() & set(RESERVED_PARTS):
            raise ConfigError(f"{KEY}.{min(taken)}: metrics have this name below reward/ already; choose another")
        if section.success_part is not None and section.success_part not in section.parts:
            raise ConfigError(
                f"ajet.task_judge.success_part: there is no part {section.success_part!r}; there are "
                f"{', '.join(section.parts)}"
            )
        self._judges = {name: _judge_of(name, config) for name in section.parts}
        self._weights = {name: part.weight for name, part in section.parts.items()}
        self._success_part = section.success_part

    @property
    def per_episode(self) -> bool:  # type: ignore[override]
        return all(judge.per_episode for judge in self._judges.values() if isinstance(judge, GroupJudge))

    def prepare(self) -> None:
        for part in self._judges.values():
            if isinstance(part, GroupJudge):
                part.prepare()

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        """Judge the parts that don't have to wait. Returns the reward if that is all of them, else `Later`."""
        asked = [
            (name, _asked(part.compute_reward, workflow_task, workflow_output)) for name, part in self._judges.items()
        ]
        return self._judged_now(asked)

    async def _judged_now(self, asked: list[tuple[str, Asked]]) -> Reward | Later:
        now: dict[str, Judgement] = {}
        later: dict[str, Any] = {}
        for name, ask in asked:
            said = await ask()
            if isinstance(said, Later):
                later[name] = said.kept
            else:
                now[name] = validate_reward(said, type(self._judges[name]).__name__)
        if later:
            kept = {
                name: {"reward": said.reward, "is_success": said.is_success, "notes": said.notes}
                for name, said in now.items()
            }
            return Later({"parts": kept, "later": later})
        return self._sum(now)

    def compute_group_rewards(self, episodes: Sequence[JudgedEpisode]) -> Any:
        return self._judged_later(episodes, [each for name in self._judges for each in self._ask_later(name, episodes)])

    async def _judged_later(self, episodes: Sequence[JudgedEpisode], asked: list[AskedLater]) -> list[Reward]:
        judged = [
            {name: Judgement(**kept) for name, kept in episode.later.kept["parts"].items()} for episode in episodes
        ]
        said = await asyncio.gather(*(ask() for _, _, ask in asked))
        for (name, places, _), value in zip(asked, said, strict=True):
            judgements = validate_rewards(value, len(places), type(self._judges[name]).__name__)
            for place, judgement in zip(places, judgements, strict=True):
                judged[place][name] = judgement
        return [self._sum(each) for each in judged]

    def _ask_later(self, name: str, episodes: Sequence[JudgedEpisode]) -> list[AskedLater]:
        """Ask a part about those episodes that it has not judged yet."""
        left = [place for place, each in enumerate(episodes) if name in each.later.kept["later"]]
        part = self._judges[name]
        if not left:
            return []
        if not isinstance(part, GroupJudge):
            raise ConfigError(f"{KEY}.{name}.judge: it returned Later, which only a GroupJudge may")
        found = []
        for places in [[place] for place in left] if part.per_episode else [left]:
            some = [
                replace(episodes[place], later=Later(episodes[place].later.kept["later"][name])) for place in places
            ]
            found.append((name, places, _asked(part.compute_group_rewards, some)))
        return found

    def _sum(self, judged: dict[str, Judgement]) -> Reward:
        chosen = judged[self._success_part].is_success if self._success_part else None
        if self._success_part and chosen is None:
            chosen = judged[self._success_part].reward >= self.config.ajet.task_judge.success_threshold
        return Reward(
            parts={name: judged[name].reward for name in self._judges},
            weights=self._weights,
            is_success=chosen,
            notes={name: said.notes for name, said in judged.items() if said.notes},
        )


def _asked(function: Callable[..., Any], *arguments: Any) -> Asked:
    """Call a plain function now, and an `async` one once its value is wanted."""
    value = None if inspect.iscoroutinefunction(function) else function(*arguments)

    async def ask() -> Any:
        said = function(*arguments) if inspect.iscoroutinefunction(function) else value
        return await said if inspect.isawaitable(said) else said

    return ask


def _judge_of(name: str, config: Config) -> BaseJudge:
    """Build a part's judge, with the part's own block in place of the common one."""
    part = config.ajet.task_judge.parts[name]
    key = f"{KEY}.{name}.judge"
    section = config.ajet.task_judge.model_copy(
        update={block: part[block] for block in BLOCKS if part[block] is not None}
    )
    own = config.model_copy(update={"ajet": config.ajet.model_copy(update={"task_judge": section})})
    if part.judge in KINDS:
        return build_judge(part.judge, own)
    if "->" not in part.judge:
        raise ConfigError(f"{key}: {part.judge!r} is none of {', '.join(KINDS)}, nor a class (`path.py->Class`)")
    return import_judge(part.judge, own, key)
