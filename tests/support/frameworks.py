"""One small job for every framework: an agent with a calculator answers two questions in one conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ajet.context_tracker import linear_samples
from ajet.gateway import Gateway
from ajet.task_runner.tuner import AjetTuner
from support.session_parts import CONFIG, LineEngine, new_session


def use(expression: str) -> str:
    return f'<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


LINES = (f"Let me see.\n{use('17*3')}", f"{use('51+1')}\n{use('2*2')}", "It is 52.", use("52+1"), "It is 53.")
QUESTIONS = ("17*3+1?", "and one more?")
ANSWERS = ["It is 52.", "It is 53."]
SYSTEM = "Use the calculator."
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
DESCRIPTION = "Calculate an arithmetic expression."


def calculate(expression: str) -> str:
    """Calculate an arithmetic expression."""
    return {"17*3": "51", "51+1": "52", "2*2": "4", "52+1": "53"}[expression]


Job = Callable[[AjetTuner], Awaitable[list[str]]]


def check(job: Job, *, near: bool = True, answers: list[str] = ANSWERS) -> None:
    """Run the job in its own thread; the five calls must form one linear sample, with all replies trained."""

    async def run() -> None:
        session = new_session(LineEngine(*LINES))
        gateway = Gateway()
        await gateway.start()
        key = gateway.register(session)
        tuner = (
            AjetTuner(session, CONFIG, asyncio.get_running_loop(), gateway)
            if near
            else AjetTuner.remote(key.base_url, key.api_key, CONFIG, control_key=key.control_key)
        )
        given = await asyncio.wait_for(asyncio.to_thread(lambda: asyncio.run(run_job(tuner))), 300)
        await gateway.aclose()
        assert given == answers
        tree = session.tracker.finish(1.0).tree
        assert [call.drop for call in tree.calls] == [None] * len(LINES)
        assert [call.fork for call in tree.calls] == [None] * len(LINES)
        samples, ledger = linear_samples(tree, max_prompt_length=9000, max_response_length=9000, max_samples=99)
        assert len(samples) == 1, [call.new_messages for call in tree.calls]
        assert ledger.trained == tree.sampled_tokens == samples[0].response_mask.sum()

    async def run_job(tuner: AjetTuner) -> list[str]:
        return await job(tuner)

    asyncio.run(run())


def openai_tools() -> list[dict[str, Any]]:
    function = {"name": "calculate", "description": DESCRIPTION, "parameters": PARAMETERS}
    return [{"type": "function", "function": function}]
