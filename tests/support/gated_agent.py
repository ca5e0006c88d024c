"""A small agent for a real run under the viewer's eyes: several turns, a second agent, a rewritten history.

Once a step is done, further episodes wait for a file: so a test looks at a run in its middle for as long as it likes.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

PATIENCE_S = 300
HOSTILE = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script> \u202egnp.exe"


class GatedAgent(Workflow):
    """The reward is the share of letters in the replies."""

    name: str = "gated_agent"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        await gate(Path(tuner.config.gate.metrics), Path(tuner.config.gate.go))
        writer = tuner.as_raw_openai_sdk_client(agent_name="writer")
        critic = tuner.as_raw_openai_sdk_client(agent_name="critic")
        messages: list[dict[str, Any]] = [{"role": "user", "content": workflow_task.task.main_query}]
        text = await reply(writer, messages)
        opinion = await reply(critic, [{"role": "user", "content": f"Judge this: {text} {HOSTILE}"}])
        text += await reply(writer, [*messages, {"role": "assistant", "content": text}, user("Go on.")])
        if workflow_task.task_thread_index == 0:
            text += await reply(
                writer, [user("A summary instead of what was said."), assistant(opinion), user("More.")]
            )
        letters = sum(character.isascii() and character.isalpha() for character in text)
        return WorkflowOutput(reward=letters / max(1, len(text)), metadata={"opinion": HOSTILE})


async def gate(metrics: Path, go: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while metrics.exists() and metrics.stat().st_size and not go.exists() and time.monotonic() < until:
        await asyncio.sleep(0.05)


async def reply(client: Any, messages: list[dict[str, Any]]) -> str:
    answer = await client.chat.completions.create(model="tuned", messages=messages)
    return answer.choices[0].message.content or ""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
