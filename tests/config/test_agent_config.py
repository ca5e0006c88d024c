"""`rollout.agent`: what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from ajet.config import load_config
from ajet.schema.errors import ConfigError

HEAD = "ajet:\n  task_reader:\n    jsonl_dataset_file:\n      training: {file_path: t.jsonl}\n  rollout:\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "t.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    return tmp_path


def load(folder: Path, rollout: str) -> object:
    file = folder / "c.yaml"
    file.write_text(HEAD + rollout)
    return load_config(file, backbone="debug").ajet.rollout.agent


def test_an_agent_takes_the_place_of_a_workflow(folder: Path) -> None:
    agent = load(folder, "    agent: {type: react, tools: [calculator, {calculator: {name: c}}], max_steps: 3}\n")
    assert agent.tools == ["calculator", {"calculator": {"name": "c"}}] and agent.max_steps == 3  # type: ignore[attr-defined]


def test_a_program_makes_as_many_calls_as_multi_turn_allows(folder: Path) -> None:
    assert load(
        folder, "    sandbox: bubblewrap\n    multi_turn: {max_steps: 3}\n    agent: {type: cli, program: codex}\n"
    )


@pytest.mark.parametrize(
    ("rollout", "says"),
    [
        ("    temperature: 1.0\n", "or a ready agent"),
        ("    agent: {type: react, max_step: 3}\n", "did you mean `ajet.rollout.agent.max_steps`"),
        ("    agent: {type: react, max_steps: 0}\n", "at least 1"),
        ("    agent: {type: react, max_steps: 31}\n", "rollout.multi_turn.max_steps allows 30"),
        ("    agent: {type: react, tools: [bash, {python: {}}]}\n", "bash, python of the agent works in a sandbox"),
        ("    agent: {type: coding}\n", "set rollout.sandbox"),
        ("    agent: {type: react, format: xml}\n", "`auto`, `native` or `text`"),
        ("    agent: {type: my_agents.py->Mine}\n", "no file 'my_agents.py'"),
        ("    sandbox: bubblewrap\n    agent: {type: cli}\n", "none is named"),
        ("    agent: {type: cli, program: codex}\n", "there is no sandbox"),
        ("    sandbox: {network: none}\n    agent: {type: cli, program: codex}\n", "this one has no network"),
        ("    sandbox: {kind: kubernetes, image: x}\n    agent: {type: cli, program: codex}\n", "a pod has no way"),
        ("    sandbox: bubblewrap\n    agent: {type: cli, program: codex, max_steps: 3}\n", "max_steps has no effect"),
        ("    sandbox: bubblewrap\n    agent: {type: cli, program: codx}\n", "did you mean `codex`?"),
        ("    agent: {type: react, command: codex}\n", "command has no effect with type: react"),
        ("    user_workflow: a.b->C\n    agent: {type: react}\n", "remove one of the two"),
    ],
)
def test_what_is_refused(folder: Path, rollout: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(folder, rollout)
    assert says in str(refused.value)
