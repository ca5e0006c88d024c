"""An agent that crosses a frozen lake with one model call per move: the first letter of the reply (u, d, l or r).

The prompt of each call is the current state of the lake, without the history, so every call is a separate conversation.
The reward is 1 at the goal, and otherwise up to 0.5 for how much closer the agent got, so that an untrained model has
something to learn from.
"""

from __future__ import annotations

from typing import Any

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

MOVES = {"l": 0, "d": 1, "r": 2, "u": 3}
"""Gymnasium's numbers for the moves."""


class FrozenLakeWorkflow(Workflow):
    name: str = "frozen_lake"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        settings = tuner.config.frozen_lake
        lake = Lake(int(workflow_task.task.metadata["seed"]), settings.size)
        client = tuner.as_raw_openai_sdk_client(agent_name="walker")
        moves = 0
        while not lake.over and moves < settings.max_moves:
            messages = [{"role": "user", "content": f"{lake.picture()}\nYour move:"}]
            completion = await client.chat.completions.create(model="walker", messages=messages)
            lake.step((completion.choices[0].message.content or "").strip()[:1].lower())
            moves += 1
        reward = 1.0 if lake.won else 0.5 * max(0.0, lake.progress())
        return WorkflowOutput(reward=reward, is_success=lake.won, log_metrics={"moves": moves, "fell": lake.fell})


class Lake:
    """Gymnasium's FrozenLake, not slippery, with a different map for each seed."""

    def __init__(self, seed: int, size: int) -> None:
        import gymnasium
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        self._map = generate_random_map(size=size, p=0.9, seed=seed)
        self._size = size
        self._env: Any = gymnasium.make("FrozenLake-v1", desc=self._map, is_slippery=False)
        self._place, _ = self._env.reset(seed=seed)
        self.over = self.won = False

    @property
    def fell(self) -> bool:
        return self.over and not self.won

    def step(self, letter: str) -> None:
        """Move one field; any other letter means standing still."""
        if letter in MOVES:
            self._place, reward, self.over, _, _ = self._env.step(MOVES[letter])
            self.won = reward > 0

    def progress(self) -> float:
        """The share of the way covered: 0 at the start, 1 at the goal."""
        row, column = divmod(int(self._place), self._size)
        return (row + column) / (2 * self._size - 2)

    def picture(self) -> str:
        """The map, with @ for the agent."""
        row, column = divmod(int(self._place), self._size)
        lines = [list(line) for line in self._map]
        lines[row][column] = "@"
        return "\n".join("".join(line) for line in lines)
