"""Programs of Node.js, unmodified, over HTTP: Codex, and an agent on Vercel's AI SDK (`make test-clients`)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ajet.context_tracker import linear_samples
from ajet.gateway import Gateway
from ajet.task_runner.tuner import AjetTuner
from support.frameworks import check
from support.session_parts import LineEngine, new_session

PROGRAMS = Path(__file__).parent / "node_clients"
INSTALLED = Path(os.environ.get("AJET_NODE_CLIENTS", PROGRAMS))
CODEX = INSTALLED / "node_modules" / ".bin" / "codex"

pytestmark = pytest.mark.skipif(
    not CODEX.exists() or shutil.which("node") is None, reason="needs Node.js and `make test-clients`"
)


@pytest.mark.parametrize("mode", ["whole", "streamed"])
@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_vercels_ai_sdk(protocol: str, mode: str, tmp_path: Path) -> None:
    async def job(tuner: AjetTuner) -> list[str]:
        base_url, api_key, model = tuner.as_oai_baseurl_apikey("solver")
        (tmp_path / "node_modules").symlink_to(INSTALLED / "node_modules")
        program = shutil.copy(PROGRAMS / "vercel.mjs", tmp_path)
        environment = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "MODEL": model}
        ran = await asyncio.create_subprocess_exec(
            "node", program, protocol, mode, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        said, errors = await ran.communicate()
        assert ran.returncode == 0, errors.decode()
        answers: list[str] = json.loads(said)
        return answers

    check(job, near=False)


def use(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


PATCH = "*** Begin Patch\n*** Add File: made.txt\n+hello\n*** End Patch\n"


@pytest.mark.parametrize("model", ["ajet-solver", "gpt-5.5"])
def test_codex(model: str, tmp_path: Path) -> None:
    """Under its own model's name, Codex also offers a custom tool, and its search tools."""
    lines = ["I look." + use("exec_command", cmd="echo 5 > seen.txt")]
    if model == "gpt-5.5":
        lines.append(use("apply_patch", input=PATCH))
    lines.append("All done.")

    async def run() -> None:
        session = new_session(LineEngine(*lines))
        gateway = Gateway()
        await gateway.start()
        key = gateway.register(session)
        home, work = tmp_path / "home", tmp_path / "work"
        home.mkdir()
        work.mkdir()
        provider = f'name = "ajet"\nbase_url = "{key.base_url}"\nenv_key = "AJET_KEY"\nwire_api = "responses"\n'
        (home / "config.toml").write_text(f'model_provider = "ajet"\n[model_providers.ajet]\n{provider}')
        command = ["exec", "-m", model, "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "go"]
        ran = await asyncio.create_subprocess_exec(
            str(CODEX),
            *command,
            cwd=work,
            env={**os.environ, "CODEX_HOME": str(home), "AJET_KEY": key.api_key},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said, _ = await asyncio.wait_for(ran.communicate(), 120)
        await gateway.aclose()
        assert ran.returncode == 0 and b"All done." in said, said.decode()
        assert (work / "seen.txt").read_text() == "5\n"
        assert model != "gpt-5.5" or (work / "made.txt").read_text() == "hello\n"
        tree = session.tracker.finish(1.0).tree
        assert [(call.drop, call.fork) for call in tree.calls] == [(None, None)] * len(lines)
        samples, ledger = linear_samples(tree, max_prompt_length=90000, max_response_length=90000, max_samples=99)
        assert len(samples) == 1 and ledger.trained == tree.sampled_tokens == samples[0].response_mask.sum()

    asyncio.run(run())
