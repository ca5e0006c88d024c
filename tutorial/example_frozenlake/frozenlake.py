"""An agent that crosses a frozen lake with one model call per move: the first letter of the reply (u, d, l or r).

The prompt of each call is the current state of the lake, without the history, so every call is a separate conversation.
The reward is 1 at the goal, and otherwise up to 0.5 for how much closer the agent got, so that an untrained model has
something to learn from.
"""

from __future__ import annotations

from typing import Any

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask
from ajet.environment import Environment, StepResult
from ajet.schema.task import Task

MOVES = {"l": 0, "d": 1, "r": 2, "u": 3}
"""Gymnasium's numbers for the moves."""


class FrozenLakeWorkflow(Workflow):
    name: str = "frozen_lake"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        lake, messages, over = workflow_task.gym_env, workflow_task.task.init_messages, False
        client = tuner.as_raw_openai_sdk_client(agent_name="walker")
        while not over:
            completion = await client.chat.completions.create(model="walker", messages=messages)
            picture, _, over, seen = lake.step(completion.choices[0].message.content or "")
            messages = [{"role": "user", "content": picture}]
        reward = lake.evaluate()
        return WorkflowOutput(reward=reward, is_success=reward == 1.0, log_metrics=seen)


class Lake(Environment):
    """Gymnasium's FrozenLake, not slippery, with a different map for each task's seed."""

    def __init__(self, size: int, max_moves: int) -> None:
        self._size, self._max_moves = size, max_moves

    def reset(self, task: Task) -> str:
        import gymnasium
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        seed = int(task.metadata["seed"])
        self._map = generate_random_map(size=self._size, p=0.9, seed=seed)
        self._env: Any = gymnasium.make("FrozenLake-v1", desc=self._map, is_slippery=False)
        self._place, _ = self._env.reset(seed=seed)
        self._moves, self._won = 0, False
        return self._picture()

    def step(self, action: Any) -> StepResult:
        """Move one field; a text, or message, that begins with any other letter means standing still."""
        self._moves += 1
        said = action["content"] if isinstance(action, dict) else action
        letter, over = str(said).strip()[:1].lower(), False
        if letter in MOVES:
            self._place, reward, over, _, _ = self._env.step(MOVES[letter])
            self._won = reward > 0
        seen = {"moves": self._moves, "fell": over and not self._won}
        return StepResult(self._picture(), 0.0, over or self._moves == self._max_moves, seen)

    def evaluate(self) -> float:
        row, column = divmod(int(self._place), self._size)
        return 1.0 if self._won else 0.5 * (row + column) / (2 * self._size - 2)

    def _picture(self) -> str:
        """The map, with @ for the agent."""
        row, column = divmod(int(self._place), self._size)
        lines = [list(line) for line in self._map]
        lines[row][column] = "@"
        return "\n".join("".join(line) for line in lines) + "\nYour move:"
