"""What verl as the host is given by `test_verl_host_run.py`: an agent of two turns, its judge, and a loop that writes
down what verl gets."""

from __future__ import annotations

import json
import os
from typing import Any

from ajet.agents import ReActAgent
from ajet.agents.model_function import AgentReply, Message, ToolCall
from ajet.agents.run import AgentRun
from ajet.backbone.ray.verl.agent_loop import AjetAgentLoop
from ajet.schema.task import WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge

FILE = "HOST_RUN_FILE"


class CalculatesFirst(ReActAgent):
    """A random model calls no tool: whatever it says first is taken for a call of the calculator."""

    def parse(self, message: Message, run: AgentRun) -> AgentReply:
        text = str(message.get("content") or "")
        if run.model_steps == 1:
            return AgentReply(text, (ToolCall("calculator", {"expression": "6*7"}, "call_0"),))
        return AgentReply(answer=text)


class Vowels(BaseJudge):
    """The share of vowels in the answer."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        answer = str(workflow_output.metadata.get("final_answer") or workflow_output.metadata)
        share = sum(letter in "aeiou" for letter in answer) / max(1, len(answer))
        return share, share > 0.2


class Recorded(AjetAgentLoop):
    """Writes a line for each row."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        outputs = await super().run(sampling_params, **row)
        with open(os.environ[FILE], "a", encoding="utf-8") as file:
            for output in outputs:
                kept = {
                    "step": int(row["global_steps"]),
                    "response": output.response_ids,
                    "mask": output.response_mask,
                    "logprobs": output.response_logprobs,
                    "reward": output.reward_score,
                    "version": output.extra_fields["max_global_steps"],
                }
                file.write(json.dumps(kept) + "\n")
        return outputs
