"""`rollout.agent: {type: cli}`: a program as the episode's agent. Real processes, in bubblewrap, over the gateway."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from ajet.config import make_config
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.errors import UserError
from ajet.schema.task import Task
from ajet.task_runner.agent_workflow import build_cli_agent
from ajet.task_runner.environments import find_sandbox, sandbox_settings
from support.runner_fakes import played

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")

ASK = """
import json, os, sys, urllib.request

def ask(text, model=None):
    body = {"model": model or os.environ["AJET_MODEL"], "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

"""
METADATA = {
    "files": {"n.py": "N = 1\n"},
    "test_files": {"test_n.py": "import n\nassert n.N == 2, 'N is not 2'\n"},
    "test_command": "python3 test_n.py",
}
TASK = Task(task_id="t7", main_query="Make N two.", metadata=METADATA)


def program(lines: str) -> list[str]:
    """A program that asks the model as any client would."""
    return ["python3", "-c", ASK + lines]


def run(command: Any, task: Task = TASK, wrapper: str = "asyncio", reply: str = "2", **agent: Any) -> Episode:
    settings = {
        "rollout.agent": {"type": "cli", "command": command, **agent},
        "rollout.sandbox": "bubblewrap",
        "task_runner.wrapper_type": wrapper,
    }
    return played(settings, [reply], task)


WORKS = """
prompt = sys.stdin.read()
title = ask("A title for: " + prompt, "side-model")
open("n.py", "w").write("N = " + ask(prompt))
print("done:", prompt, flush=True)
print("to stderr", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("wrapper", ["asyncio", "multi-processing"])
def test_an_episode(wrapper: str) -> None:
    episode = run(program(WORKS), wrapper=wrapper, system_prompt="Be brief.")
    assert episode.failure is None, episode.failure
    assert (episode.status, episode.reward, episode.is_success) == (EpisodeStatus.COMPLETED, 1.0, True)
    assert episode.metadata["final_answer"] == "done: Be brief.\n\nMake N two."
    assert (episode.metadata["exit_code"], episode.metadata["stop_reason"]) == (3, "exit")
    assert "to stderr" in episode.metadata["output"] and episode.metadata["tests"]["exit_code"] == 0
    assert episode.log_metrics["agent/failed_exit"] == 1.0
    side, main = episode.tree.calls
    assert (side.drop, main.drop, main.agent) == ("not_trainable", None, "cli")
    assert 0 < episode.tree.trained_tokens < episode.tree.sampled_tokens


def test_what_is_filled_in() -> None:
    shows = 'cat "$HOME/c.toml"; echo $URL; echo {prompt} {task_id} {unknown}; pwd; echo $MARK >&2'
    command = f"python3 -c '{ASK}ask(\"x\")'; {shows}"
    asked = {"role": "user", "content": [{"type": "text", "text": "it's {api_key} $HOME; `id`"}]}
    task = Task(task_id="t7", init_messages=[asked], metadata={"answer": "1"})
    files = {"~/c.toml": 'url = "{base_url}" {model} {"a": {}}\n'}
    given = {"files": files, "env": {"URL": "{anthropic_url}"}, "setup": "echo $URL > seen; export MARK=1"}
    episode = run(command, task, model_name="gpt-5", **given)
    first, second, third, where = episode.metadata["final_answer"].splitlines()
    assert first.startswith('url = "http://127.0.0.1:') and first.endswith('/v1" gpt-5 {"a": {}}')
    assert second.startswith("http://127.0.0.1:") and not second.endswith("/v1")
    assert third == "it's {api_key} $HOME; `id` t7 {unknown}" and where == "/workspace"
    assert episode.reward == 0.0


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("print('could not read its configuration'); sys.exit(9)", "could not read its configuration"),
        ("os.abort()", "exit code 134"),
        ("", "nothing"),
    ],
)
def test_a_program_that_never_calls_the_model(lines: str, says: str) -> None:
    episode = run(program(lines), program="codex")
    assert episode.status is EpisodeStatus.WORKFLOW_ERROR and episode.reward is None
    assert episode.failure is not None and episode.failure.kind == "NoModelCall"
    assert "codex ended with exit code" in episode.failure.message and says in episode.failure.message


@pytest.mark.slow
def test_a_program_that_never_ends_is_judged_by_what_it_did() -> None:
    lines = "open('n.py', 'w').write('N = ' + ask('?'))\nprint('now I wait', flush=True)\nwhile True: pass"
    episode = run(program(lines), max_seconds=8.0)
    assert (episode.reward, episode.metadata["stop_reason"]) == (1.0, "max_seconds")
    assert episode.metadata["output"] == "now I wait"


def test_a_program_that_prints_without_end() -> None:
    lines = "ask('?')\nwhile True: sys.stdout.buffer.write(b'\\xff\\x00' * 50000)"
    episode = run(program(lines), options={"max_output_mb": 2})
    assert (episode.reward, episode.metadata["stop_reason"], episode.metadata["exit_code"]) == (0.0, "max_output", 137)
    assert len(episode.metadata["output"]) <= 4000


DAEMON = """
open("n.py", "w").write("N = 3")
ask("?")
if os.fork() == 0:
    os.setsid()
    while True:
        open("n.py", "w").write("N = 2")
        open("test_n.py", "w").write("")
"""


def test_what_it_leaves_running_has_no_say_in_the_tests() -> None:
    tests = {"test_command": "echo 'N = 3' > n.py; sleep 0.2; python3 test_n.py", "result_as": "files"}
    episode = run(program(DAEMON), Task(task_id="t", main_query="?", metadata={**METADATA, **tests}))
    assert (episode.reward, episode.metadata["stop_reason"]) == (0.0, "exit")


def test_a_setup_that_fails_and_a_task_without_any_reward() -> None:
    broken = run(program("ask('?')"), setup="echo no such tool >&2; exit 5")
    assert broken.failure is not None and "`setup` failed: no such tool\n(exit code 5)" in broken.failure.message
    none = run(program("ask('?')"), Task(task_id="t", main_query="?"))
    assert none.failure is not None and "test_command" in none.failure.message


def test_tests_that_hang_fail() -> None:
    task = Task(task_id="t", main_query="?", metadata={"test_command": "sleep 1000"})
    episode = run(program("ask('?')"), task, options={"test_seconds": 0.5})
    assert episode.reward == 0.0 and "timed out" in episode.metadata["tests"]["output"]


def test_a_program_that_is_not_installed_is_named_before_the_run() -> None:
    def refused(**agent: Any) -> str:
        with pytest.raises(UserError) as error:
            find_sandbox(make_config({"rollout.agent": {"type": "cli", **agent}, "rollout.sandbox": "bubblewrap"}))
        return str(error.value)

    said = refused(command=["no-such-agent", "{prompt}"])
    assert "ajet.rollout.agent: the program 'no-such-agent' isn't in the sandbox" in said and "installed_in" in said
    if shutil.which("claude") is None:
        assert "npm install -g @anthropic-ai/claude-code" in refused(program="claude-code")
    assert "no folder 'nowhere'" in refused(program="codex", installed_in="nowhere")
    assert "no option 'test_comand'" in refused(program="codex", options={"test_comand": "x"})
    assert "a key of rollout.agent itself" in refused(program="codex", options={"env": {}})


def test_the_sandbox_of_a_program() -> None:
    agent = {"type": "cli", "program": "codex"}
    settings = sandbox_settings(make_config({"rollout.agent": agent, "rollout.sandbox": "bubblewrap"}))
    assert settings is not None and (settings.network, settings.exec_seconds) == ("gateway", 1200.0)
    own = {"kind": "bubblewrap", "network": "host", "exec_seconds": 5}
    settings = sandbox_settings(make_config({"rollout.agent": agent, "rollout.sandbox": own}))
    assert settings is not None and (settings.network, settings.exec_seconds) == ("host", 5.0)


def test_what_is_given_replaces_what_ajet_knows() -> None:
    agent = {"type": "cli", "program": "codex", "files": {"~/.codex/config.toml": "mine"}, "env": {"A": "1"}}
    built = build_cli_agent(make_config({"rollout.agent": agent}))
    assert built.executable == "codex" and built.files == {"~/.codex/config.toml": "mine"} and built.env == {"A": "1"}
