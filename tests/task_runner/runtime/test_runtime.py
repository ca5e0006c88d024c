"""What a run checks before its first episode."""

from __future__ import annotations

from pathlib import Path

import pytest

from ajet.config import load_config
from ajet.schema.errors import ConfigError
from ajet.task_runner.runtime import Runtime

YAML = """
ajet:
  model: {path: tiny:qwen2-0.3m}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {training: {file_path: tasks.jsonl}}
  rollout: {user_workflow: agent.py->Agent}
  helper: {model: some-model}
"""


def test_a_helper_without_an_endpoint_ends_the_run_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "agent.py").write_text("raise AssertionError('not even imported')\n")
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    (tmp_path / "conf.yaml").write_text(YAML)
    runtime = Runtime(load_config(tmp_path / "conf.yaml"))
    with pytest.raises(ConfigError, match=r"some-model.*ajet.helper.base_url"):
        runtime.start()
