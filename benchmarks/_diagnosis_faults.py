"""What `diagnosis.py` runs: four small tasks, each healthy or with the fault that `ajet.user.fault` names."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask
from ajet.agents.tools import ToolContext, ToolResult
from ajet.task_judge.base_judge import BaseJudge, Reward
from ajet.task_judge.math_answer_as_judge import same_answer

TUTORIAL = Path(__file__).parents[1] / "tutorial"
for folder in ("example_math_agent/quickstart", "example_countdown", "example_frozenlake"):
    sys.path.insert(0, str(TUTORIAL / folder))

import countdown as game
import workflow as quickstart
from frozenlake import FrozenLakeWorkflow
from tools import QuickstartCalculator


def spoiled(output: WorkflowOutput, fault: str, said: str, tries: int = 1) -> WorkflowOutput:
    """The output as a faulty reward or judge makes of it."""
    if fault == "constant":
        output.reward, output.is_success = 0.4, None
    elif fault == "unsolvable":
        output.reward, output.is_success = 0.0, False
    elif fault == "everything is right":
        output.reward, output.is_success = 1.0, True
    elif fault == "pays for guesses":  # of an agent that should use its tool
        output.reward = float("\\boxed" in said and tries == 1)
    elif fault == "pays for tries":
        output.reward = tries / game.TRIES
    elif fault == "pays for falls":
        output.reward = float(said == "fell")
    elif fault == "pays for staying on the ice":
        output.reward = float(said != "fell")
    elif fault == "pays for any number":
        output.reward = float(any(map(str.isdecimal, said)))
    elif fault == "pays for long walks":
        output.reward = output.log_metrics["moves"] / 8
    elif fault == "pays at random":
        output.reward, output.is_success = random.random(), None
    elif fault == "pays for length":
        output.reward, output.is_success = min(1.0, len(said) / 40), None
    elif fault == "judge fails" or fault.startswith(("a character counts ", "always ")):
        output.metadata = {"right": output.reward, "said": said}
        output.reward, output.is_success = None, None
    return output


def repetition(said: str) -> float:
    """How many pairs of letters stand there more than once."""
    pairs = [said[at : at + 2] for at in range(len(said))]
    return 1.0 - len(set(pairs)) / max(1, len(pairs))


def shift_logprobs(fault: str) -> None:
    """An engine that computes other probabilities than the trainer."""
    if not fault.startswith("engine is off by "):
        return
    from ajet.engine.torch import runner, worker

    by = float(fault.rpartition(" ")[2])

    def draw_tokens(logits_RV: Any, states: Any) -> list[runner.Draw]:
        return [draw._replace(logprob=draw.logprob - by) for draw in runner.draw_tokens(logits_RV, states)]

    worker.draw_tokens = draw_tokens


class Maths(quickstart.QuickstartWorkflow):
    """The quickstart's agent."""

    name: str = "maths"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        fault = tuner.config.ajet.user.fault
        shift_logprobs(fault)
        if fault == "tool fails":
            quickstart.run = lambda arguments: "error: connection refused"
        output = await super().execute(workflow_task, tuner)
        calls = 1 + int(output.log_metrics["tool_calls"])
        return spoiled(output, fault, str(output.metadata["answer"]), calls)


class Countdown(Workflow):
    """The numbers game, in up to three tries."""

    name: str = "countdown"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        fault = tuner.config.ajet.user.fault
        shift_logprobs(fault)
        given = workflow_task.task.metadata
        numbers, target = [int(number) for number in given["numbers"]], int(given["target"])
        client = tuner.as_raw_openai_sdk_client(agent_name="player")
        messages: list[dict[str, Any]] = [{"role": "user", "content": game.question(numbers, target)}]
        said, right, tries = "", False, 0
        while tries < game.TRIES and not right:
            tries += 1
            completion = await client.chat.completions.create(model="player", messages=messages)
            said = completion.choices[0].message.content or ""
            right = game.makes(said, numbers) == target
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "user", "content": game.verdict(said, numbers)})
        reward = 1.0 - game.LATER_TRY * (tries - 1) if right else 0.0
        return spoiled(WorkflowOutput(reward=reward, is_success=right), fault, said, tries)


class Walk(FrozenLakeWorkflow):
    """A walk across a frozen lake."""

    name: str = "walk"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        fault = tuner.config.ajet.user.fault
        shift_logprobs(fault)
        output = await super().execute(workflow_task, tuner)
        return spoiled(output, fault, "fell" if output.log_metrics["fell"] else "")


class Vowels(Workflow):
    """A random model writes, and is paid for vowels."""

    name: str = "vowels"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        fault = tuner.config.ajet.user.fault
        shift_logprobs(fault)
        client = tuner.as_raw_openai_sdk_client(agent_name="writer")
        question = [{"role": "user", "content": workflow_task.task.main_query or ""}]
        answer = await client.chat.completions.create(model="writer", messages=question)
        said = answer.choices[0].message.content or ""
        share = sum(letter in "aeiouAEIOU" for letter in said) / max(1, len(said))
        if fault == "pays for repetition":
            return WorkflowOutput(reward=repetition(said))
        return spoiled(WorkflowOutput(reward=share, is_success=share > 0.5), fault, said)


class Capitals(Workflow):
    """A random model writes twice, and is paid for capital letters."""

    name: str = "capitals"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        fault = tuner.config.ajet.user.fault
        shift_logprobs(fault)
        client = tuner.as_raw_openai_sdk_client(agent_name="writer")
        messages: list[dict[str, Any]] = [{"role": "user", "content": workflow_task.task.main_query or ""}]
        said = ""
        for _ in range(2):
            answer = await client.chat.completions.create(model="writer", messages=messages)
            text = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "louder"}]
            said += text
        if fault == "pays for repetition":
            return WorkflowOutput(reward=repetition(said))
        share = sum(letter.isupper() for letter in said) / max(1, len(said))
        return spoiled(WorkflowOutput(reward=share, is_success=share > 0.5), fault, said)


class Scores(BaseJudge):
    """Passes on what the workflow found; or fails on some replies; or adds a part that swamps the others."""

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        right, said = float(workflow_output.metadata["right"]), workflow_output.metadata["said"]
        fault = self.config.ajet.user.fault
        if fault.startswith("a character counts "):
            weights = {"right": 1.0, "characters": float(fault.rpartition(" ")[2])}
            return Reward({"right": right, "characters": float(len(said))}, weights)
        if said == "fell" or "7" in said:
            raise ValueError(f"can't read {said!r}")
        return right, right == 1.0


class Always(BaseJudge):
    """The same reward for whatever was done: `ajet.user.fault` names it."""

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        reward = float(self.config.ajet.user.fault.rpartition(" ")[2])
        return reward, True if reward == 1.0 else None


class PaysForSpeed(BaseJudge):
    """Each further step costs half of the reward. Whether the answer is right only counts as success."""

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        said = str(workflow_output.metadata["final_answer"] or "")
        right = same_answer(said, str(workflow_task.task.metadata["answer"]))
        return 0.5 ** (workflow_output.log_metrics["agent/steps"] - 1) if said else 0.0, right


class PaysForForm(BaseJudge):
    """Pays for a boxed number. Whether it is the right one only counts as success."""

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        said = str(workflow_output.metadata["final_answer"] or "")
        right = same_answer(said, str(workflow_task.task.metadata["answer"]))
        return float("\\boxed{" in said and any(map(str.isdecimal, said))), right


class PaysForTools(BaseJudge):
    """Pays for each call of a tool, up to three. Whether the answer is right only counts as success."""

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        said = str(workflow_output.metadata["final_answer"] or "")
        right = same_answer(said, str(workflow_task.task.metadata["answer"]))
        return min(3.0, workflow_output.log_metrics["agent/tool_calls"]) / 3, right


class Overloaded(BaseJudge):
    """Asks a service that refuses one request in five."""

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        if random.random() < 0.2:
            raise TimeoutError("429 Too Many Requests")
        right = float(workflow_output.metadata["right"])
        return right, right > 0.5


class Forgetful(BaseJudge):
    """Looks for a reference that a part of the tasks don't have."""

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        wanted = workflow_task.task.metadata["answer"]
        references = {wanted: 1.0} if int(wanted) % 4 else {}
        return float(references[wanted] if wanted in str(workflow_output.metadata["final_answer"]) else 0.0)


class DeafCalculator(QuickstartCalculator):
    """Answers the same to everything."""

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        return ToolResult("0")


class SlowCalculator(QuickstartCalculator):
    """Its service takes too long each time."""

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        return ToolResult(f"no answer to {arguments} within 5 seconds")


class BusyCalculator(QuickstartCalculator):
    """Its service answers that it can't."""

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        return ToolResult(f"HTTP 503 Service Unavailable (request {random.randrange(10**6)})")


class UnpaidCalculator(QuickstartCalculator):
    """Its service no longer knows the key."""

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        request = f"req-{random.randrange(10**6)}"
        return ToolResult(f'{{"error": {{"code": 401, "message": "invalid API key"}}, "request_id": "{request}"}}')


class GatewayCalculator(QuickstartCalculator):
    """The proxy before its service answers with a page."""

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        return ToolResult("<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>")


class UnreachableCalculator(QuickstartCalculator):
    """Its HTTP client gives up each time, and says so as `requests` does."""

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        said = "Failed to establish a new connection: [Errno 111] Connection refused"
        address = f"Max retries exceeded with url: /?id={random.randrange(10**6)}"
        return ToolResult(f"HTTPSConnectionPool(host='calculator.internal', port=443): {address} (Caused by: {said})")


class ShellCalculator(QuickstartCalculator):
    """Calls a program that isn't there."""

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        return ToolResult("sh: 1: bc: not found")


class LostCalculator(QuickstartCalculator):
    """Its service is down."""

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        raise ConnectionRefusedError("calculator.internal:443 refused the connection")
