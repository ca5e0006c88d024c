"""Claude Code, Codex, OpenCode and mini-SWE-agent, unmodified, in a sandbox (`make test-cli-agents`)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ajet.agents.cli_agent import CliAgent, CliRun, ModelAddress, cli_program
from ajet.config.kinds import CLI_PROGRAMS
from ajet.context_tracker import linear_samples
from ajet.environment.sandboxes import SandboxSettings, open_sandbox
from ajet.gateway import Gateway
from ajet.gateway.chat import SessionSettings
from ajet.gateway.protocol import agent_key
from ajet.schema.chat import SIDE_MODEL, Completion
from support.session_parts import LineEngine, new_session, tokenizer

NODE = Path(os.environ.get("AJET_CLI_AGENTS_NODE", Path(__file__).parent / "cli_agents"))
PYTHON = Path(os.environ.get("AJET_CLI_AGENTS_PYTHON", NODE))
METADATA = {
    "files": {"sums.py": "def add(a, b):\n    return a - b\n"},
    "test_files": {"test_sums.py": "from sums import add\nassert add(2, 3) == 5\n"},
    "test_command": "python3 test_sums.py",
}
REPAIR = "sed -i 's/a - b/a + b/' sums.py; python3 test_sums.py && echo repaired"
SECONDS = 300.0


def use(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALLS = {
    "claude-code": use("Bash", command=REPAIR, description="Repair it"),
    "codex": use("exec_command", cmd=REPAIR),
    "opencode": use("bash", command=REPAIR, description="Repair it"),
    "mini-swe-agent": use("bash", command=REPAIR),
}
ENDS = {"mini-swe-agent": use("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")}


class Lines(LineEngine):
    """Requests whose prompt holds `aside` get that answer, whenever they come."""

    def __init__(self, *lines: str, aside: str = "") -> None:
        super().__init__(*lines)
        self.aside = aside
        self.spoken: list[list[int]] = []

    async def generate(self, request: Any, on_tokens: Any = None) -> Completion:
        if self.aside and self.aside in tokenizer().decode(request.prompt_ids):
            self.lines.insert(0, "A title")
        reply = await super().generate(request, on_tokens)
        self.spoken.append(list(reply.token_ids))
        return reply


def where(name: str) -> Path:
    place = PYTHON if name == "mini-swe-agent" else NODE
    program = cli_program(name).command[0]
    if not (place / "bin" / program).exists() and not (place / "node_modules" / ".bin" / program).exists():
        pytest.skip("needs `make test-cli-agents`")
    if shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    return place


async def work(agent: CliAgent, engine: Lines, place: Path) -> tuple[CliRun, Any]:
    """Run the program on the task. Returns what came of it, and the recorded calls."""
    session = new_session(engine, SessionSettings(untrained_models=(SIDE_MODEL,)))
    gateway = Gateway()
    await gateway.start()
    key = gateway.register(session)
    settings = SandboxSettings(
        network="gateway", exec_seconds=SECONDS, memory_mb=2048, processes=256, read_only=(str(place),)
    )
    async with open_sandbox(settings, key.base_url) as sandbox:
        await agent.check(sandbox)
        assert sandbox.gateway_url is not None
        model = ModelAddress(sandbox.gateway_url, agent_key(key.api_key, "cli", "default_target"), "ajet-cli")
        run = await agent.run("Repair add() in sums.py.", METADATA, sandbox, model)
    await gateway.aclose()
    return run, session.tracker.finish(1.0).tree


@pytest.mark.parametrize("name", CLI_PROGRAMS)
def test_a_program_repairs_a_file(name: str) -> None:
    place = where(name)
    engine = Lines(f"I look.{CALLS[name]}", f"All done.{ENDS.get(name, '')}")
    run, tree = asyncio.run(work(CliAgent(program=name, installed_in=str(place)), engine, place))
    assert run.verdict is not None and run.verdict.passed, run
    assert run.exit_code == 0, run.output
    # one conversation, in which exactly the sampled tokens are trained
    assert [(call.drop, call.fork, call.extends) for call in tree.calls] == [(None, None, -1), (None, None, 0)]
    assert "repaired" in str(tree.calls[1].new_messages)
    samples, ledger = linear_samples(tree, max_prompt_length=90000, max_response_length=90000, max_samples=9)
    (sample,) = samples
    assert ledger.trained == tree.sampled_tokens == sample.response_mask.sum()
    trained = [int(token) for token, on in zip(sample.response_ids, sample.response_mask, strict=True) if on]
    assert trained == [token for reply in engine.spoken for token in reply]


def test_opencodes_title_is_a_side_call() -> None:
    """Without `--title`, it asks the small model for one."""
    place = where("opencode")
    engine = Lines(f"I look.{CALLS['opencode']}", "All done.", aside="title generator")
    agent = CliAgent(program="opencode", command=["opencode", "run"], installed_in=str(place))
    run, tree = asyncio.run(work(agent, engine, place))
    assert run.verdict is not None and run.verdict.passed, run
    assert sorted(str(call.drop) for call in tree.calls) == ["None", "None", "not_trainable"]


def test_each_program_says_how_it_is_installed() -> None:
    for name in CLI_PROGRAMS:
        program = cli_program(name)
        assert program.install.startswith(("npm install", "pip install")) and program.command
