"""The reward of a doctor's reply: action · (1 + 2 · content) + format, between 0 and 4.

Going on or stopping at the wrong time gives 0. A rightful `<stop />` has content 1, and format 1 if nothing else is
written. A rightful question is graded by the helper model (`ajet.helper`), which knows what the real doctor asked
later. An answer of the helper without both scores is asked for again, and in the end is a judge error, never a 0.
"""

from __future__ import annotations

import re
from typing import Any

from ajet import WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge, Reward
from ajet.task_judge.helper import Asker, HelperModel
from ajet.task_judge.helper_answers import WrongAnswer

STOP = "<stop />"
PROMPT = """You grade what a doctor says next to a patient.

<conversation>
{conversation}
</conversation>

What is still unknown and matters:
<missing>
{missing}
</missing>

The doctor says:
<reply>
{reply}
</reply>

First think, inside <think></think>. Then give two scores:
<format_score>: 1 if the reply asks exactly one question, 0.5 if two, 0 otherwise.
<content_score>: 1 if it asks for something that is missing, 0.1 if the question is a general one, 0 if it is
irrelevant, already answered, or unclear.
Answer in this form: <think>…</think><format_score>…</format_score><content_score>…</content_score>"""


class AskJudge(BaseJudge):
    """The judge; `metadata["reply"]` is what the doctor said."""

    reads_output = ("reply",)
    reads_task = ("decision_truth", "info_truth")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._asker = Asker(HelperModel.from_config(config), max_concurrent=16)

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        task, reply = workflow_task.task, str(workflow_output.metadata.get("reply", "")).strip()
        stops = STOP in reply
        if stops != (task.metadata["decision_truth"] == "stop"):
            return reward(0, 0.0, 0.0)
        if stops:
            return reward(1, 1.0, float(reply == STOP))
        lines = [f"{message['role']}: {message['content']}" for message in task.init_messages]
        question = PROMPT.format(
            conversation="\n".join(lines), missing="\n".join(task.metadata["info_truth"]), reply=reply
        )
        content, form = await self._asker.ask([{"role": "user", "content": question}], read_scores, temperature=0)
        return reward(1, content, form)


def reward(action: int, content: float, form: float) -> Reward:
    """The sum, with its parts recorded and plotted by name. A success has all 4 points."""
    parts = {"action": float(action), "content": action * 2 * content, "format": form}
    return Reward(parts=parts, is_success=sum(parts.values()) == 4)


def read_scores(answer: str) -> tuple[float, float]:
    """The two scores of a helper's answer: content, format."""
    after_thinking = answer.rpartition("</think>")[2]
    scores = []
    for name in ("content_score", "format_score"):
        found = re.search(rf"<{name}>\s*([0-9.]+)\s*</{name}>", after_thinking)
        try:
            score = float(found[1]) if found else -1.0
        except ValueError:
            score = -1.0
        if not 0 <= score <= 1:
            raise WrongAnswer(f"<{name}> must hold a number from 0 to 1")
        scores.append(score)
    return scores[0], scores[1]
