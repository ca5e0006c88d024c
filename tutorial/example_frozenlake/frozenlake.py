"""An agent that crosses a frozen lake, one move a model call. The move is the first letter of the reply: u, d, l or r.

The prompt of each call is the lake as it is now, not the history: every call is a conversation of its own. The reward
is 1 at the goal, and otherwise up to 0.5 for how much nearer it came, so that an untrained model has something to
learn from.
"""

from __future__ import annotations

from typing import Any

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

MOVES = {"l": 0, "d": 1, "r": 2, "u": 3}
"""Gymnasium's numbers."""


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
    """Gymnasium's FrozenLake with a map of its own for each seed, not slippery."""

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
        """Go there; any other letter stands still."""
        if letter in MOVES:
            self._place, reward, self.over, _, _ = self._env.step(MOVES[letter])
            self.won = reward > 0

    def progress(self) -> float:
        """How much of the way is done: 0 at the start, 1 at the goal."""
        row, column = divmod(int(self._place), self._size)
        return (row + column) / (2 * self._size - 2)

    def picture(self) -> str:
        """The map, with @ for the walker."""
        row, column = divmod(int(self._place), self._size)
        lines = [list(line) for line in self._map]
        lines[row][column] = "@"
        return "\n".join("".join(line) for line in lines)
