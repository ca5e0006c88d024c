"""Werewolves for nine, one side of which is trained: `WerewolvesWorkflow` trains the werewolves, `VillageWorkflow` the
village. The reward is 1 if the trained side wins and 0 if not. With `werewolves.misplay_costs`, a werewolf's reply that
names nobody, or another werewolf, costs that much at once: such calls needn't wait for the end of the game.

Hidden information stays hidden: every player is an agent of its own with prompts of its own. The other side plays by
simple rules, or by a model that isn't trained (`werewolves.opponents: model`).
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from game import VILLAGE, WOLF, Game, Player, deal
from players import ModelPlayer, RulePlayer

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask


class WerewolvesWorkflow(Workflow):
    name: str = "werewolves"
    trainable_targets: list[str] | None = [WOLF]  # noqa: RUF012 - a pydantic field

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        settings = tuner.config.werewolves
        number = int(workflow_task.task.metadata["random_number"])
        roles = deal(random.Random(number))
        # the same deal for all episodes of a task, and another course of the game for each
        rng = random.Random(f"{number}:{workflow_task.episode_uuid}")
        trained = self.trainable_targets or []

        def player(name: str, role: str) -> Player:
            if role not in trained and settings.opponents == "rules":
                return RulePlayer(name, rng)
            costs = settings.get("misplay_costs") if role == WOLF and role in trained else None
            misplayed = (lambda reply_id: tuner.reward(-costs, call=reply_id)) if costs else None
            return ModelPlayer(tuner.as_model_function(agent_name=name, target_tag=role), settings.prompts, misplayed)

        players = {name: player(name, role) for name, role in roles.items()}
        game = Game(roles, players, rng, discussion_rounds=settings.discussion_rounds)
        result = await game.play()
        won = result.wolves_won == (WOLF in trained)
        return WorkflowOutput(
            reward=float(won),
            is_success=won,
            metadata={"living": result.living, "story": [f"{e.kind} {e.who}: {e.text}" for e in result.events]},
            log_metrics={
                "rounds": result.rounds,
                "chose_own": result.chose_own,
                "chose_nobody": result.chose_nobody,
            },
        )


class VillageWorkflow(WerewolvesWorkflow):
    """The same game, in which the village is trained."""

    name: str = "village"
    trainable_targets: list[str] | None = sorted(VILLAGE)
