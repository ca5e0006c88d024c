"""The quickstart's agent as the soak runs it: some of its episodes misbehave, and each tells what it was told.

SOAK_FAULTS=1 switches the faults on. Each episode that returns a reward adds a line to the file of SOAK_LOG.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from contextlib import suppress

import httpx
from openai import OpenAIError

from ajet import AjetTuner, WorkflowOutput, WorkflowTask
from tutorial.example_math_agent.quickstart.workflow import QuickstartWorkflow

SHARES = {
    **{"nan": 0.02, "raises": 0.02, "huge": 0.02, "slow": 0.02, "dies": 0.01, "noise": 0.01},
    **{"cheats": 0.02, "pattern": 0.01, "detaches": 0.02},
}
"""Of the episodes. `dies` and `detaches` only where a workflow has a process of its own."""
DETACHED = ["sleep", "601"]
HUGE = "9" * 6_000_000


class SoakWorkflow(QuickstartWorkflow):
    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        fault = "" if os.environ.get("SOAK_FAULTS") != "1" else drawn(workflow_task.episode_uuid)
        if fault == "dies" and os.environ.get("SOAK_ISOLATED") == "1":
            os._exit(9)
        if fault == "detaches" and os.environ.get("SOAK_ISOLATED") == "1":
            subprocess.Popen(DETACHED, start_new_session=True)
        if fault == "raises":
            raise RuntimeError("of the soak's making")
        if fault == "slow":
            await asyncio.sleep(1.0)
        if fault in ("huge", "noise"):
            client = tuner.as_raw_openai_sdk_client(agent_name="other", target_tag="other")
            messages = [{"role": "user", "content": HUGE if fault == "huge" else "\x00\u202e\x1b[2J" * 20}]
            try:
                await client.chat.completions.create(model="other", messages=messages, max_tokens=4)
            except OpenAIError as error:  # refused, as it should be
                if fault == "noise":
                    raise RuntimeError("noise was refused") from error
        if fault == "cheats":
            await cheat(tuner)
        if fault == "pattern":
            await ask_for_a_pattern(tuner)
        output = await super().execute(workflow_task, tuner)
        if fault == "nan":
            output.reward = float("nan")
            return output
        line = json.dumps({"id": workflow_task.episode_uuid, "reward": output.reward}) + "\n"
        with open(os.environ["SOAK_LOG"], "ab", buffering=0) as file:
            file.write(line.encode())
        return output


async def cheat(tuner: AjetTuner) -> None:
    """Try to reward the episode with the agent's own key."""
    base_url, key, _ = tuner.as_oai_baseurl_apikey(agent_name="math_agent")
    span = {"traceId": "1" * 32, "spanId": "1" * 16, "name": "agentlightning.reward", "startTimeUnixNano": "1"}
    span["attributes"] = [{"key": "agentlightning.reward.0.value", "value": {"doubleValue": 1000.0}}]  # type: ignore
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as client:
        answer = await client.post(f"{base_url}/rewards", json={"reward": 1000.0})
        if answer.status_code != 403:
            raise RuntimeError(f"an agent's key gave a reward: {answer.status_code}")
        await client.post(f"{base_url}/traces", json={"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})


async def ask_for_a_pattern(tuner: AjetTuner) -> None:
    """A schema whose pattern takes for ever on what the model says."""
    client = tuner.as_raw_openai_sdk_client(agent_name="other", target_tag="other")
    schema = {"type": "string", "pattern": "^(a+)+$"}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "a" * 40 + "!"}]
    with suppress(OpenAIError):
        await client.chat.completions.create(model="other", messages=messages, max_tokens=4, response_format=wanted)


def drawn(episode: str) -> str:
    """The fault of an episode, the same in every try."""
    at = random.Random(episode).random()
    for fault, share in SHARES.items():
        if at < share:
            return fault
        at -= share
    return ""
