"""The examples of the page on environments, played with scripted replies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ajet import Task
from ajet.config import load_config
from ajet.task_runner.runtime import Runtime
from support.pages import ROOT

PAGE = (ROOT / "docs" / "environments.md").read_text()


def write_files(folder: Path) -> None:
    """The files that the page shows by name."""
    for name, source in re.findall(r'```python title="(\w+\.py)"\n(.*?)```', PAGE, re.DOTALL):
        (folder / name).write_text(source)


def test_a_class_and_its_player(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    head = re.search(r"```yaml\n(ajet:.*?)```", PAGE, re.DOTALL)
    assert head is not None
    more = "    engine: scripted\n    scripted_replies: replies.yaml\n  task_reader: {type: random_dummy}\n"
    Path("run.yaml").write_text(head[1] + more)
    Path("replies.yaml").write_text('["5", "9", "7"]')
    with Runtime(load_config("run.yaml", backbone="debug")) as runtime:
        episode = runtime.run(runtime.pool.run_episode(Task(task_id="t", metadata={"number": 7})))
    assert episode.failure is None and episode.reward == 1.0
    said = [message["content"] for call in episode.tree.calls for message in call.new_messages]
    assert said[0].startswith("Guess a number") and said[-1] == "No, lower."


def test_every_config_on_the_page_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENV_SERVICE_KEY", "k")
    write_files(tmp_path)
    configs = re.findall(r"```yaml\n(ajet:.*?)```", PAGE, re.DOTALL)
    for number, text in enumerate(configs):
        Path(f"{number}.yaml").write_text(text)
        load_config(f"{number}.yaml", backbone="debug", complete=False)
