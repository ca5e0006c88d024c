"""`CompositeJudge` (`judge_type: composite`): the weighted sum of several judges, each recorded under its name.

Parts that only need the output are judged where the workflow ran; the others once the episode, or its group, has ended.
If one part fails, the whole judge fails: a missing part is never taken for 0.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
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
    ask_judge,
    build_judge,
    import_judge,
    validate_rewards,
)

if TYPE_CHECKING:
    from ajet.config import Config

KEY = "ajet.task_judge.parts"
BLOCKS = ("llm_judge", "rubrics_auto_grader", "openjudge")
"""Judges whose settings a part may have in place of the common ones."""
KINDS = tuple(kind for kind in JUDGES if kind != "composite")


class CompositeJudge(GroupJudge):
    """`ajet.task_judge.parts`."""

    def __init__(self, config: Config, base_dirs: Sequence[Path] = ()) -> None:
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
        self._judges = {name: _judge_of(name, config, base_dirs) for name in section.parts}
        self._weights = {name: part.weight for name, part in section.parts.items()}
        self._success_part = section.success_part

    @property
    def per_episode(self) -> bool:  # type: ignore[override]
        return all(judge.per_episode for judge in self._judges.values() if isinstance(judge, GroupJudge))

    def prepare(self) -> None:
        for part in self._judges.values():
            if isinstance(part, GroupJudge):
                part.prepare()

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        """Judge the parts that don't have to wait. Returns the reward if that is all of them, else `Later`."""
        now: dict[str, Judgement] = {}
        later: dict[str, Any] = {}
        for name, part in self._judges.items():
            said = await ask_judge(part, workflow_task, workflow_output)
            if isinstance(said, Later):
                later[name] = said.kept
            else:
                now[name] = said
        if later:
            kept = {
                name: {"reward": said.reward, "is_success": said.is_success, "notes": said.notes}
                for name, said in now.items()
            }
            return Later({"parts": kept, "later": later})
        return self._sum(now)

    async def compute_group_rewards(self, episodes: Sequence[JudgedEpisode]) -> list[Reward]:
        judged = [
            {name: Judgement(**kept) for name, kept in episode.later.kept["parts"].items()} for episode in episodes
        ]
        await asyncio.gather(*(self._judge_later(name, episodes, judged) for name in self._judges))
        return [self._sum(each) for each in judged]

    async def _judge_later(
        self, name: str, episodes: Sequence[JudgedEpisode], judged: list[dict[str, Judgement]]
    ) -> None:
        """Add what a part says of those episodes that it has not judged yet."""
        left = [index for index, each in enumerate(episodes) if name in each.later.kept["later"]]
        if not left:
            return
        part = self._judges[name]
        if not isinstance(part, GroupJudge):
            raise ConfigError(f"{KEY}.{name}.judge: it returned Later, which only a GroupJudge may")
        asked = [replace(episodes[index], later=Later(episodes[index].later.kept["later"][name])) for index in left]
        together = [[each] for each in asked] if part.per_episode else [asked]
        said = await asyncio.gather(*(_rewards(part, some) for some in together))
        for index, judgement in zip(left, chain.from_iterable(said), strict=True):
            judged[index][name] = judgement

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


async def _rewards(part: GroupJudge, episodes: list[JudgedEpisode]) -> list[Judgement]:
    value = part.compute_group_rewards(episodes)
    if inspect.isawaitable(value):
        value = await value
    return validate_rewards(value, len(episodes), type(part).__name__)


def _judge_of(name: str, config: Config, base_dirs: Sequence[Path]) -> BaseJudge:
    """Build a part's judge, with the part's own block in place of the common one."""
    part = config.ajet.task_judge.parts[name]
    key = f"{KEY}.{name}.judge"
    section = config.ajet.task_judge.model_copy(
        update={block: part[block] for block in BLOCKS if part[block] is not None}
    )
    own = config.model_copy(update={"ajet": config.ajet.model_copy(update={"task_judge": section})})
    if part.judge in KINDS:
        return build_judge(part.judge, own, base_dirs)
    if "->" not in part.judge:
        raise ConfigError(f"{key}: {part.judge!r} is none of {', '.join(KINDS)}, nor a class (`path.py->Class`)")
    return import_judge(part.judge, own, base_dirs, key)
