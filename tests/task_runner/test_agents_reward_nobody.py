"""A program with an agent's key can't give its episode a reward, whatever it sends."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path

import pytest

from ajet.config import make_config
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.task import Task, WorkflowTask
from ajet.task_runner.processes import ProcessRunner
from ajet.task_runner.runner import TaskRunner
from support.runner_fakes import LineEngine, SmallProvider

AGENT = """
import json, os, sys, urllib.error, urllib.request
from ajet.system.http_messages import narrow

BASE, KEY = os.environ["BASE"], os.environ["KEY"]

def post(path, body, key=KEY):
    sent = urllib.request.Request(f"{BASE}/{path}", json.dumps(body).encode(), method="POST")
    sent.add_header("authorization", f"Bearer {key}")
    sent.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(sent) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, None

status, reply = post("chat/completions", {"model": "ajet-solver", "messages": [{"role": "user", "content": "hi"}]})
assert status == 200
call = reply["id"]
head, _, rest = KEY.partition(".")
for key in (KEY, head, head + "." + rest[::-1], KEY + "A", "sk-ajet-" + "A" * 60):
    for body in ({"reward": 1000}, {"reward": 1000, "call": call}, {"reward": 1000, "agent": "solver"},
                 {"reward": 1000, "call": call, "replace": True}):
        for path in ("rewards", "rewards/", "v1/rewards"):
            assert post(path, body, key)[0] in (401, 403), (key, body, path)
episode = os.environ["EPISODE"]
assert post(f"episodes/{episode}/end", {"reward": 1000})[0] in (401, 403, 404)
assert post("episodes", {"task": {"main_query": "x"}})[0] in (401, 403, 404)

def number(key, value):
    return {"key": key, "value": {"doubleValue": value}}

def text(key, value):
    return {"key": key, "value": {"stringValue": value}}

link = [text("agentlightning.link.0.key_match", "gen_ai.response.id"),
        text("agentlightning.link.0.value_match", call)]
forms = [
    ("agentlightning.reward", [number("agentlightning.reward.0.value", 1000)]),
    ("agentlightning.reward", [number("agentlightning.reward.0.value", 1000), *link]),
    ("agentlightning.annotation", [number("reward", 1000)]),
    ("tool", [text("agentops.task.output", '{"type": "reward", "value": 1000}')]),
]
spans = [{"traceId": "1" * 32, "spanId": f"{n + 1:016x}", "name": name, "startTimeUnixNano": "1",
          "endTimeUnixNano": "2", "attributes": values} for n, (name, values) in enumerate(forms)]
assert post("traces", {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})[0] == 200
"""
CODE = """
import asyncio, os, sys
from pathlib import Path
from ajet import rollout, Workflow, WorkflowOutput

async def run_agent(task, tuner):
    base_url, key, _ = tuner.as_oai_baseurl_apikey(agent_name="solver")
    given = {**os.environ, "BASE": base_url, "KEY": key, "EPISODE": task.episode_uuid}
    program = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("attack.py")), env=given, stderr=asyncio.subprocess.PIPE)
    _, said = await program.communicate()
    if program.returncode:
        raise RuntimeError(said.decode()[-2000:])

class Returns(Workflow):
    async def execute(self, workflow_task, tuner):
        await run_agent(workflow_task, tuner)
        return WorkflowOutput(reward=0.0)

@rollout
async def says_nothing(task, tuner):
    await run_agent(await asyncio.sleep(0, Episode()), tuner)

class Episode:
    episode_uuid = "e1"
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Returns", "says_nothing"])
def test_an_agent_s_key_gives_no_reward(name: str, tmp_path: Path) -> None:
    (tmp_path / "attack.py").write_text(textwrap.dedent(AGENT))
    (tmp_path / "agent.py").write_text(textwrap.dedent(CODE))
    keys = {"rollout.user_workflow": f"{tmp_path}/agent.py->{name}", "task_runner.wrapper_type": "multi-processing"}

    async def run() -> Episode:
        config = make_config(keys)
        sessions = SmallProvider(config, LineEngine("fine"))
        attempts = ProcessRunner(config, sessions)
        try:
            task = WorkflowTask(task=Task(task_id="t", main_query="x"), episode_uuid="e1")
            return await TaskRunner(sessions, attempts).run(task)
        finally:
            await attempts.aclose()
            if sessions.gateway is not None:
                await sessions.gateway.aclose()

    episode = asyncio.run(run())
    if name == "Returns":
        assert (episode.status, episode.reward) == (EpisodeStatus.COMPLETED, 0.0), episode.failure
    else:
        assert episode.status is EpisodeStatus.WORKFLOW_ERROR and episode.reward is None
        assert episode.failure is not None and "reward" in episode.failure.message, episode.failure
    assert episode.agent_rewards == {}
    assert episode.reward_parts in ({}, None)
    assert len(episode.spans) == 4, "they are kept, for who looks into it"
