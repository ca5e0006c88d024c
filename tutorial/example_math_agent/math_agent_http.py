"""The math agent over plain HTTP, with only the standard library: any language can do this.

The calls block, which is fine: every episode runs in its own thread.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from math_tools import SYSTEM_PROMPT, TOOL_SCHEMAS, call_tool

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask


class MathAgentWorkflow(Workflow):
    name: str = "math_agent_http"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        endpoint = tuner.as_oai_baseurl_apikey(agent_name="math_agent")

        def chat(messages: list[dict[str, Any]]) -> dict[str, Any]:
            body = {"model": endpoint.model, "messages": messages, "tools": TOOL_SCHEMAS}
            request = urllib.request.Request(
                f"{endpoint.base_url}/chat/completions",
                data=json.dumps(body).encode(),
                headers={"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as response:
                return json.load(response)["choices"][0]["message"]

        messages = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": workflow_task.task.main_query},
        ]
        answer = ""
        for _ in range(tuner.config.ajet.rollout.multi_turn.max_steps):
            reply = chat(messages)
            messages.append(reply)
            if not reply.get("tool_calls"):
                answer = reply.get("content") or ""
                break
            for call in reply["tool_calls"]:
                result = call_tool(call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return WorkflowOutput(metadata={"final_answer": answer})
