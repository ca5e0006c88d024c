"""The math agent with the OpenAI SDK, with the loop written out."""

from __future__ import annotations

from math_tools import SYSTEM_PROMPT, TOOL_SCHEMAS, call_tool

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask


class MathAgentWorkflow(Workflow):
    name: str = "math_agent_openai"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client(agent_name="math_agent")
        messages = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": workflow_task.task.main_query},
        ]
        answer = ""
        for _ in range(tuner.config.ajet.rollout.multi_turn.max_steps):
            completion = await client.chat.completions.create(model="math_agent", messages=messages, tools=TOOL_SCHEMAS)
            reply = completion.choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            if not reply.tool_calls:
                answer = reply.content or ""
                break
            for call in reply.tool_calls:
                result = call_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return WorkflowOutput(metadata={"final_answer": answer})
