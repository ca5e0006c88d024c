"""Claude Code finds the skill of `ajet init --skill` and follows it to a trained agent (`make test-cli-agents`).

The program is real; what its model says is scripted: it loads the skill, then takes each step's commands from it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from ajet.agents.cli_agent import cli_program, fill
from ajet.cli.init import SKILL, write_skill
from ajet.context_tracker import TrackerSettings
from ajet.gateway import Gateway
from ajet.gateway.chat import SessionSettings
from ajet.gateway.protocol import agent_key
from ajet.schema.chat import SIDE_MODEL
from support.session_parts import LineEngine, new_session, tokenizer
from support.skill import scripts, written_files

NODE = Path(os.environ.get("AJET_CLI_AGENTS_NODE", Path(__file__).parent / "cli_agents"))
ROOT = Path(__file__).parents[2]


def use(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def what_the_model_says() -> list[str]:
    """The skill by its name, its pages, the commands of each step, and a last word."""
    lines = [use("Skill", skill="agentjet")]
    for script in scripts(SKILL):
        if script.startswith("ajet init"):
            files = "".join(f"cat > {name} <<'END'\n{code}END\n" for name, code in written_files(SKILL).items())
            script += files
        lines.append(use("Bash", command=f"set -e\n{script}", description="The next step", timeout=600_000))
    return [*lines, "The agent is trained."]


async def follow(folder: Path, engine: LineEngine) -> str:
    """Run Claude Code in the folder. Returns what it printed."""
    tracking = TrackerSettings(max_model_len=2_000_000, checks=())
    session = new_session(engine, SessionSettings(untrained_models=(SIDE_MODEL,)), tracking)
    gateway = Gateway()
    await gateway.start()
    key = gateway.register(session)
    program = cli_program("claude-code")
    (folder.parent / "bin").mkdir()
    command = folder.parent / "bin/ajet"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ajet "$@"\n')
    command.chmod(0o755)
    names = {"model": "ajet-cli", "side_model": SIDE_MODEL}
    environment = {
        **os.environ,
        **{name: fill(value, names) for name, value in program.env.items()},
        "PATH": f"{command.parent}:{NODE}/node_modules/.bin:{os.environ['PATH']}",
        "HOME": str(folder.parent),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "IS_SANDBOX": "1",  # as root it would ask about every command
        "ANTHROPIC_BASE_URL": key.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": agent_key(key.api_key, "cli", "default_target"),
    }
    ran = await asyncio.create_subprocess_exec(
        *program.command, "Train an agent with AgentJet in this folder.",
        cwd=folder, env=environment, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    printed, _ = await ran.communicate()
    await gateway.aclose()
    assert ran.returncode == 0, printed.decode()
    return printed.decode()


@pytest.mark.slow
def test_claude_code_trains_an_agent_by_the_skill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (NODE / "node_modules/.bin/claude").exists():
        pytest.skip("needs `make test-cli-agents`")
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_skill(Path(".claude/skills/agentjet"))
    engine = LineEngine(*what_the_model_says())
    assert "The agent is trained." in asyncio.run(follow(folder, engine))
    first, second, *_, last = (tokenizer().decode(request.prompt_ids) for request in engine.requests)
    assert "Use it to connect an existing agent" in first, "the program tells its model of the skill"
    assert "Train only after step 3" in second, "loading it shows the steps"
    assert "weights of step_20" in last
    assert (folder / "my-model/model.safetensors").is_file()
