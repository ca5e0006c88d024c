"""Clients that user code doesn't close: a run of many episodes prints nothing about them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support import TESTS

PROGRAM = '''
import asyncio, gc, sys
sys.path.insert(0, {tests!r})
import openai
from support.gateway_parts import place
from support.runner_fakes import runner_of
from ajet import Task, Workflow, WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge

ADDRESS = []

class Asks(BaseJudge):
    """An LLM judge as people write it: a client for each question, never closed."""

    async def ask(self):
        self.client = openai.AsyncOpenAI(base_url=ADDRESS[0], api_key=ADDRESS[1])
        again = [self.client]  # a cycle, as in most agents: collected later, on any loop
        again.append(again)
        await self.client.chat.completions.create(model="judge", messages=[{{"role": "user", "content": "?"}}])
        return 1.0

class AsyncJudge(Asks):
    async def compute_reward(self, workflow_task, workflow_output):
        return await self.ask()

class PlainJudge(Asks):
    def compute_reward(self, workflow_task, workflow_output):
        return asyncio.run(self.ask())

class OwnLoop(Asks):
    def compute_reward(self, workflow_task, workflow_output):
        return asyncio.get_event_loop().run_until_complete(self.ask())

class Agent(Workflow):
    async def execute(self, workflow_task, tuner):
        gc.collect()
        await asyncio.sleep(0.01)
        return WorkflowOutput()

async def main():
    async with place() as there:
        ADDRESS[:] = there.key.base_url, there.key.api_key
        runner = runner_of(Agent, judge=globals()[sys.argv[1]], grace_s=30.0)
        for number in range(12):
            task = WorkflowTask(task=Task(task_id=str(number), main_query="?"), task_id=str(number))
            episode = await runner.run(task)
            assert episode.reward == 1.0, episode.failure
        gc.collect()
        await asyncio.sleep(0.1)
        open_now = there.gateway.connections
    print("connections", open_now)

asyncio.run(main())
'''


@pytest.mark.slow
@pytest.mark.parametrize("judge", ["AsyncJudge", "PlainJudge", "OwnLoop"])
def test_a_judge_that_closes_no_client(judge: str) -> None:
    program = PROGRAM.format(tests=str(TESTS))
    ran = subprocess.run(
        [sys.executable, "-c", program, judge], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stderr == ""
    if judge != "PlainJudge":  # that one's connections end when its clients are collected
        assert ran.stdout.split() == ["connections", "0"]
